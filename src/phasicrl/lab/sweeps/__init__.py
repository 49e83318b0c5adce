"""Sweeps: many trials in one folder, trained by any number of processes and machines."""
