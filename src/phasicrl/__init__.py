"""Proximal Policy Optimization and Phasic Policy Gradient, by one engine.

PPO is PPG without its auxiliary phase. `train(get_preset("procgen-ppg"))` trains;
`phasicrl.algorithm` is the page to read first. Names are imported when they are first used, so that
`import phasicrl` and the command line's help do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasicrl.algorithm import resume, train
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
    from phasicrl.session.evaluate import evaluate

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
    "evaluate": "session.evaluate",
    "get_preset": "presets",
    "resume": "algorithm",
    "train": "algorithm",
}
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
