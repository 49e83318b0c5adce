"""Environments: one contract (`protocol`) and an adapter for each back end. Kind: effects."""
