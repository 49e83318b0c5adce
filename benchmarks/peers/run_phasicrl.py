"""Trains with phasicrl and says when each iteration was done. usage: run_phasicrl.py PRESET [FIELDS]"""

from __future__ import annotations

import math
import sys
import time

from phasicrl import train
from phasicrl.cli import parse_config

config = parse_config(sys.argv[1:])
config = config.changed({"log.console": "off", "checkpoint.every_minutes": None})


def mark(run, record):
    """One line an iteration; time to say it is the same for everybody."""
    reached = record.get("charts/episodic_return_100", math.nan)
    print(f"@ {run.env_steps} {time.time()} {reached}", flush=True)


print(f"@ 0 {time.time()} nan", flush=True)
run = train(config, on_iteration=mark)
