"""Decodes from a bundle: opens and proves it, makes texts of steps, streams and traces them."""
