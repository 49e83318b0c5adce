"""Proximal Policy Optimization and Phasic Policy Gradient: one engine, in which PPO is PPG without its auxiliary phase.

`train(get_preset("procgen-ppg"))` trains; `phasicrl.train` is the page to read first. Names are imported when they are first used, so that
`import phasicrl` and the command line's help do not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasicrl.config import (
        ActionConfig,
        AuxConfig,
        Config,
        EnvConfig,
        ModelConfig,
        ObsNormConfig,
        PPOConfig,
        RewardNormConfig,
        ValueNormConfig,
    )
    from phasicrl.evaluate import evaluate
    from phasicrl.presets import get_preset
    from phasicrl.train import resume, train

_HOME = {
    "ActionConfig": "config",
    "AuxConfig": "config",
    "Config": "config",
    "EnvConfig": "config",
    "ModelConfig": "config",
    "ObsNormConfig": "config",
    "PPOConfig": "config",
    "RewardNormConfig": "config",
    "ValueNormConfig": "config",
    "evaluate": "evaluate",
    "get_preset": "presets",
    "resume": "train",
    "train": "train",
}
__all__ = [
    "ActionConfig", "AuxConfig", "Config", "EnvConfig", "ModelConfig", "ObsNormConfig", "PPOConfig", "RewardNormConfig", "ValueNormConfig",
    "evaluate", "get_preset", "resume", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'phasicrl' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(f"phasicrl.{_HOME[name]}"), name)


class _Package(ModuleType):
    """Keeps `phasicrl.train` the function: importing the module of that name would otherwise put itself in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
