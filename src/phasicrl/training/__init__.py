"""One training run: how it is built, timed, evaluated and saved. `algorithm.learn` drives it."""
