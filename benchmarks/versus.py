"""Compare the speed of phasicrl with that of other trainers on this machine, interleaved.

usage: python benchmarks/versus.py WORK … [--pairs 5] [--output FOLDER] [--venvs FOLDER]
           [--cleanrl FOLDER] [--purejaxrl FOLDER]
for example: python benchmarks/versus.py cartpole --pairs 3

Each contestant trains in a process of its own, in the Python that `--venvs FOLDER` has for it
(`FOLDER/sb3/bin/python`; they are made with `benchmarks/peers/requirements-*.txt`); ours in the
Python that runs this, with its `PYTHONPATH` and its usual logs, but no display and no checkpoints.
A round runs every contestant once, in random order, with the number of the round as seed, all on
the same cores. PyTorch gets as many threads as there are cores, which is the faster choice for the
peers; ours chooses itself.

The rate of a run is its slope after the second iteration (after the first where an iteration takes
minutes): environment steps over seconds, training included; start-up, compiling and capturing count
in `wall_to_end`. On CartPole and HalfCheetah all are set to the same length and stopped at the
same step, as longer episodes mean fewer resets (PureJaxRL, whose program has no marks, runs for
longer; its environments reset at no cost). The ratio is the median over rounds of ours over theirs,
in the same group of settings, with the 95 % bootstrap interval over rounds from five rounds on,
else their range.

CleanRL's and PureJaxRL's scripts are run as they are, except for `print`, which is read, and for
what is missing (Procgen's package, whose environments are EnvPool's here, as ours are; modules of
PureJaxRL that its PPO does not use). Ours on Gymnasium's HalfCheetah needs mujoco and imageio
(2.3.7 is what CleanRL's script asks for).

Contestants without their Python or folder are left out. A contestant that fails is reported, and
the others are run.
"""

import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl.system.machine import find_commit, get_versions, num_cores, package_version, processor

PEERS = Path(__file__).parent / "peers"
PACKAGES = (
    "torch", "stable_baselines3", "gymnasium", "gym", "envpool", "numpy", "mujoco", "jax",
    "jaxlib", "flax", "gymnax",
)  # fmt: skip
"""Packages of the peers whose versions are noted."""
THRESHOLD = 475.0
"""CartPole's: mean return of 100 training episodes."""


@dataclass(frozen=True)
class Contestant:
    """One trainer with one setting.

    Attributes:
        name: name in the table.
        trainer: runner and Python: `phasicrl`, `sb3`, `cleanrl`, `purejaxrl`.
        words: command line of the runner; `{cleanrl}` and `{purejaxrl}` are the folders that the
            user gave, `{seed}` is the round.
        group: ratios are taken between contestants of one group.
        begins: mark from which the rate is measured, after start-up and warm-up.
        ends: mark at which the measurement ends; by default the last.
    """

    name: str
    trainer: str
    words: str
    group: str = ""
    begins: int = 2
    ends: int = -1


def _ours(name: str, preset: str, fields: str, **more: Any) -> Contestant:
    """Return our contestant; the preset may follow `--tensors`, see `peers/run_phasicrl.py`."""
    return Contestant(name, "phasicrl", f"{preset} --seed {{seed}} {fields}", **more)


def _sb3(name: str, task: str, settings: dict[str, Any], **more: Any) -> Contestant:
    """Return SB3 on a task: back end, environment, number of environments, steps."""
    words = f"{task} {{seed}} {json.dumps(settings, separators=(',', ':'))}"
    return Contestant(name, "sb3", words, **more)


def _cleanrl(script: str, num_envs: int, num_steps: int, total: int, **more: Any) -> Contestant:
    words = f"{{cleanrl}}/cleanrl/{script} --num-envs {num_envs} --num-steps {num_steps}"
    words += f" --total-timesteps {total} --seed {{seed}}"
    return Contestant(f"CleanRL {script}", "cleanrl", words, **more)


CLEANRL_CARTPOLE = {
    "n_steps": 128, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2,
    "clip_range_vf": 0.2, "ent_coef": 0.01, "vf_coef": 0.5,
    "max_grad_norm": 0.5, "learning_rate": 2.5e-4, "linear": ["learning_rate"],
}  # fmt: skip
"""Settings of CleanRL's ppo.py in SB3's words.

Their default network is the same: two tanh layers of 64 for each of policy and value.
"""
CLEANRL_CONTINUOUS = CLEANRL_CARTPOLE | {
    "n_epochs": 10,
    "ent_coef": 0.0,
    "learning_rate": 3e-4,
    "normalize": True,
}
"""Settings of CleanRL's ppo_continuous_action.py in SB3's words."""
ZOO_CARTPOLE = {
    "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8,
    "ent_coef": 0.0, "clip_range": 0.2, "learning_rate": 1e-3,
    "linear": ["learning_rate", "clip_range"],
}  # fmt: skip
"""RL-Zoo's settings for CartPole, with 8 environments."""


def _cartpole(num_envs: int, *, ends: int, purejaxrl_steps: int) -> tuple[Contestant, ...]:
    """Return contestants for PPO on CartPole with the settings of CleanRL's ppo.py.

    All are set to the 500,000 steps of that script and stopped at the mark `ends`.
    """
    common, task = f"--env.num-envs {num_envs}", f"CartPole-v1 {num_envs} 500000"
    sb3 = CLEANRL_CARTPOLE | {"batch_size": num_envs * 32}
    pool, compiled = f"--env.id envpool:CartPole-v1 {common}", "--compute.compile on"
    ours = {"phasicrl": pool, "phasicrl, Gymnasium": common}
    if num_envs > 4:  # a run of 500,000 steps with 4 environments is compiled by default
        ours |= {f"{name}, compiled": f"{fields} {compiled}" for name, fields in ours.items()}
    return (
        *(_ours(name, "compat-cleanrl-ppo", fields, ends=ends) for name, fields in ours.items()),
        _cleanrl("ppo.py", num_envs, 128, 500_000, ends=ends),
        _sb3("SB3, Gymnasium", f"gymnasium {task}", sb3, ends=ends),
        _sb3("SB3, EnvPool", f"envpool {task}", sb3, ends=ends),
        _purejaxrl(num_envs, purejaxrl_steps),
    )  # fmt: skip


def _purejaxrl(num_envs: int, total: int) -> Contestant:
    words = f"{{purejaxrl}} {num_envs} 128 4 4 {total} {{seed}}"
    return Contestant("PureJaxRL ppo.py", "purejaxrl", words)


def _tensors(num_envs: int, total: int, fields: str = "", ends: int = -1) -> tuple[Contestant, ...]:
    """Return contestants whose environments are functions of tensors."""
    fields = f"--env.num-envs {num_envs} --compute.compile on {fields}"
    preset = "--tensors cpu compat-cleanrl-ppo"
    return (
        _ours("phasicrl, tensors", preset, fields, ends=ends),
        _purejaxrl(num_envs, total),
    )


def _mjlab(fields: str) -> Contestant:
    """Return our contestant on mjlab's cartpole with an asymmetric critic."""
    fields += " --model.value-path separate --model.policy-obs actor --model.value-obs critic"
    fields += " --ppo.num-minibatches 4 --env.id mjlab:Mjlab-Cartpole-Balance"
    return _ours("phasicrl, mjlab's cartpole", "classic-ppo", fields)


def _on_envpool(theirs: Contestant, *, flags: str = "", memory_kept: bool = False) -> Contestant:
    """Return a script of CleanRL on our environments, as it is or keeping freed memory."""
    name = theirs.name + ", memory kept" * memory_kept
    words = f"{'--keep-memory ' * memory_kept}--envpool {theirs.words} {flags}"
    return replace(theirs, name=name, words=words)


def _procgen_ppo(total: int, fields: str, begins: int) -> tuple[Contestant, ...]:
    fields = f"--env.id starpilot --total-env-steps {total} {fields}"
    ours = {"phasicrl, fp32": fields, "phasicrl, bf16": f"{fields} {_BF16}"}
    return (
        *(_ours(name, "compat-cleanrl-ppo-procgen", words, begins=begins)
          for name, words in ours.items()),
        _on_envpool(_cleanrl("ppo_procgen.py", 64, 256, total, begins=begins)),
    )  # fmt: skip


def _procgen_ppg(
    total: int, fields: str, begins: int, precisions: dict[str, str]
) -> tuple[Contestant, ...]:
    """Return contestants for PPG on Procgen with one network, as CleanRL has it, and two.

    Ours ends with the iteration before the last, because nothing is distilled after the last one;
    CleanRL's marks an iteration before it distills, so that two marks have one auxiliary phase
    between them too.
    """
    ends = total // 16384
    fields = f"--env.id starpilot --aux.every 1 --total-env-steps {total + 16384} {fields}"
    presets = {"one network": "compat-cleanrl-ppg", "two networks": "procgen-ppg"}
    theirs = _cleanrl("ppg_procgen.py", 64, 256, total, begins=begins)
    return (
        *(_ours(f"phasicrl, {networks}{precision}", preset, f"{fields} {flags}",
                begins=begins, ends=ends)
          for networks, preset in presets.items() for precision, flags in precisions.items()),
        _on_envpool(theirs, flags="--n-iteration 1"),
    )  # fmt: skip


_BF16, _AUX_BF16 = "--compute.policy-precision bf16", "--compute.aux-precision bf16"
_BOTH = {", both phases bf16": f"{_BF16} {_AUX_BF16}"}
# A GPU takes minibatches as they are, and is warm after two iterations.
_GPU = "--compute.device cuda --compute.compile on"
_TOY = "--env.num-envs 4 --compute.device cpu --compute.compile off"
# All are set to a million steps, in which ours is compiled by default, and stopped after 20
# iterations of 2,048.
_CHEETAH = "--env.id envpool:HalfCheetah-v4"
_CONTINUOUS = "compat-cleanrl-ppo-continuous"
_PPO = _procgen_ppo(32_768, "", 1)
WORKS: dict[str, tuple[Contestant, ...]] = {
    "cartpole": _cartpole(4, ends=195, purejaxrl_steps=2_000_000),
    "cartpole64": _cartpole(64, ends=61, purejaxrl_steps=4_000_000),
    "tensors": _tensors(4, 2_000_000, ends=195),
    "tensors64": _tensors(64, 4_000_000, ends=61),
    "tensors2048": _tensors(2048, 8_000_000, "--total-env-steps 8_000_000"),
    # Run by a Python with gymnax, such as .peers/jax/bin/python.
    "gymnax2048": (
        _ours("phasicrl, gymnax", "compat-cleanrl-ppo", "--env.id gymnax:CartPole-v1 "
              "--env.num-envs 2048 --compute.compile on --total-env-steps 8_000_000"),
        _purejaxrl(2048, 8_000_000),
    ),
    # Each with settings of its own: how soon after the start of the process 100 training episodes
    # have a mean of 475.
    "cartpole-475": (
        _ours("phasicrl", "cartpole-ppo", "--env.num-envs 64 --ppo.num-steps 32 "
              "--ppo.policy-epochs 8 --ppo.value-epochs 8 --ppo.num-minibatches 2 "
              "--ppo.learning-rate 4e-3 --total-env-steps 150_000", group="ours"),
        _cleanrl("ppo.py", 4, 128, 500_000, group="cleanrl"),
        _sb3("SB3, RL-Zoo's settings", "gymnasium CartPole-v1 8 100000", ZOO_CARTPOLE, group="sb3"),
        replace(_purejaxrl(4, 500_000), group="purejaxrl"),
    ),
    "procgen-ppo": (
        *_PPO,
        _on_envpool(_cleanrl("ppo_procgen.py", 64, 256, 32_768, begins=1), memory_kept=True),
    ),
    "procgen-ppg": _procgen_ppg(32_768, "", 1, {"": ""}),
    "procgen-ppg-bf16": _procgen_ppg(
        32_768, "", 1, {", auxiliary phase bf16": _AUX_BF16} | _BOTH
    ),
    "procgen-ppo-gpu": _procgen_ppo(114_688, _GPU, 2),
    "procgen-ppg-gpu": _procgen_ppg(98_304, _GPU, 2, {"": ""} | _BOTH),
    "tensors-gpu": tuple(
        _ours(f"phasicrl, CartPole as tensors, {num_envs:,}", "--tensors cuda compat-cleanrl-ppo",
              f"--env.num-envs {num_envs} {_GPU} --total-env-steps {num_envs * 2560}",
              group=str(num_envs))
        for num_envs in (2048, 16_384)
    ),
    "mjlab-gpu": (
        _mjlab(f"--env.num-envs 4096 --ppo.num-steps 32 --total-env-steps 2_621_440 {_GPU}"),
    ),
    # Without a GPU, to check that everything is there.
    "tensors-toy": (
        _ours("phasicrl, CartPole as tensors", "--tensors cpu compat-cleanrl-ppo",
              f"--ppo.num-steps 8 --total-env-steps 128 {_TOY}"),
    ),
    "mjlab-toy": (_mjlab(f"--ppo.num-steps 8 --total-env-steps 128 {_TOY}"),),
    # A minute, to check that everything is there; its rates mean nothing.
    "procgen-toy": (
        _ours("phasicrl", "compat-cleanrl-ppo-procgen", "--env.id starpilot --env.num-envs 4 "
              "--ppo.num-steps 8 --ppo.num-minibatches 2 --total-env-steps 128"),
        _on_envpool(_cleanrl("ppo_procgen.py", 4, 8, 128)),
    ),
    "halfcheetah": (
        _ours("phasicrl, 1 environment", _CONTINUOUS, _CHEETAH, group="1", ends=20),
        _ours("phasicrl, 1 environment, Gymnasium", _CONTINUOUS,
              "--env.id gymnasium:HalfCheetah-v4", group="1", ends=20),
        _ours("phasicrl, 16 environments", _CONTINUOUS,
              f"{_CHEETAH} --env.num-envs 16 --ppo.num-steps 128", group="16", ends=20),
        _sb3("SB3, 1 environment", "envpool HalfCheetah-v4 1 1000000",
             CLEANRL_CONTINUOUS | {"n_steps": 2048, "batch_size": 64}, group="1", ends=20),
        _sb3("SB3, 16 environments", "envpool HalfCheetah-v4 16 1000000",
             CLEANRL_CONTINUOUS | {"batch_size": 64}, group="16", ends=20),
        _cleanrl("ppo_continuous_action.py", 1, 2048, 1_000_000, group="1", ends=20),
    ),
}  # fmt: skip


def command(contestant: Contestant, venvs: Path, folders: dict[str, Path | None]) -> str | None:
    """Return the command line of a contestant; None without its Python or folder."""
    python = venvs / contestant.trainer / "bin" / "python"
    if contestant.trainer == "phasicrl":
        python = Path(sys.executable)
    if not python.exists() or folders.get(contestant.trainer, python) is None:
        return None
    words = contestant.words
    for name, folder in folders.items():
        words = words.replace(f"{{{name}}}", str(folder))
    marks = f" --marks {contestant.ends}" if contestant.ends > 0 else ""
    return f"{python} {PEERS / f'run_{contestant.trainer}.py'}{marks} {words}"


def run(contestant: Contestant, command: str, folder: Path, *, seed: int) -> dict[str, Any]:
    """Train once; returns the rate and what else was measured.

    Raises:
        RuntimeError: the contestant failed, with the end of its output.
    """
    words, cores = command.replace("{seed}", str(seed)).split(), sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "OMP_NUM_THREADS": str(num_cores()), "MKL_NUM_THREADS": str(num_cores()),
        "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    if contestant.trainer == "phasicrl":
        words += ["--output-dir", str(folder)]
    else:  # it has packages of its own
        environment.pop("PYTHONPATH", None)
    load, start = os.getloadavg()[0], time.time()
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[: num_cores()]),
    )  # fmt: skip
    marks = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("@ ")]
    points = [(int(steps), float(at), float(mean)) for steps, at, mean in marks]
    if done.returncode or len(points) < 3:
        raise RuntimeError(
            f"{contestant.name} failed ({done.returncode}): {' '.join(words)}\n"
            f"{done.stderr[-2000:]}"
        )
    (first, since, _), (last, until, _) = points[contestant.begins], points[contestant.ends]
    reached = next((at - start for _, at, mean in points if mean >= THRESHOLD), math.nan)
    return {
        "rate": (last - first) / (until - since), "steps": points[-1][0],
        "wall_to_end": points[-1][1] - start, "seconds_to_threshold": reached,
        "started": start, "load_before": load,
    }  # fmt: skip


def summarize(runs: list[dict[str, Any]], contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Return the median rate of each contestant, and the ratios of ours to the others'."""
    of_name = {c.name: [row for row in runs if row["contestant"] == c.name] for c in contestants}
    rates = {name: {row["round"]: row["rate"] for row in of} for name, of in of_name.items()}
    generator = np.random.default_rng(0)
    rows = []
    for contestant in contestants:
        theirs = rates[contestant.name]
        if not theirs:
            continue
        every = list(theirs.values())
        # A run that never reached the threshold is the slowest.
        seconds = [row["seconds_to_threshold"] for row in of_name[contestant.name]]
        middle = float(np.median(np.nan_to_num(seconds, nan=math.inf)))
        row: dict[str, Any] = {
            "contestant": contestant.name, "rate": float(np.median(every)), "least": min(every),
            "most": max(every), "ratios": {},
            "seconds_to_threshold": middle if math.isfinite(middle) else None,
            "reached_threshold": f"{sum(map(math.isfinite, seconds))} of {len(every)}",
        }  # fmt: skip
        for ours in contestants if contestant.trainer != "phasicrl" else ():
            if ours.trainer == "phasicrl" and ours.group == contestant.group:
                rounds = sorted(rates[ours.name].keys() & theirs.keys())
                if rounds:
                    ratios = [rates[ours.name][number] / theirs[number] for number in rounds]
                    row["ratios"][ours.name] = median_and_interval(np.array(ratios), generator)
        rows.append(row)
    return rows


def median_and_interval(ratio: np.ndarray, generator: np.random.Generator) -> dict[str, Any]:
    """Return the median of ratios `[n]`, and its 95 % interval; of fewer than five their range."""
    count, drawn, ends = len(ratio), ratio, (0.0, 1.0)
    if count >= 5:
        drawn = np.median(generator.choice(ratio, (2000, count)), axis=1)
        ends = (0.025, 0.975)
    interval = [float(end) for end in np.quantile(drawn, ends)]
    return {"ratio": float(np.median(ratio)), "interval": interval, "rounds": count}


def main(
    works: tuple[str, ...],
    /,
    pairs: int = 5,
    output: Path = Path("runs/versus"),
    venvs: Path = Path(".peers"),
    cleanrl: Path | None = None,
    purejaxrl: Path | None = None,
) -> None:
    """Run some works."""
    folders = {"cleanrl": cleanrl and cleanrl.resolve(),
               "purejaxrl": purejaxrl and purejaxrl.resolve()}  # fmt: skip
    output, venvs = output.resolve(), venvs.absolute()
    (output / "work").mkdir(parents=True, exist_ok=True)
    here = describe_machine(venvs, folders)
    for work in works:
        commands = {c.name: command(c, venvs, folders) for c in WORKS[work]}
        present = [c for c in WORKS[work] if commands[c.name]]
        print("left out:", *(name for name, words in commands.items() if not words), flush=True)
        runs: list[dict[str, Any]] = []
        for number in range(pairs):
            for contestant in random.sample(present, len(present)):
                row = {"contestant": contestant.name, "round": number}
                try:
                    row |= run(
                        contestant, commands[contestant.name] or "", output / "work",
                        seed=number + 1,
                    )  # fmt: skip
                except RuntimeError as error:
                    print(f"{work}, round {number + 1}: {error}", flush=True)
                    continue
                runs.append(row)
                print(f"{work}, round {number + 1}: {row}", flush=True)
                result = {
                    "work": work, "machine": here, "commands": commands,
                    "summary": summarize(runs, present), "runs": runs,
                }  # fmt: skip
                (output / f"{work}.json").write_text(json.dumps(result, indent=1) + "\n")
        title = f"{work}: {processor()}, {num_cores()} threads"
        draw(summarize(runs, present), output / f"{work}.png", title=title)


def draw(rows: list[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the rates as bars, fastest first, with the slowest and fastest of the rounds."""
    rows = sorted(rows, key=lambda row: -row["rate"])
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    names, rates = ([row[key] for row in rows] for key in ("contestant", "rate"))
    spread = [[abs(row[end] - row["rate"]) for row in rows] for end in ("least", "most")]
    colors = ["tab:blue" if name.startswith("phasicrl") else "0.7" for name in names]
    bars = axes.barh(names, rates, xerr=spread, color=colors, error_kw={"linewidth": 1})
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("environment steps per second: median, and the slowest to fastest round")
    axes.set_title(title, fontsize="medium", loc="right")
    figure.savefig(path, dpi=150)


def describe_machine(venvs: Path, folders: dict[str, Path | None]) -> dict[str, Any]:
    """Return processor, cores, and the versions of ours and of the peers that are there."""
    found: dict[str, Any] = {
        "processor": processor(), "cores": num_cores(), "threads": num_cores(), **get_versions(),
        "mujoco": package_version("mujoco"), "commit": find_commit(PEERS) or "unknown",
    }  # fmt: skip
    for name in ("sb3", "cleanrl", "purejaxrl"):
        if not (python := venvs / name / "bin" / "python").exists():
            continue
        words = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
        listed = json.loads(subprocess.check_output(words, text=True))
        found[name] = {x["name"]: x["version"] for x in listed if x["name"] in PACKAGES}
    commits = {f"{name}'s folder": find_commit(path) for name, path in folders.items() if path}
    return found | commits


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
