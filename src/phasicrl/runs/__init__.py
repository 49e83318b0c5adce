"""The files of a run and what it says: directory, checkpoints, lock, metrics, display."""
