"""What runs have found, put together: curves, scores, comparisons with published results."""
