"""Engines that decode from a bundle, one file each, known by name: registry.py has them all, choice.py opens one."""
