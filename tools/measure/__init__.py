"""The measurements of `bench`, `calibrate`, `profile` and `tune`, each in the module of its name, and their common
parts."""
