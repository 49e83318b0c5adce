"""All that waits for a machine with a GPU, in pieces.

Tests, speed, speed beside CleanRL, and PPG on Procgen to 25M steps.

usage: python benchmarks/gpu.py [--minutes 9] [--cleanrl FOLDER] [--reference FILE] [--archive FILE]
    [--commit TEXT] [--only PIECE …] [--status] [--toy]

A call does as many steps as fit into its minutes, in the order of `docs/gpu.md`, and writes the
result of each as soon as it has it, under `benchmarks/results/gpu`; the next call goes on with what
is not there yet. Training stops after a phase, saves, and goes on from there. What is needed to go
on but is no result (the run under way, with its checkpoint) lies in the folder `runs` beside the
results, which git ignores.

`--archive` packs both after each step, into FILE.00, FILE.01, … of 15 MiB at most: `cat FILE.* |
tar xz -C benchmarks/results/gpu` puts them where a call on another machine goes on. `--commit` is
what the results are of, if there is no git. `--toy` does each kind of step on a CPU at a size of
seconds.

A step that fails twice is left out, and its reason is told; `--again` tries such steps once more.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from phasicrl.host.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
PIECES = ("tests", "bench", "versus", "train")
PART = 15 * 2**20
"""Bytes of one file of the archive."""
ATTEMPTS = 2
GRACE = 20.0
"""Seconds that a command may take longer than the call was given."""
PACK_EVERY = 180.0
"""Seconds of training between two archives."""
RESULTS_OF_RUN = ("config.json", "card.json", "metrics.jsonl")
Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        device: where.
        fields: of every measurement, beside its own.
        bench_seconds: of a measurement.
        num_envs: of the measurements, most wanted first.
        versus: works of `versus.py`.
        rounds: of each.
        games: to be trained on, in order.
        training: what differs from `procgen-ppg`.
        metric: of the curves.
    """

    device: str = "cuda"
    fields: tuple[str, ...] = ()
    bench_seconds: float = 4.0
    num_envs: tuple[int, int] = (64, 256)
    versus: tuple[str, ...] = ("procgen-ppo-gpu", "procgen-ppg-gpu")
    rounds: int = 3
    games: tuple[str, ...] = ("starpilot", "bigfish", "bossfight")
    training: dict[str, Any] = field(default_factory=dict)
    metric: str = "charts/episodic_return_100"


TOY = Sizes(
    device="cpu",
    fields=(
        "--model.channels", "4", "--model.blocks", "1", "--model.hidden-sizes", "8",
        "--ppo.num-steps", "8", "--ppo.num-minibatches", "2",
        "--compute.num-threads", "1", "--compute.micro-batch", "16",
    ),
    bench_seconds=0.01,
    num_envs=(4, 8),
    versus=("procgen-toy",),
    rounds=1,
    games=("starpilot",),
    training={
        "env.num_envs": 4, "model.channels": (4,), "model.blocks": 1, "model.hidden_sizes": (8,),
        "ppo.num_steps": 8, "ppo.num_minibatches": 2,
        "aux.every": 2, "aux.epochs": 1, "aux.num_minibatches": 2,
        "total_env_steps": 4 * 8 * 2 * 2 + 32,
        "compute.num_threads": 1,
    },
    metric="losses/entropy",  # there is no whole episode in so few steps
)  # fmt: skip


class StepError(RuntimeError):
    """A step failed; the message says why."""


def run_command(
    words: Sequence[str], *, seconds: float, log: Path, accept: Sequence[int] = (0,)
) -> None:
    """Run a command in the repository, with its output in a file.

    It and what it started are ended when its time is over.

    Raises:
        StepError: it took too long, or its exit code is none of `accept`.
    """
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=surroundings,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StepError(
                f"took longer than {seconds:.0f} s: {shlex.join(words)}\n{tail(log)}"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code not in accept:
        raise StepError(f"exit code {code}: {shlex.join(words)}\n{tail(log)}")


def tail(path: Path) -> str:
    """The end of a log."""
    return path.read_text(errors="replace")[-3000:]


@dataclass
class Session:
    """One call.

    Attributes:
        results: where they are.
        sizes: of everything.
        deadline: by `time.monotonic`.
        commit: what is measured.
        cleanrl: a checkout of CleanRL.
        reference: published curves.
        archive: name of the archive's parts.
        run: runs a command, as `run_command` does.
    """

    results: Path
    sizes: Sizes
    deadline: float
    commit: str
    cleanrl: Path | None = None
    reference: Path | None = None
    archive: Path | None = None
    run: Callable[..., None] = run_command

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def time_for(self, most: float) -> float:
        """Seconds for a command: what is left, with some grace, but no more than it can need.

        One that hangs leaves the rest to others.
        """
        return min(self.left + GRACE, most)

    @property
    def volatile(self) -> Path:
        """What is needed to go on, and no result."""
        return self.results / "runs"

    def log(self, name: str) -> Path:
        """Where a command's output goes."""
        return self.volatile / "logs" / f"{name}.log"

    def result(self, name: str) -> Result | None:
        """What a step found, if it has been done."""
        path = self.results / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def save(self, name: str, result: Result) -> None:
        """Keep what a step found, with what it was found on."""
        write_json(
            self.results / f"{name}.json",
            {**result, "about": about(self.commit, self.sizes.device)},
        )

    @property
    def attempts(self) -> dict[str, Any]:
        """Steps that failed or were cut off: how often, and why."""
        path = self.results / "attempts.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def pack(self) -> None:
        """Write the archive, if one is wanted."""
        if self.archive is not None:
            pack(self.results, self.archive)


@dataclass(frozen=True)
class Step:
    """Something to be done once.

    Attributes:
        name: of its result.
        piece: that it is of.
        seconds: that it needs; it is not begun with less.
        do: does it; a result with `done` false goes on in the next call.
    """

    name: str
    piece: str
    seconds: float
    do: Callable[[Session], Result]


def about(commit: str, device: str) -> Result:
    """Commit, time, device, versions."""
    return {
        "commit": commit,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine(device),
    }


@functools.cache  # asked while all is well: a GPU that has failed answers nothing
def machine(device: str) -> Result:
    """Device and versions."""
    import torch

    from phasicrl.host.machine import describe

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    more = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "system": platform.platform(),
    }
    return {"device": name, **describe(), **more, "torch": torch.__version__}


# --- tests


def run_tests(session: Session) -> Result:
    """The tests that need a GPU; which of them failed is a result."""
    report = session.volatile / "tests.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    # The suite's own settings ask for packages that may not be there.
    words = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_gpu.py",
        "tests/test_compute.py",
        "-q",
        "-k",
        "test_gpu or cuda or waited",
        "-o",
        "addopts=",
    ]
    words += [
        "-o",
        "filterwarnings=default",
        "-o",
        "minversion=7",
        "-o",
        "timeout=90",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    words += ["-n", "4"] if importlib.util.find_spec("xdist") else []
    session.run(words, seconds=session.time_for(300), log=session.log("tests"), accept=(0, 1))
    return read_junit(report)


def read_junit(path: Path) -> Result:
    """How many tests passed, and of those that did not the first lines."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failures: dict[str, str] = {}
    for case in cases:
        for found in (*case.iter("failure"), *case.iter("error")):
            failures[f"{case.get('classname')}::{case.get('name')}"] = (
                found.get("message") or found.text or ""
            )[:2000]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return {
        "passed": len(cases) - skipped - len(failures),
        "skipped": skipped,
        "failed": len(failures),
        "seconds": round(seconds, 1),
        "failures": failures,
    }


# --- speed

PRESETS = ("procgen-ppg", "procgen-ppo", "procgen-ppg-single")
PRECISIONS = ("fp32", "bf16")
WAYS = {"recorded": "on", "eager": "off"}


def bench_steps(sizes: Sizes) -> list[Step]:
    """Every combination; those that say most first."""
    few, many = sizes.num_envs
    first = list(itertools.product(PRESETS[:2], PRECISIONS, WAYS, (few,)))
    rest = [
        *itertools.product(PRESETS[2:], PRECISIONS, WAYS, (few,)),
        *itertools.product(PRESETS, PRECISIONS, WAYS, (many,)),
    ]
    return [
        Step(
            f"bench/{'-'.join(map(str, choice))}",
            "bench",
            60,
            lambda session, choice=choice: bench(session, *choice),
        )
        for choice in [*first, *rest]
    ]


def bench_words(sizes: Sizes, preset: str, precision: str, way: str, num_envs: int) -> list[str]:
    """The words after `phasicrl bench`, but for where it writes."""
    words = [
        preset,
        "--env.id",
        "procgen:starpilot",
        "--env.num-envs",
        str(num_envs),
        "--compute.device",
        sizes.device,
    ]
    words += [
        "--compute.compile",
        WAYS[way] if sizes.device == "cuda" else "off",
        "--compute.policy-precision",
        precision,
    ]
    aux = [] if preset == "procgen-ppo" else ["--compute.aux-precision", precision]
    small = (
        ["--aux.every", "2", "--aux.num-minibatches", "2", "--aux.epochs", "1"]
        if aux and sizes is TOY
        else []
    )
    return [*words, *aux, *small, *sizes.fields, "--seconds", str(sizes.bench_seconds)]


def bench(session: Session, preset: str, precision: str, way: str, num_envs: int) -> Result:
    """Measure one combination."""
    name = f"{preset}-{precision}-{way}-{num_envs}"
    output = session.volatile / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    words = bench_words(session.sizes, preset, precision, way, num_envs)
    session.run(
        [sys.executable, "-m", "phasicrl", "bench", *words, "--output", str(output)],
        seconds=session.time_for(180),
        log=session.log(f"bench-{name}"),
    )
    report = json.loads(output.read_text())
    output.unlink()
    return {
        "preset": preset,
        "precision": precision,
        "way": way,
        "num_envs": num_envs,
        "report": report,
    }


def trace(session: Session) -> Result:
    """Every kernel of a short phase, recorded; the file is in `runs`."""
    output, kernels = session.volatile / "trace.bench.json", session.volatile / "trace.json.gz"
    output.parent.mkdir(parents=True, exist_ok=True)
    words = bench_words(session.sizes, "procgen-ppg", "fp32", "recorded", session.sizes.num_envs[0])
    if session.sizes is not TOY:
        words += [
            "--ppo.num-steps",
            "32",
            "--aux.epochs",
            "1",
            "--aux.every",
            "2",
            "--aux.num-minibatches",
            "4",
        ]
    words += ["--trace", str(kernels), "--output", str(output)]
    session.run(
        [sys.executable, "-m", "phasicrl", "bench", *words],
        seconds=session.time_for(180),
        log=session.log("trace"),
    )
    report = json.loads(output.read_text())
    output.unlink()
    return {"bytes": kernels.stat().st_size, "notes": report["notes"], "report": report}


def bench_row(result: Result) -> Result:
    """One line of the table."""
    report, own = result["report"], result["about"]
    rates = {rate["name"]: rate for rate in report["rates"]}
    said = " | ".join(
        note
        for note in report["notes"]
        if "eagerly" in note or "recorded" in note or "compiled" in note
    )
    whole = rates["whole loop"]
    return {
        **{name: result[name] for name in ("preset", "precision", "way", "num_envs")},
        "whole_loop": round(whole["per_second"]), "least": round(whole["low"]),
        "most": round(whole["high"]),
        **{name.replace(" ", "_"): round(rates[name]["per_second"])
           for name in rates if name != "whole loop"},
        "gpu_gigabytes": round(report["peak_gpu_memory"] / 1e9, 2), "said": said,
        **{name: own[name] for name in ("device", "torch", "commit", "when")},
    }  # fmt: skip


def write_bench_table(results: Path) -> None:
    """`bench.csv`: a line for each measurement that is there."""
    rows = [
        bench_row(json.loads(path.read_text()))
        for path in sorted((results / "bench").glob("*.json"))
    ]
    if rows:
        with (results / "bench.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


# --- beside CleanRL


def versus(session: Session, work: str, rounds: int) -> Result:
    """Rounds of a work of `versus.py`, up to so many; earlier ones are kept."""
    if session.cleanrl is None:
        raise StepError("give --cleanrl FOLDER, a checkout of CleanRL")
    output = session.volatile / "versus"
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / "versus.py"),
        work,
        "--pairs",
        str(rounds),
        "--resume",
        "--output",
        str(output),
    ]
    words += ["--cleanrl", str(session.cleanrl), "--venvs", str(peers(session.volatile / "venvs"))]
    session.run(words, seconds=session.time_for(420), log=session.log(f"versus-{work}"))
    result = json.loads((output / f"{work}.json").read_text())
    whole = {run["contestant"] for run in result["runs"] if run["round"] == rounds - 1}
    if missing := {name for name, words in result["commands"].items() if words is not None} - whole:
        raise StepError(
            f"round {rounds} is without "
            f"{', '.join(sorted(missing))}\n{tail(session.log(f'versus-{work}'))}"
        )
    if image := next(iter(output.glob(f"{work}.png")), None):
        shutil.copy(image, session.results / image.name)
    return result


def peers(folder: Path) -> Path:
    """Where `versus.py` finds CleanRL's Python: this one, with the packages of PYTHONPATH."""
    python = folder / "cleanrl" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    packages = os.environ.get("PYTHONPATH", "")
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(packages)} exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return folder


# --- training


class Watch:
    """Saves after each phase, and stops if another phase would not fit.

    The checkpoint is small then, because the phase buffer is empty.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seconds: list[float] = []
        self._since = self._packed = time.monotonic()

    def __call__(self, run: Any, record: dict[str, float]) -> Literal["stop"] | None:
        """Called after each iteration."""
        if run.buffer.num_filled:  # what was done of this phase is lost, if it stops here
            return "stop" if self.session.left < -GRACE else None
        run.save()
        now = time.monotonic()
        self.seconds.append(now - self._since)
        if now - self._packed > PACK_EVERY:
            self.session.pack()
            self._packed = now
        self._since = time.monotonic()
        return "stop" if self.session.left < 1.15 * max(self.seconds[-3:]) else None


def training(sizes: Sizes, game: str, folder: Path) -> Any:
    """The configuration."""
    from phasicrl.presets import get_preset

    always = {
        "env.id": f"procgen:{game}", "output_dir": str(folder), "compute.device": sizes.device,
        "log.console": "off", "log.tensorboard": False,
        "checkpoint.every_minutes": None, "checkpoint.keep": 1,
    }  # fmt: skip
    return get_preset("procgen-ppg").with_updates({**always, **sizes.training})


def open_run(session: Session, game: str) -> Any:
    """The game's run: from its checkpoint, or from the start."""
    from phasicrl.runs.directory import RunDirectory
    from phasicrl.session.build import resume_run, start_run

    folder = session.volatile / "train" / game
    for config in sorted(folder.glob("*/config.json")):
        if RunDirectory(config.parent).checkpoints:
            return resume_run(config.parent)
        shutil.rmtree(config.parent)  # it never came to its first checkpoint
    return start_run(training(session.sizes, game, folder))


def train(session: Session, game: str) -> Result:
    """Train for what is left of the call's time."""
    from phasicrl.algorithm import learn

    before = session.result(f"train-{game}") or {"pieces": []}
    start, watch = time.monotonic(), Watch(session)
    with open_run(session, game) as run:
        begun = run.env_steps
        learn(run, watch)
        done = run.env_steps >= run.config.budget
        if done:
            # The rest of a last, unfinished phase: gigabytes that nobody will go on from.
            run.buffer.clear()
            run.finish()
        reached = run.collector.episodes.recent_mean
    saved = run.env_steps if done else checkpointed(run.directory)
    piece = {
        "from": begun,
        "to": saved,
        "seconds": round(time.monotonic() - start, 1),
        **about(session.commit, session.sizes.device),
    }
    result = {
        "game": game, "env_steps": saved, "budget": run.config.budget, "done": done,
        "return_of_last_100": round(reached, 3) if math.isfinite(reached) else None,
        "seconds_of_a_phase":
            round(max(watch.seconds, default=before.get("seconds_of_a_phase", 0.0)), 1),
        "pieces": [*before["pieces"], piece],
    }  # fmt: skip
    keep_curve(session, game, run.directory, result)
    return result


def checkpointed(directory: Path) -> int:
    """Steps of the newest checkpoint; 0 before the first."""
    from phasicrl.runs.directory import RunDirectory

    newest = RunDirectory(directory).checkpoints[-1:]
    return int(newest[0].name.removeprefix("step-")) if newest else 0


def keep_curve(session: Session, game: str, directory: Path, result: Result) -> None:
    """Copy what is worth keeping of a run, and draw its curve beside the published one.

    Why it cannot be drawn is noted.
    """
    from phasicrl.lab.analysis.plot import plot_runs

    folder = session.results / "train" / game
    folder.mkdir(parents=True, exist_ok=True)
    for name in RESULTS_OF_RUN:
        if (directory / name).is_file():
            shutil.copy(directory / name, folder / name)
    try:
        plot_runs(
            [folder],
            output=folder / "curve",
            metric=session.sizes.metric,
            reference=session.reference,
            title=f"procgen-ppg on {game}, easy",
        )
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
        result["no_curve"] = str(error)


# --- all of it


def all_steps(session: Session) -> list[Step]:
    """Everything, in order."""
    sizes = session.sizes
    speed = bench_steps(sizes)

    def beside(number: int) -> list[Step]:
        return [
            Step(
                f"{work}-{number}",
                "versus",
                150,
                lambda session, work=work: versus(session, work, number),
            )
            for work in sizes.versus
            if number <= sizes.rounds
        ]

    def learned(game: str) -> Step:
        known = (session.result(f"train-{game}") or {}).get("seconds_of_a_phase") or 60.0
        needed = 1.15 * known + 30 if sizes is not TOY else 0.0
        return Step(f"train-{game}", "train", needed, lambda session: train(session, game))

    first, *others = map(learned, sizes.games)
    steps = [
        Step("tests", "tests", 120, run_tests),
        *speed[:8],
        Step("trace", "bench", 60, trace),
        *beside(1),
        first,
        *speed[8:],
        *beside(2),
        *beside(3),
        *others,
    ]
    if sizes is not TOY:
        return steps
    left_out = (*speed[2:8], *speed[10:])
    return [Step(step.name, step.piece, 0.0, step.do) for step in steps if step not in left_out]


def is_done(session: Session, step: Step) -> bool:
    """Whether nothing of a step is left."""
    found = session.result(step.name)
    return found is not None and found.get("done", True)


def do(session: Session, step: Step) -> None:
    """Do a step and keep its result.

    Of one that fails its reason is kept, and how often it was tried.
    """
    path, attempts = session.results / "attempts.json", session.attempts
    before = attempts.get(step.name, {"times": 0})
    # Kept in case it is.
    attempts[step.name] = {"times": before["times"] + 1, "why": "it was cut off"}
    write_json(path, attempts)
    start = time.monotonic()
    print(f"{step.name} …", flush=True)
    try:
        session.save(step.name, step.do(session))
        del attempts[step.name]
        print(f"{step.name}: {time.monotonic() - start:.0f} s", flush=True)
    except Exception as error:  # whatever it is, the other steps are done
        attempts[step.name] |= {
            "why": f"{type(error).__name__}: {error}",
            "about": about(session.commit, session.sizes.device),
        }
        print(f"{step.name} failed: {error}", flush=True)
    write_json(path, attempts)
    write_bench_table(session.results)
    session.pack()


def status(session: Session, steps: Sequence[Step]) -> Iterator[str]:
    """A line for each step."""
    attempts = session.attempts
    for step in steps:
        found, failed = session.result(step.name), attempts.get(step.name)
        said = "done" if is_done(session, step) else "waits"
        if found is not None and not found.get("done", True):
            said = f"{found['env_steps']:,} of {found['budget']:,} steps"
        if failed is not None:
            said += f", failed {failed['times']} times: {failed['why'].splitlines()[0][:200]}"
        yield f"{step.name:<45} {said}"


def call(session: Session, *, only: Sequence[str], again: bool) -> None:
    """Do what fits."""
    session.results.mkdir(parents=True, exist_ok=True)
    if again:
        (session.results / "attempts.json").unlink(missing_ok=True)
    for step in all_steps(session):
        if step.piece not in only or is_done(session, step):
            continue
        tried = session.attempts.get(step.name, {"times": 0})["times"]
        if tried < ATTEMPTS and session.left > step.seconds:
            do(session, step)


def pack(results: Path, archive: Path) -> None:
    """Results and what is needed to go on, in parts.

    Checkpoints of finished runs, weights beside a checkpoint, and what can be made again stay out.
    """

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(entry.name).parts
        out = parts[:3] == ("runs", "versus", "work") or parts[:2] == ("runs", "venvs")
        if parts[:2] == ("runs", "train") and len(parts) > 4:
            out = parts[4] == (
                "checkpoints" if is_finished(results, parts[2]) else "agent.safetensors"
            )
        return None if out else entry

    with tempfile.NamedTemporaryFile(dir=archive.parent) as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as packed:
            packed.add(results, ".", filter=wanted)
        size = file.tell()
        file.seek(0)
        for old in archive.parent.glob(f"{archive.name}.[0-9][0-9]"):
            old.unlink()
        for number in range(-(-size // PART)):
            archive.with_name(f"{archive.name}.{number:02d}").write_bytes(file.read(PART))


def is_finished(results: Path, game: str) -> bool:
    """Whether a game's training has come to its end."""
    path = results / f"train-{game}.json"
    return path.is_file() and json.loads(path.read_text())["done"]


def write_json(path: Path, values: Any) -> None:
    """Write a file at once, never in part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(temporary, path)


def main(words: Sequence[str] | None = None, *, run: Callable[..., None] = run_command) -> None:
    """What the command line asks for."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=PIECES)
    for name in ("cleanrl", "archive"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), default=None)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--commit", default=None)
    for name in ("status", "again", "toy"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(words)
    session = Session(
        options.results.resolve(), TOY if options.toy else Sizes(), start + 60 * options.minutes,
        options.commit or commit(ROOT) or "unknown",
        options.cleanrl, options.reference, options.archive, run,
    )  # fmt: skip
    if not options.status:
        import torch

        if session.sizes.device == "cuda" and not torch.cuda.is_available():
            sys.exit(
                "there is no GPU that PyTorch can use here; --toy shows on a CPU what would be done"
            )
        machine(session.sizes.device)
        call(session, only=options.only, again=options.again)
    print("\n".join(status(session, all_steps(session))))


if __name__ == "__main__":
    main()
