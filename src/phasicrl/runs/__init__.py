"""Files and output of a run: directory, checkpoints, lock, metrics, console."""
