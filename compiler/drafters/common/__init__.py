"""Shared parts of drafters with a cache of the accepted text."""
