"""What is done with many runs and trained agents. The core never imports it."""
