"""Machine: cores, packages, code version, signals."""
