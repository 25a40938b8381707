"""Targets: a lowering's request and result, and their parts: modules, steps, a precision."""
