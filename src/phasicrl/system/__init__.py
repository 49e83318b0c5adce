"""The machine: what it has, whether it is set up, how fast it is."""
