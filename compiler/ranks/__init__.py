"""One model on several devices: which weight is split along which axis, and what joins the parts."""
