"""Runs two engines in lockstep and tells them apart."""
