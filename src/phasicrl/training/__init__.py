"""Training run: construction, timing, evaluation and saving, used by `algorithm.learn`."""
