"""Films of an agent, and tables of the steps of its episodes."""
