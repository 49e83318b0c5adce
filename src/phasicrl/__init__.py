"""Proximal Policy Optimization and Phasic Policy Gradient, by one engine.

PPO is PPG without its auxiliary phase. `train(get_preset("procgen-ppg"))` trains;
`phasicrl.algorithm` is the page to read first. What needs torch is imported when it is first used,
so that `import phasicrl` and the command line's help do not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from phasicrl.presets import get_preset

if TYPE_CHECKING:
    from phasicrl.algorithm import resume, train
    from phasicrl.training.evaluate import evaluate

_HOME = {"evaluate": "training.evaluate", "resume": "algorithm", "train": "algorithm"}
__all__ = [
    "ActionConfig", "AuxConfig", "Config", "EnvConfig", "ModelConfig", "ObsNormConfig", "PPOConfig",
    "RewardNormConfig", "ValueNormConfig", "evaluate", "get_preset", "resume", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(
            f"module 'phasicrl' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    return getattr(import_module(f"phasicrl.{_HOME[name]}"), name)
