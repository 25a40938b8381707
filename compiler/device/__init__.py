"""What a step costs on a device that is not here: an analytic model."""
