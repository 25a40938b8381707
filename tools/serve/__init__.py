"""The HTTP service: one process that speaks to clients, and one that decodes for each bundle."""
