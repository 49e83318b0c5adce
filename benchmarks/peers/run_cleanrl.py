"""Run a script of CleanRL as it is, and print a mark after each iteration.

usage: run_cleanrl.py [--marks NUMBER] [--keep-memory] [--envpool] SCRIPT [FLAGS]

With `--marks` it stops after so many iterations, whatever the budget.

With `--envpool` one thing is swapped: the constructor of the environments, which
`envpool_constructors` replaces by EnvPool's. With `--keep-memory` the C library is asked to keep
freed memory, which has the effect of preloading tcmalloc or jemalloc, and is what phasicrl does.
"""

import builtins
import ctypes
import math
import re
import runpy
import sys
import time
from collections import deque
from pathlib import Path

words, most = sys.argv[1:], math.inf
if words[0] == "--marks":
    most, words = int(words[1]), words[2:]
if words[0] == "--keep-memory":
    for number, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(number, value)
    words = words[1:]
if words[0] == "--envpool":
    import envpool_constructors

    words = words[1:]
    envpool_constructors.install()
flags = dict(zip(words[1::2], words[2::2], strict=True))
batch = int(flags["--num-envs"]) * int(flags["--num-steps"])
state = {"iterations": 0}
recent: deque[float] = deque(maxlen=100)
shout = builtins.print


def hear(*args: object, **options: object) -> None:
    """Read CleanRL's lines: `SPS: …` once an iteration, and the return of each episode.

    Print our mark for each iteration, with the mean of the last returns.
    """
    text = " ".join(map(str, args))
    if text.startswith("SPS:"):
        state["iterations"] += 1
        mean = sum(recent) / len(recent) if recent else float("nan")
        shout(f"@ {state['iterations'] * batch} {time.time()} {mean}", flush=True)
        if state["iterations"] >= most:
            sys.exit()
    elif found := re.search(r"episodic_return=\[?([-+.\deE]+)", text):
        recent.append(float(found[1]))


builtins.print = hear
sys.argv = words
sys.path.insert(0, str(Path(words[0]).parent))
shout(f"@ 0 {time.time()} nan", flush=True)
runpy.run_path(words[0], run_name="__main__")
