"""What `bench`, `calibrate`, `profile` and `tune` measure, each in the module of its name, and what these share."""
