"""Execution of the arithmetic: device, threads, precision, compiled steps."""
