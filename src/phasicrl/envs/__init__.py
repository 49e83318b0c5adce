"""Environments: one contract (`protocol`), one adapter for each back end, and `make_envs`, which picks it. Kind: effects."""
