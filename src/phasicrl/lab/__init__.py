"""The lab: work with many runs and trained agents. The core never imports it."""
