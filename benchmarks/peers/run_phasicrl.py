"""Train with phasicrl, and print a mark after each iteration.

usage: run_phasicrl.py [--marks NUMBER] [--tensors DEVICE] PRESET [FIELDS]

With `--marks` it stops after so many iterations, whatever the budget; with `--tensors` the
environment is CartPole as tensors on a device, examples/tensor_cartpole.py.
"""

import functools
import importlib
import math
import sys
import time
from pathlib import Path

from phasicrl import train
from phasicrl.cli import parse_config

words = sys.argv[1:]
most = math.inf
if words[0] == "--marks":
    most, words = int(words[1]), words[2:]
make_vector_env = None
if words[0] == "--tensors":
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    kind = importlib.import_module("tensor_cartpole").TensorCartPole
    make_vector_env, words = functools.partial(kind, device=words[1]), words[2:]
config = parse_config(words)
config = config.with_updates({"log.console": "off", "checkpoint.every_minutes": None})


def mark(run, record):
    """Print steps, time and mean return, as every runner does."""
    reached = record.get("charts/episodic_return_100", math.nan)
    print(f"@ {run.env_steps} {time.time()} {reached}", flush=True)
    if run.iteration >= most:
        sys.exit()


print(f"@ 0 {time.time()} nan", flush=True)
run = train(config, callbacks=mark, make_vector_env=make_vector_env)
