"""Environments: one contract, one adapter for each back end. Kind: effects.

The contract is `protocol`; `make_envs` picks the adapter.
"""
