"""What a target is asked for and gives back, and what that is made of: modules, steps, a precision."""
