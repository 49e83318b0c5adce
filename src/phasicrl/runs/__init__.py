"""A run on disk and in memory: its directory, checkpoints, metrics and display."""
