"""Check that the package leaves its process as it was: `main` fails if anything changed.

Runs in a process of its own: pytest, its plugins and beartype change the process, too.
"""

import contextlib
import gc
import importlib.util
import logging
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium  # noqa: F401  # adds a filter for warnings
import numpy as np
import torch
import torch.fx.experimental.proxy_tensor

SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {"compute.deterministic": True, "compute.num_threads": 1, "log.tensorboard": True},
    "async": {"env.vectorization": "async", "env.num_envs": 2, "ppo.num_steps": 16,
              "compute.num_threads": 2},
}  # fmt: skip


def state() -> dict[str, Any]:
    """Return everything of the process that a library could change."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "env-watchdog":
            thread.join(1)  # `close` does not wait for its end
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.Logger.manager.loggerDict)]
    children = list[str]()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a native thread has ended
            children += path.read_text().split()
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return {
        "torch threads": torch.get_num_threads(),
        "deterministic mode": torch.get_deterministic_debug_mode(),
        "default dtype": torch.get_default_dtype(),
        "torch generator": torch.random.get_rng_state().tolist(),
        "NumPy generator": str(np.random.get_state(legacy=False)),
        "Python generator": random.getstate(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment variables": dict(os.environ),
        "recursion limit": sys.getrecursionlimit(),
        "warning filters": list(warnings.filters),
        "logging handlers": {each.name: list(each.handlers) for each in loggers if each.handlers},
        "child processes": sorted(children),
        "open files": sorted(re.sub(r"\d+[-\w]*", "N", file) for file in files),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "working directory": Path.cwd(),
    }


@contextlib.contextmanager
def unchanged(what: str) -> Iterator[None]:
    """Check that the block leaves the process as it found it."""
    before = state()
    yield
    after = state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"{what} changed {changed}"


def fail(*_: object) -> None:
    """Fail, as a user's function may."""
    raise KeyError("the tracker is full")


def interrupt(*_: object) -> None:
    """Send a signal in an iteration."""
    signal.raise_signal(signal.SIGTERM)


def train_all_ways(name: str, folder: Path) -> None:
    """Train, evaluate, fail, and be interrupted."""
    from phasicrl import evaluate, train
    from phasicrl.system.signals import PreemptedExit
    from tests.helpers import corridor, tiny, tiny_aux

    config = tiny(folder, aux=tiny_aux())
    config = config.with_updates({"total_env_steps": 64} | SETTINGS[name])
    train(config, make_env=corridor)  # imports what it needs, starts multiprocessing's helpers
    gc.collect()
    gc.freeze()  # each later collection skips what the imports made
    with unchanged("a run"):
        directory = train(config, make_env=corridor).directory
    with unchanged("an evaluation"):
        evaluate(directory, episodes=1, make_env=corridor)
    with unchanged("a failed run"), contextlib.suppress(KeyError):
        train(config, make_env=corridor, callbacks=fail)
    with unchanged("an interrupted run"), contextlib.suppress(PreemptedExit):
        train(config, make_env=corridor, callbacks=interrupt)
    with unchanged("a run that cannot start"), contextlib.suppress(ValueError):
        train(config.with_updates({"model.encoder": "impala"}), make_env=corridor)


def train_in_threads(folder: Path) -> None:
    """Train in a thread, and beside another run, which is refused and disturbs nothing."""
    from phasicrl import train
    from tests.helpers import corridor, tiny

    config, errors = tiny(folder), list[str]()

    def in_thread(config: Any) -> None:
        def work() -> None:
            try:
                train(config, make_env=corridor)
            except ValueError as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    alone = train(config, make_env=corridor)
    with unchanged("a run in a thread"):
        in_thread(config)
    assert not errors
    with unchanged("two runs in two threads"):
        run = train(config, make_env=corridor, callbacks=lambda *_: in_thread(config))
    assert len(errors) == config.num_iterations and "another thread" in errors[0], errors
    for name, tensor in run.agent.state_dict().items():
        assert torch.equal(tensor, alone.agent.state_dict()[name]), name


def main(folder: Path) -> None:
    """Check the import, and runs of every kind."""
    with unchanged("the import"):
        import phasicrl  # noqa: F401
    if importlib.util.find_spec("envpool") is not None:
        from phasicrl.envs.envpool import import_envpool

        variables = os.environ | {"QT_NO_GLIB": "1"}  # without glib, Qt needs it
        import_envpool(procgen=True)
        assert variables.items() >= os.environ.items(), "the import of EnvPool left variables"
        backend = dict.get(importlib.import_module("matplotlib").rcParams, "backend")
        assert "MPLBACKEND" in os.environ or backend != "Agg", "the user's plots would not appear"
    for name in SETTINGS:
        train_all_ways(name, folder)
    train_in_threads(folder)
