"""Proximal Policy Optimization (PPO) and Phasic Policy Gradient (PPG) in PyTorch.

PPO is PPG without its auxiliary phase. `train(get_preset("procgen-ppg"))` trains an agent; read
`phasicrl.algorithm` first. Functions that need torch are imported on first use, so that `import
phasicrl` and `phasicrl --help` are fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phasicrl.config import (
    ActionConfig,
    AuxConfig,
    CheckpointConfig,
    ComputeConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    ObsNormConfig,
    PPOConfig,
    RewardNormConfig,
    ValueNormConfig,
)
from phasicrl.presets import get_preset

if TYPE_CHECKING:
    from phasicrl.algorithm import resume, train
    from phasicrl.training.acting import load
    from phasicrl.training.evaluate import evaluate
    from phasicrl.training.run import Callbacks

_MODULES = {
    "Callbacks": "training.run", "evaluate": "training.evaluate", "load": "training.acting",
    "resume": "algorithm", "train": "algorithm",
}  # fmt: skip
__all__ = [
    "ActionConfig", "AuxConfig", "Callbacks", "CheckpointConfig", "ComputeConfig", "Config",
    "EnvConfig", "EvaluationConfig", "LogConfig", "ModelConfig", "ObsNormConfig", "PPOConfig",
    "RewardNormConfig", "ValueNormConfig", "evaluate", "get_preset", "load", "resume", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name not in _MODULES:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'phasicrl' has no attribute {name!r}; public names: {known}")
    return getattr(import_module(f"phasicrl.{_MODULES[name]}"), name)
