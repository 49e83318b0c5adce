"""Run what waits for a machine with a GPU: tests, speed, speed beside CleanRL, PPG to 25M steps.

usage: python benchmarks/gpu.py [--minutes 9] [--cleanrl FOLDER] [--results FOLDER] [--toy]

A call runs as many steps as fit into its minutes, in the order of `steps`, and skips those whose
result is there; the next call continues, on this machine or on another one that has the
results folder. A failed step leaves NAME.failed in the folder `logs` and is skipped until that file
is removed. `--toy` runs each kind of step on a CPU, at a size of seconds. mjlab's step is left out
where mjlab is not installed.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import tyro

from phasicrl.algorithm import resume, train
from phasicrl.cli import parse_config
from phasicrl.runs.directory import RunDirectory
from phasicrl.system.machine import find_commit, get_versions, num_cores, processor
from phasicrl.training.run import Run

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ("procgen-ppo", "procgen-ppg-single")
PHASE = 524_288
"""Environment steps of a phase."""
TOY = (
    "--model.channels 4 --model.blocks 1 --model.hidden-sizes 8 --ppo.num-steps 8 "
    "--ppo.num-minibatches 2 --compute.num-threads 1"
)
TOY_PHASE = "--aux.every 2 --aux.epochs 1 --aux.num-minibatches 2"
# The suite's own settings ask for plugins that may not be there.
TESTS = (
    "-m pytest tests/test_gpu.py tests/execution/test_executor.py -q "
    "-k '(cuda or a_gpu) and not compiled_for' -o addopts= -o filterwarnings=default "
    f"-o minversion=7 -p no:cacheprovider {'-n 8' if find_spec('xdist') else ''}"
)


def bench_words(preset: str, precision: str, compiled: str, *, toy: bool) -> str:
    """Return the words after `phasicrl bench`, but for the output."""
    words = f"{preset} --env.id procgen:starpilot --compute.policy-precision {precision} "
    if preset != "procgen-ppo":
        words += f"--compute.aux-precision {precision} {TOY_PHASE if toy else ''} "
    if toy:
        return f"{words} {TOY} --env.num-envs 4 --compute.compile off --seconds 0.01"
    return f"{words} --compute.device cuda --compute.compile {compiled} --seconds 4"


def steps(cleanrl: Path | None, results: Path, *, toy: bool) -> list[tuple[str, float, str]]:
    """Return name of the result, seconds needed, and command of each step; training has none."""
    bench: list[tuple[str, float, str]] = []
    cases = list(itertools.product(PRESETS, ("fp32", "bf16"), ("on", "off")))
    for case in cases[:1] if toy else cases:
        name = "bench/{}-{}-compile-{}.json".format(*case)
        words = f"-m phasicrl bench {bench_words(*case, toy=toy)} --output {results / name}"
        bench.append((name, 60.0, words))
    trace = "trace.json.gz"
    _, _, words = bench[0]
    words = f"{words} --trace {results / trace} --output {results / 'trace-bench.json'}"
    shorter = "" if toy else " --ppo.num-steps 32 --aux.every 2 --aux.num-minibatches 4"

    def compare(work: str) -> tuple[str, float, str]:
        words = f"benchmarks/versus.py {work} --pairs {1 if toy else 3} "
        words += f"--cleanrl {cleanrl} --venvs {results / 'venvs'} " if cleanrl else ""
        return f"versus/{work}.json", 450.0, f"{words}--output {results / 'versus'}"

    end = "toy" if toy else "gpu"
    procgen = ("procgen-toy",) if toy else ("procgen-ppo-gpu", "procgen-ppg-gpu")
    simulated = ("tensors", "mjlab") if find_spec("mjlab") else ("tensors",)
    return [
        ("tests.xml", 200.0, f"{TESTS} --junitxml={results / 'tests.xml'}"),
        *(map(compare, procgen) if cleanrl else ()),
        *bench,
        *(compare(f"{kind}-{end}") for kind in simulated),
        (trace, 60.0, words + shorter),
        ("train/starpilot/done", 90.0, ""),  # at least a phase
    ]


def run_command(words: str, log: Path, seconds: float) -> None:
    """Run a program of this Python in the repository, with its output in a file.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, *shlex.split(words)], cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
            stdout=file, stderr=file, timeout=seconds, check=True,
        )  # fmt: skip


def train_until(deadline: float, game: str, folder: Path, *, toy: bool) -> bool:
    """Train on a game, and stop after a phase if the next one would end after the deadline.

    The phase buffer is empty then, so that the checkpoint is small.

    Returns:
        Whether the run is finished.
    """
    ends = [time.monotonic()]

    def stop_after_phase(run: Run, record: dict[str, float]) -> Literal["stop"] | None:
        if run.buffer.num_filled:
            return None
        run.save()
        ends.append(time.monotonic())
        longest = max(after - before for before, after in itertools.pairwise(ends))
        return "stop" if ends[-1] + 1.15 * longest > deadline else None

    found = [RunDirectory(path.parent) for path in folder.glob("*/config.json")]
    if runs := [run.path for run in found if run.checkpoints]:
        run = resume(runs[0], callbacks=stop_after_phase)
    else:
        words = f"procgen-ppg --env.id {game} --output-dir {folder} --log.console off"
        words += " --log.no-tensorboard --checkpoint.every-minutes none --checkpoint.keep 1"
        if toy:
            words += f" {TOY} {TOY_PHASE} --env.num-envs 4 --total-env-steps {2 * 2 * 32}"
        else:
            words += f" --compute.device cuda --total-env-steps {48 * PHASE}"
        run = train(parse_config(words.split()), callbacks=stop_after_phase)
    return run.env_steps >= run.config.budget


def link_python(folder: Path) -> None:
    """Let `versus.py` find this Python, with the packages of PYTHONPATH, as CleanRL's."""
    python = folder / "cleanrl" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    packages = shlex.quote(os.environ.get("PYTHONPATH", ""))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)


def main(
    minutes: float = 9.0,
    cleanrl: Path | None = None,
    results: Path = ROOT / "benchmarks" / "results" / "gpu",
    toy: bool = False,
) -> None:
    """Run the steps that fit into the time."""
    deadline, results = time.monotonic() + 60 * minutes, results.resolve()
    for name in ("bench", "logs"):
        (results / name).mkdir(parents=True, exist_ok=True)
    about = {"commit": find_commit(ROOT), "processor": processor(), "cores": num_cores()}
    about |= get_versions()
    (results / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    link_python(results / "venvs")
    if not find_spec("mjlab"):
        print("mjlab is left out: it is not installed here", flush=True)
    for name, seconds, words in steps(cleanrl and cleanrl.resolve(), results, toy=toy):
        left = deadline - time.monotonic()
        log = results / "logs" / f"{name.replace('/', '-')}.log"
        failed = log.with_suffix(".failed")
        if (results / name).exists() or failed.exists() or left < (0 if toy else seconds):
            continue
        print(f"{name} …", flush=True)
        try:
            if words:
                run_command(words, log, max(left, seconds))
                (results / name).stat()  # a comparison without a contestant ends without an error
            elif train_until(deadline, Path(name).parent.name, (results / name).parent, toy=toy):
                (results / name).touch()
        except Exception as error:  # the other steps are run whatever it is
            failed.write_text(f"{error}\n")
            print(f"{name} failed: {error}", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
