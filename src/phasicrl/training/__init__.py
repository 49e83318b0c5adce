"""A training session: what `algorithm.learn` orders about, how it comes into being and ends."""
