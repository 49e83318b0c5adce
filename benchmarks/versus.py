"""Whole training loops of phasicrl and of other trainers on this machine, interleaved.

usage: python benchmarks/versus.py WORK … [--pairs 5] [--output FOLDER] [--only NAME …]
           [--cleanrl FOLDER] [--purejaxrl FOLDER] [--resume]
for example: python benchmarks/versus.py cartpole --pairs 3

Each contestant trains in a process of its own, in the Python that `--venvs FOLDER` has for it
(`FOLDER/sb3/bin/python`; they are made with `benchmarks/peers/requirements-*.txt`); ours in the
Python that runs this, with its `PYTHONPATH` and its usual logs, but no display and no checkpoints.
A round runs every contestant once, in random order, with the number of the round as seed, all on
the same cores. PyTorch gets as many threads as there are cores, which is the faster choice for the
peers; ours takes its own choice.

The rate of a run is its slope after the second iteration (after the first where an iteration takes
minutes): environment steps over seconds, training included; start-up, compiling and capturing count
in `wall_to_end`. On CartPole and HalfCheetah all are set to the same length and stopped at the
same step, as longer episodes mean fewer resets (PureJaxRL, whose program has no marks, runs for
longer; its environments reset at no cost). The ratio is the median over rounds of ours over theirs,
in the same group of settings, with the 95 % bootstrap interval over rounds from five rounds on,
else their range.

CleanRL's and PureJaxRL's scripts are run as they are, but for what must be listened to (`print`) or
is not there (Procgen's package, whose environments are EnvPool's here, as ours are; modules of
PureJaxRL that its PPO does not use).

Ours on Gymnasium's HalfCheetah needs mujoco and imageio beside it (2.3.7 is what CleanRL's script
asks for).

Contestants whose Python, folder or package is not there are left out, and that is said; one that
fails is told, and the others go on. With `--resume` whole rounds that the output folder has already
are not run again, if the machine and the commit are the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phasicrl.host.machine import describe, num_cores, package_version, processor
from phasicrl.host.provenance import commit

PEERS = Path(__file__).parent / "peers"
PEERS_PACKAGES = (
    "torch",
    "stable_baselines3",
    "gymnasium",
    "gym",
    "envpool",
    "numpy",
    "mujoco",
    "jax",
    "jaxlib",
    "flax",
    "gymnax",
)
"""Whose versions are noted."""
THRESHOLD = 475.0
"""CartPole's: mean return of 100 training episodes."""


@dataclass(frozen=True)
class Contestant:
    """One trainer with one setting.

    Attributes:
        name: for the table.
        trainer: whose Python and which runner: `phasicrl`, `sb3`, `cleanrl`, `purejaxrl`.
        words: the runner's command line; `{cleanrl}` and `{purejaxrl}` are the folders that the
            user gave, `{seed}` is the round.
        group: ratios are taken between contestants of one group.
        begins: the mark from which it is measured: what comes before is start-up and warming up.
        ends: the mark at which that ends; the last, unless given.
        needs: what the Python must be able to import beside the trainer.
    """

    name: str
    trainer: str
    words: tuple[str, ...]
    group: str = ""
    begins: int = 2
    ends: int = -1
    needs: str | None = None


def _ours(
    name: str,
    preset: str,
    fields: str,
    *,
    group: str = "",
    begins: int = 2,
    ends: int = -1,
    needs: str | None = None,
) -> Contestant:
    return Contestant(
        name, "phasicrl", (preset, "--seed", "{seed}", *fields.split()), group, begins, ends, needs
    )


def _sb3(
    name: str,
    backend: str,
    task: str,
    num_envs: int,
    steps: int,
    settings: dict[str, Any],
    *,
    group: str = "",
    ends: int = -1,
) -> Contestant:
    return Contestant(
        name,
        "sb3",
        (backend, task, str(num_envs), str(steps), "{seed}", json.dumps(settings)),
        group,
        ends=ends,
    )


CLEANRL_CARTPOLE = {
    "n_steps": 128, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2,
    "clip_range_vf": 0.2, "ent_coef": 0.01, "vf_coef": 0.5,
    "max_grad_norm": 0.5, "learning_rate": 2.5e-4, "linear": ["learning_rate"],
}  # fmt: skip
"""The settings of CleanRL's ppo.py in SB3's words.

Their default network is the same: two tanh layers of 64 for each of policy and value.
"""
CLEANRL_CONTINUOUS = CLEANRL_CARTPOLE | {
    "n_epochs": 10,
    "ent_coef": 0.0,
    "learning_rate": 3e-4,
    "normalize": True,
}
"""The same of its ppo_continuous_action.py."""
ZOO_CARTPOLE = {
    "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8,
    "ent_coef": 0.0, "clip_range": 0.2, "learning_rate": 1e-3,
    "linear": ["learning_rate", "clip_range"],
}  # fmt: skip
"""RL-Zoo's settings for CartPole, with 8 environments."""


def _cartpole(num_envs: int, *, ends: int, purejaxrl_steps: int) -> tuple[Contestant, ...]:
    """PPO on CartPole with the settings of CleanRL's ppo.py, with so many environments.

    All are set to the 500,000 steps of that script and stopped at the mark `ends`.
    """
    common = f"--env.num-envs {num_envs}"
    sb3 = CLEANRL_CARTPOLE | {"batch_size": num_envs * 32}
    cleanrl = (
        "{cleanrl}/cleanrl/ppo.py",
        "--num-envs",
        str(num_envs),
        "--num-steps",
        "128",
        "--total-timesteps",
        "500000",
        "--seed",
        "{seed}",
    )
    pool = f"--env.id envpool:CartPole-v1 {common}"
    ours = (
        ("phasicrl", pool),
        ("phasicrl, Gymnasium", common),
        ("phasicrl, compiled", f"{pool} --compute.compile on"),
        ("phasicrl, Gymnasium, compiled", f"{common} --compute.compile on"),
    )
    # A run of 500,000 steps with 4 environments is compiled by default.
    by_hand = num_envs > 4
    return (
        *(_ours(name, "compat-cleanrl-ppo", fields, ends=ends)
          for name, fields in ours[: 4 if by_hand else 2]),
        Contestant("CleanRL ppo.py", "cleanrl", cleanrl, ends=ends),
        _sb3("SB3, Gymnasium", "gymnasium", "CartPole-v1", num_envs, 500_000, sb3, ends=ends),
        _sb3("SB3, EnvPool", "envpool", "CartPole-v1", num_envs, 500_000, sb3, ends=ends),
        Contestant(
            "PureJaxRL ppo.py",
            "purejaxrl",
            ("{purejaxrl}", str(num_envs), "128", "4", "4", str(purejaxrl_steps), "{seed}"),
        ),
    )  # fmt: skip


def _procgen(
    ours: tuple[Contestant, ...], script: str, *flags: str, begins: int = 1, memory_kept: bool
) -> tuple[Contestant, ...]:
    """Procgen: ours against a script of CleanRL, on the same pool of environments.

    Also with memory kept, as ours keeps it.
    """
    words = (
        "--envpool",
        f"{{cleanrl}}/cleanrl/{script}",
        "--num-envs",
        "64",
        "--num-steps",
        "256",
        "--seed",
        "{seed}",
        *flags,
    )
    name, keeping = f"CleanRL {script}", ("--keep-memory", *words)
    theirs = (
        Contestant(name, "cleanrl", words, begins=begins),
        Contestant(f"{name}, memory kept", "cleanrl", keeping, begins=begins),
    )
    return *ours, *theirs[: 1 + memory_kept]


_PPO = "--env.id starpilot --total-env-steps 32768"
# Ours ends with the iteration before the last, because nothing is distilled after the last one;
# theirs says that an iteration is done before it distills, so that the time between two such lines
# has one auxiliary phase too.
_PPG = "--env.id starpilot --aux.every 1 --total-env-steps 49152"
_BF16 = "--compute.policy-precision bf16"
_AUX_BF16 = "--compute.aux-precision bf16"


def _ppg(*precisions: tuple[str, str]) -> tuple[Contestant, ...]:
    """PPG on Procgen with one network, as CleanRL has it, and with two, in some precisions."""
    presets = (("one network", "compat-cleanrl-ppg"), ("two networks", "procgen-ppg"))
    ours = tuple(
        _ours(f"phasicrl, {networks}{precision}", preset, f"{_PPG} {flags}", begins=1, ends=2)
        for networks, preset in presets
        for precision, flags in precisions
    )
    flags = ("--n-iteration", "1", "--total-timesteps", "32768")
    return _procgen(ours, "ppg_procgen.py", *flags, memory_kept=False)


# A GPU takes minibatches as they are, and is warm after two iterations.
_GPU = "--env.id starpilot --compute.device cuda --compute.compile on"
_GPU_PPO = f"{_GPU} --total-env-steps 163840"
_GPU_PPG = f"{_GPU} --aux.every 1 --total-env-steps 114688"
_ALL_BF16 = "--compute.policy-precision bf16 --compute.aux-precision bf16"
# All are set to a million steps, in which ours is compiled by default, and stopped after 20
# iterations of 2,048.
_CHEETAH = "--env.id envpool:HalfCheetah-v4"
WORKS: dict[str, tuple[Contestant, ...]] = {
    "cartpole": _cartpole(4, ends=195, purejaxrl_steps=2_000_000),
    "cartpole64": _cartpole(64, ends=61, purejaxrl_steps=4_000_000),
    # Each with settings of its own: how soon after the start of the process 100 training episodes
    # have a mean of 475.
    "cartpole-475": (
        _ours("phasicrl", "cartpole-ppo", "--env.num-envs 64 --ppo.num-steps 32 "
              "--ppo.policy-epochs 8 --ppo.value-epochs 8 --ppo.num-minibatches 2 "
              "--ppo.learning-rate 4e-3 --total-env-steps 150_000", group="ours"),
        Contestant("CleanRL ppo.py", "cleanrl", (
            "{cleanrl}/cleanrl/ppo.py", "--num-envs", "4", "--num-steps", "128",
            "--total-timesteps", "500000", "--seed", "{seed}"
        ), "cleanrl"),
        _sb3("SB3, RL-Zoo's settings", "gymnasium", "CartPole-v1", 8, 100_000, ZOO_CARTPOLE,
             group="sb3"),
        Contestant("PureJaxRL ppo.py", "purejaxrl",
                   ("{purejaxrl}", "4", "128", "4", "4", "500000", "{seed}"), "purejaxrl"),
    ),
    "procgen-ppo": _procgen((
        _ours("phasicrl, fp32", "compat-cleanrl-ppo-procgen", _PPO, begins=1),
        _ours("phasicrl, bf16", "compat-cleanrl-ppo-procgen", f"{_PPO} {_BF16}", begins=1),
    ), "ppo_procgen.py", "--total-timesteps", "32768", memory_kept=True),
    "procgen-ppg": _ppg(("", "")),
    "procgen-ppg-bf16": _ppg((", auxiliary phase bf16", _AUX_BF16),
                             (", both phases bf16", f"{_BF16} {_AUX_BF16}")),
    "procgen-ppo-gpu": _procgen((
        _ours("phasicrl, fp32", "compat-cleanrl-ppo-procgen", _GPU_PPO),
        _ours("phasicrl, bf16", "compat-cleanrl-ppo-procgen",
              f"{_GPU_PPO} --compute.policy-precision bf16"),
    ), "ppo_procgen.py", "--total-timesteps", "163840", begins=2, memory_kept=False),
    "procgen-ppg-gpu": _procgen((
        _ours("phasicrl, one network", "compat-cleanrl-ppg", _GPU_PPG, ends=6),
        _ours("phasicrl, one network, both phases bf16", "compat-cleanrl-ppg",
              f"{_GPU_PPG} {_ALL_BF16}", ends=6),
        _ours("phasicrl, two networks", "procgen-ppg", _GPU_PPG, ends=6),
        _ours("phasicrl, two networks, both phases bf16", "procgen-ppg",
              f"{_GPU_PPG} {_ALL_BF16}", ends=6),
    ), "ppg_procgen.py", "--n-iteration", "1", "--total-timesteps", "98304", begins=2,
    memory_kept=False),
    # A minute, to see that everything is there; its rates say nothing.
    "procgen-toy": (
        _ours("phasicrl", "compat-cleanrl-ppo-procgen", "--env.id starpilot --env.num-envs 4 "
              "--ppo.num-steps 8 --ppo.num-minibatches 2 --total-env-steps 128"),
        Contestant("CleanRL ppo_procgen.py", "cleanrl", (
            "--envpool", "{cleanrl}/cleanrl/ppo_procgen.py", "--num-envs", "4", "--num-steps", "8",
            "--total-timesteps", "128", "--seed", "{seed}"
        )),
    ),
    "halfcheetah": (
        _ours("phasicrl, 1 environment", "compat-cleanrl-ppo-continuous", _CHEETAH, group="1",
              ends=20),
        _ours("phasicrl, 1 environment, Gymnasium", "compat-cleanrl-ppo-continuous",
              _CHEETAH.replace("envpool:", "gymnasium:"), group="1", ends=20,
              needs="mujoco, imageio"),
        _ours("phasicrl, 16 environments", "compat-cleanrl-ppo-continuous",
              f"{_CHEETAH} --env.num-envs 16 --ppo.num-steps 128", group="16", ends=20),
        _sb3("SB3, 1 environment", "envpool", "HalfCheetah-v4", 1, 1_000_000,
             CLEANRL_CONTINUOUS | {"n_steps": 2048, "batch_size": 64}, group="1", ends=20),
        _sb3("SB3, 16 environments", "envpool", "HalfCheetah-v4", 16, 1_000_000,
             CLEANRL_CONTINUOUS | {"batch_size": 64}, group="16", ends=20),
        Contestant("CleanRL ppo_continuous_action.py", "cleanrl", (
            "{cleanrl}/cleanrl/ppo_continuous_action.py", "--num-envs", "1", "--num-steps", "2048",
            "--total-timesteps", "1000000", "--seed", "{seed}"
        ), "1", ends=20),
    ),
}  # fmt: skip


def command(contestant: Contestant, options: argparse.Namespace) -> list[str] | None:
    """The command line of a contestant; None if something that it needs is not there."""
    folders = {"cleanrl": options.cleanrl, "purejaxrl": options.purejaxrl}
    python = (
        sys.executable
        if contestant.trainer == "phasicrl"
        else str(options.venvs / contestant.trainer / "bin" / "python")
    )
    if not Path(python).exists() or (
        contestant.trainer in folders and folders[contestant.trainer] is None
    ):
        return None
    if (
        contestant.needs
        and subprocess.run(
            [python, "-c", f"import {contestant.needs}"], capture_output=True
        ).returncode
    ):
        return None
    words = [
        word.replace("{cleanrl}", str(options.cleanrl)).replace(
            "{purejaxrl}", str(options.purejaxrl)
        )
        for word in contestant.words
    ]
    marks = ["--marks", str(contestant.ends)] if contestant.ends > 0 else []
    return [python, str(PEERS / f"run_{contestant.trainer}.py"), *marks, *words]


def run(
    contestant: Contestant,
    words: Sequence[str],
    options: argparse.Namespace,
    folder: Path,
    *,
    seed: int,
) -> dict[str, Any]:
    """Train once; returns the rate and what else was seen.

    Raises:
        RuntimeError: the contestant failed, with the end of what it said.
    """
    threads, words = str(options.threads), [word.replace("{seed}", str(seed)) for word in words]
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    surroundings = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
    }
    if contestant.trainer != "phasicrl":  # a Python of its own, with packages of its own
        surroundings.pop("PYTHONPATH", None)
    else:
        words = [*words, "--output-dir", str(folder)]  # it takes the cores that it may use
    load = os.getloadavg()[0]
    start = time.time()
    with subprocess.Popen(
        words, cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:  # fmt: skip
        out, error = process.communicate()
    marks = [line.split()[1:] for line in out.splitlines() if line.startswith("@ ")]
    points = [(int(steps), float(at), float(mean)) for steps, at, mean in marks]
    if process.returncode or len(points) < 3:
        raise RuntimeError(
            f"{contestant.name} failed ({process.returncode}): {' '.join(words)}\n{error[-2000:]}"
        )
    (first, since, _), (last, until, _) = points[contestant.begins], points[contestant.ends]
    reached = next((at - start for _, at, mean in points if mean >= THRESHOLD), math.nan)
    return {
        "rate": (last - first) / (until - since), "steps": points[-1][0],
        "wall_to_end": points[-1][1] - start, "seconds_to_threshold": reached,
        "started": start, "load_before": load,
    }  # fmt: skip


def summary(runs: list[dict[str, Any]], contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """Median rate of each contestant, and the ratios of ours to the others' over rounds."""
    rates: dict[str, dict[int, float]] = {
        c.name: {row["round"]: row["rate"] for row in runs if row["contestant"] == c.name}
        for c in contestants
    }
    seconds = {
        c.name: [row["seconds_to_threshold"] for row in runs if row["contestant"] == c.name]
        for c in contestants
    }
    generator = np.random.default_rng(0)
    rows = []
    for contestant in contestants:
        theirs = rates[contestant.name]
        if not theirs:
            continue
        of_all = list(theirs.values())
        row: dict[str, Any] = {
            "contestant": contestant.name, "rate": float(np.median(of_all)), "least": min(of_all),
            "most": max(of_all),
            "seconds_to_threshold": None, "ratios": {},
            "reached_threshold":
                f"{sum(map(math.isfinite, seconds[contestant.name]))} of {len(of_all)}",
        }  # fmt: skip
        # A run that never got there is the slowest.
        middle = float(np.median(np.nan_to_num(seconds[contestant.name], nan=math.inf)))
        if math.isfinite(middle):
            row["seconds_to_threshold"] = middle
        for ours in (
            c.name for c in contestants if c.trainer == "phasicrl" and c.group == contestant.group
        ):
            rounds = sorted(rates[ours].keys() & theirs.keys())
            if contestant.trainer != "phasicrl" and (count := len(rounds)):
                ratio = np.array([rates[ours][number] / theirs[number] for number in rounds])
                drawn = (
                    np.median(generator.choice(ratio, (2000, count)), axis=1)
                    if count >= 5
                    else ratio
                )
                low, high = np.quantile(drawn, (0.025, 0.975) if count >= 5 else (0.0, 1.0))
                row["ratios"][ours] = {
                    "ratio": float(np.median(ratio)),
                    "interval": [float(low), float(high)],
                    "rounds": count,
                }
        rows.append(row)
    return rows


def main() -> None:
    """Run the works that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("works", nargs="+", choices=list(WORKS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", nargs="+", default=None, help="names of contestants")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--output", type=Path, default=Path("runs/versus"))
    parser.add_argument("--venvs", type=Path, default=Path(".peers"))
    for name in ("cleanrl", "purejaxrl"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), default=None)
    options = parser.parse_args()
    options.output, options.venvs = options.output.resolve(), options.venvs.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    for work in options.works:
        if unknown := set(options.only or ()) - {c.name for c in WORKS[work]}:
            names = ", ".join(c.name for c in WORKS[work])
            sys.exit(
                f"nobody in {work} is called {' or '.join(sorted(unknown))}; there are {names}"
            )
        contestants = [c for c in WORKS[work] if options.only is None or c.name in options.only]
        commands = {c.name: command(c, options) for c in contestants}
        absent = [name for name, words in commands.items() if words is None]
        if absent:
            print(
                "left out, because their Python, "
                f"their folder or a package is not there: {', '.join(absent)}",
                flush=True,
            )
        present = [c for c in contestants if commands[c.name] is not None]
        path = options.output / f"{work}.json"
        here = machine(options)
        runs = whole_rounds(path, here, present) if options.resume and path.is_file() else []
        result: dict[str, Any] = {"summary": summary(runs, present)}
        for number in range(len(runs) // len(present), options.pairs):
            for contestant in random.sample(present, len(present)):
                folder = options.output / "work"
                folder.mkdir(exist_ok=True)
                words = commands[contestant.name]
                assert words is not None
                try:
                    row = {"contestant": contestant.name, "round": number} | run(
                        contestant, words, options, folder, seed=number + 1
                    )
                except RuntimeError as error:
                    print(f"{work}, round {number + 1}: {error}", flush=True)
                    continue
                runs.append(row)
                print(
                    f"{work}, round {number + 1}: {contestant.name} {row['rate']:,.0f} steps/s",
                    flush=True,
                )
                result = {
                    "work": work, "machine": here, "commands": commands,
                    "summary": summary(runs, present), "runs": runs,
                }  # fmt: skip
                path.write_text(json.dumps(result, indent=1) + "\n")
        draw(
            result["summary"],
            options.output / f"{work}.png",
            title=f"{work}: {processor()}, {options.threads} threads",
        )
        print(f"{options.output / work}.json and .png", flush=True)


def draw(rows: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """The rates as bars, fastest first, with the slowest and fastest of the rounds."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: -row["rate"])
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    rates = [row["rate"] for row in rows]
    spread = [
        [row["rate"] - row["least"] for row in rows],
        [row["most"] - row["rate"] for row in rows],
    ]
    colors = ["tab:blue" if row["contestant"].startswith("phasicrl") else "0.7" for row in rows]
    bars = axes.barh(
        [row["contestant"] for row in rows],
        rates,
        xerr=spread,
        color=colors,
        error_kw={"linewidth": 1},
    )
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("environment steps per second, training included")
    axes.set_title(title, fontsize="medium", loc="right")
    figure.savefig(path, dpi=150)


def whole_rounds(
    path: Path, here: dict[str, Any], contestants: Sequence[Contestant]
) -> list[dict[str, Any]]:
    """Runs of an earlier measurement, of rounds in which every contestant ran.

    Raises:
        ValueError: they were made elsewhere, or with other code.
    """
    before = json.loads(path.read_text())
    if before["machine"] != here:
        raise ValueError(
            f"{path} was measured on another machine, or with other code: "
            f"{before['machine']}, not {here}; measure anew without --resume"
        )
    names = {contestant.name for contestant in contestants}
    rounds: dict[int, list[dict[str, Any]]] = {}
    for row in before["runs"]:
        rounds.setdefault(row["round"], []).append(row)
    whole = itertools.takewhile(
        lambda number: {row["contestant"] for row in rounds.get(number, [])} == names,
        itertools.count(),
    )
    return [row for number in whole for row in rounds[number]]


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What decides about speed.

    Processor, cores, versions of ours and of every peer that is there.
    """
    found: dict[str, Any] = {
        **describe(),
        "mujoco": package_version("mujoco"),
        "threads": options.threads,
        "commit": commit(PEERS) or "unknown",
    }
    for name in ("sb3", "cleanrl", "purejaxrl"):
        python = options.venvs / name / "bin" / "python"
        if python.exists():
            words = [
                str(python),
                "-m",
                "pip",
                "list",
                "--format",
                "json",
                "--disable-pip-version-check",
            ]
            listed = json.loads(
                subprocess.run(words, capture_output=True, text=True, check=True).stdout
            )
            found[name] = {
                row["name"]: row["version"] for row in listed if row["name"] in PEERS_PACKAGES
            }
        if (folder := getattr(options, name, None)) is not None:
            found[f"{name}'s folder"] = commit(folder) or "unknown"
    return found


if __name__ == "__main__":
    main()
