"""Teachers: configuration, checkpoint and network, one file a family."""
