"""Training beside other work on this machine.

Alone, beside one busy process, and two equal runs at once.

usage: python benchmarks/contention.py OUT.csv [--code NAME=FOLDER[,VARIABLE=VALUE…] …]
           [--works NAME …] [--situations NAME …] [--rounds 3] [--seconds 8]
for example: python benchmarks/contention.py OUT.csv --code before=../before/src --code after=src

A round starts two equal trainings of each work with each code, in random order, of which the second
rests except in the situation `two`. So all situations are measured in the same processes, one after
the other in random order. Iterations are short, with the minibatches of the preset, so that a
situation shows at once. `--code` names folders with the package `phasicrl` and variables of the
environment; without it, the package beside this file.

Situations: `alone`; `nice 19`: beside an endless loop of the lowest priority; `equal`: beside one
of the same priority; `session`: beside one in a session of its own, to which Linux gives as much as
to all threads of the training (autogroup), whatever its priority; `two`: both trainings, whose
steps are added up. The rate is that of seconds in which processes other than these took less than a
tenth of a core. A row of OUT.csv is one situation of one pair of trainings, with the commit of its
code; further rounds are added to a file that is there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PICTURES = "--compute.micro-batch 64 --compute.compile off --total-env-steps 100000000"
WORKS = {
    "quickstart": "quickstart --ppo.num-steps 8 --ppo.num-minibatches 1 --aux.every 2 "
    f"--aux.iterations-per-epoch 1 --compute.aux-precision bf16 {_PICTURES}",
    "procgen-ppo": "procgen-ppo --env.num-envs 16 --ppo.num-steps 16 "
    f"--ppo.num-minibatches 4 {_PICTURES}",
    "cartpole": "cartpole-ppo --compute.compile on --total-env-steps 1000000000",
    "halfcheetah": "compat-cleanrl-ppo-continuous --env.id envpool:HalfCheetah-v4 "
    "--env.num-envs 16 --ppo.num-steps 128 --compute.compile on --total-env-steps 1000000000",
}
SITUATIONS = ("alone", "nice 19", "equal", "session", "two")
QUIET = 0.1
"""Cores' time of other processes from which a second does not count."""
LOOP = [sys.executable, "-c", "while True: pass"]
FIELDS = (
    "work", "code", "round", "situation", "steps_per_second", "seconds", "of_others", "commit",
)  # fmt: skip


class Training:
    """A training in a process of its own, which tells its steps at the end of each phase."""

    def __init__(self, work: str, code: str, seed: int, folder: str) -> None:
        source, *variables = code.split(",")
        surroundings = (
            os.environ
            | {"PYTHONPATH": str(Path(source).resolve())}
            | dict(pair.split("=", 1) for pair in variables)
        )
        self.rest = Path(folder) / f"rest-{time.monotonic_ns()}"
        words = [str(self.rest), *WORKS[work].split(), "--seed", str(seed), "--output-dir", folder]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--train", *words],
            env=surroundings,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.marks: list[tuple[float, int]] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@ "):
                at, steps = line.split()[1:]
                self.marks.append((float(at), int(steps)))

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def let_rest(self) -> None:
        """Let it rest after the phase that it is in, and wait for that."""
        resting = self.rest.with_suffix(".resting")
        resting.unlink(missing_ok=True)
        self.rest.touch()
        while not resting.exists() and self.process.poll() is None:
            time.sleep(0.02)

    def wait(self, moment: float, marks: int = 1, limit: float = 300.0) -> None:
        """Wait until it has told so many marks after a moment.

        Raises:
            RuntimeError: the training has ended, or it took too long.
        """
        while bisect(self.marks, (moment, 0)) > len(self.marks) - marks:
            time.sleep(0.02)
            if self.process.poll() is not None or time.monotonic() > moment + limit:
                raise RuntimeError(
                    f"the training told nothing for {limit:g} s, or ended: {self.process.args}"
                )

    def steps_until(self, moment: float) -> float:
        """Steps that were done by then, between two marks in proportion."""
        index = bisect(self.marks, (moment, 0))
        (before, less), (after, more) = self.marks[index - 1], self.marks[index]
        return less + (more - less) * (moment - before) / (after - before)


def train(words: Sequence[str]) -> None:
    """What a training's process does."""
    from phasicrl import train
    from phasicrl.cli import parse_config

    rest = Path(words[0])

    def mark(run, record) -> None:
        if run.iteration % run.config.period == 0:
            print(f"@ {time.monotonic()} {run.env_steps}", flush=True)
            while rest.exists():
                rest.with_suffix(".resting").touch()
                time.sleep(0.02)

    config = parse_config(list(words[1:])).with_updates(
        {"log.console": "off", "log.tensorboard": False, "checkpoint.every_minutes": None}
    )
    train(config, on_iteration=mark)


def seconds_of_all() -> float:
    """Processor time that anybody has used since the machine was started."""
    user, nice, system, _, _, *more = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def seconds_of(processes: Sequence[subprocess.Popen[str]]) -> float:
    """Processor time of these."""
    fields = [
        Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        for process in processes
    ]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


@contextmanager
def situation(name: str, pair: Sequence[Training]) -> Iterator[list[subprocess.Popen[str]]]:
    """Bring it about; gives the processes that belong to it."""
    first, second = (training.process for training in pair)
    if name == "two":
        pair[1].rest.unlink()
        try:
            yield [first, second]
        finally:
            pair[1].let_rest()
    elif name == "alone":
        yield [first]
    else:
        words = ["nice", "-n", "19", *LOOP] if name == "nice 19" else LOOP
        loop = subprocess.Popen(words, start_new_session=name == "session", text=True)
        try:
            yield [first, loop]
        finally:
            loop.kill()
            loop.wait()


def measure(name: str, pair: Sequence[Training], seconds: float) -> dict[str, float]:
    """One situation.

    The rate in its quiet seconds, how many these were, and the cores' time that others took in all.
    """
    running = pair if name == "two" else pair[:1]
    with situation(name, pair) as processes:
        begin = time.monotonic()
        for training in running:
            training.wait(begin)
        seconds_of_others: list[
            tuple[float, float]
        ] = []  # moments, and what others have used until then
        quiet: list[tuple[float, float]] = []
        while (
            sum(end - start for start, end in quiet) < seconds
            and len(seconds_of_others) < 6 * seconds
        ):
            seconds_of_others.append((time.monotonic(), seconds_of_all() - seconds_of(processes)))
            if len(seconds_of_others) > 1:
                (start, less), (end, more) = seconds_of_others[-2:]
                quiet += [(start, end)] if more - less < QUIET * (end - start) else []
            time.sleep(1.0)
        last = seconds_of_others[-1][0]
        for training in running:
            training.wait(last)
    counted = sum(end - start for start, end in quiet)
    done = sum(
        training.steps_until(end) - training.steps_until(start)
        for training in running
        for start, end in quiet
    )
    (start, less), (end, more) = seconds_of_others[0], seconds_of_others[-1]
    return {
        "steps_per_second": done / counted if counted else float("nan"),
        "seconds": counted,
        "of_others": (more - less) / (end - start),
    }


def main() -> None:
    """Run all; `--train` is one training, in a process of its own."""
    if sys.argv[1:2] == ["--train"]:
        return train(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--code", action="append", default=None)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--situations", nargs="+", choices=SITUATIONS, default=list(SITUATIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    codes = dict(
        code.split("=", 1) for code in options.code or [f"now={Path(__file__).parents[1] / 'src'}"]
    )
    # Not at the top: with `--train` an older phasicrl is imported, which may not have it.
    from phasicrl.host.provenance import commit

    made = {name: commit(Path(code.split(",")[0])) or "unknown" for name, code in codes.items()}
    earlier = (
        list(csv.DictReader(options.output.read_text().splitlines()))
        if options.output.exists()
        else []
    )
    first = max((int(row["round"]) + 1 for row in earlier), default=0)
    rates: dict[tuple[str, str, str], list[float]] = {}
    with options.output.open("a", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not earlier:
            writer.writeheader()
        for number in range(first, first + options.rounds):
            cases = list(itertools.product(options.works, codes))
            for work, code in random.sample(cases, len(cases)):
                pair = [Training(work, codes[code], seed, folder) for seed in (1, 2)]
                try:
                    for training in pair:
                        training.wait(time.monotonic(), marks=3)
                    pair[1].let_rest()
                    for name in random.sample(options.situations, len(options.situations)):
                        found = measure(name, pair, options.seconds)
                        rates.setdefault((work, code, name), []).append(found["steps_per_second"])
                        numbers = {field: f"{value:.4g}" for field, value in found.items()}
                        row: dict[str, object] = {
                            "work": work,
                            "code": code,
                            "round": number,
                            "situation": name,
                            **numbers,
                            "commit": made[code],
                        }
                        # Columns by name.
                        writer.writerow(row)  # pyright: ignore[reportArgumentType]
                        file.flush()
                        print(
                            f"{work:12} {code:10} {name:8}",
                            *(f"{field} {value}" for field, value in numbers.items()),
                            flush=True,
                        )
                finally:
                    for training in pair:
                        training.end()
    for work, code in itertools.product(options.works, codes):
        medians = {name: statistics.median(rates[work, code, name]) for name in options.situations}
        shares = (
            f"{name} {rate:,.0f} ({rate / medians.get('alone', rate):.0%})"
            for name, rate in medians.items()
        )
        print(f"{work}, {code}: {', '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
