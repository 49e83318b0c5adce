"""What is done with trained agents and many runs: evaluation, videos, studies."""
