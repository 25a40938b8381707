"""One model on several devices: the axis along which each weight is split, and the joining of the parts."""
