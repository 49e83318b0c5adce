"""Analysis of runs: curves, scores, comparisons with published results, reports."""
