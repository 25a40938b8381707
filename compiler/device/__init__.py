"""The cost of a step on a device that is not here: an analytic model."""
