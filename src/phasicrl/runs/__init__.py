"""Runs: their directories, checkpoints, metrics and display, and what a run is made of."""
