"""Experiments: suites of the papers' comparisons, and trials over seeds."""
