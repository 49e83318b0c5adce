"""Train agents of some presets; pack and film one of each, the best of its seeds.

usage: python benchmarks/agents.py [PRESET ...] [--seeds 1] [--first-seed 101] [--runs FOLDER]
           [--output agents] [--films docs/films]

A run that is there already is not made again; one that was cut off goes on. Packages that are there
are left as they are. By default each preset has one seed, and so one agent to choose from.
LunarLander is drawn by `pip install box2d`. All presets with one seed take an hour on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from phasicrl.algorithm import train
from phasicrl.lab.experiments.trials import FIRST_REPORT_SEED
from phasicrl.lab.experiments.video import film
from phasicrl.lab.export.package import release
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory

PRESETS = (
    "cartpole-ppg", "pendulum-ppo", "invertedpendulum-ppo", "reacher-ppo", "walker2d-ppo",
    "quickstart", "halfcheetah-ppg", "hopper-ppo", "acrobot-ppg", "lunarlander-ppg",
)  # fmt: skip
"""Of some tasks of the tables of results, not of all, and of a game of Procgen."""


def trained(preset: str, seeds: range, runs: Path) -> list[Path]:
    """The runs of a preset, one for each seed."""
    quiet = {"log.console": "off", "output_dir": str(runs)}
    config = get_preset(preset).with_updates(quiet)
    return [train(config.with_updates({"seed": seed}), resume="auto").directory for seed in seeds]


def main() -> None:
    """Train, pack, film."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", default=PRESETS, metavar="PRESET")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=FIRST_REPORT_SEED)
    parser.add_argument("--runs", type=Path, default=Path("runs/agents"))
    parser.add_argument("--output", type=Path, default=Path("agents"))
    parser.add_argument("--films", type=Path, default=Path("docs/films"))
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    packed = {RunDirectory(path).config.name for path in options.output.glob("*")}
    for preset in options.presets:
        if preset in packed:
            print(f"{preset}: its package is there already")
            continue
        runs = trained(preset, seeds, options.runs)
        (package,) = release(runs, output=options.output, best=True)
        output = options.films / f"{preset}.mp4"
        film(package.path, policy="greedy", size=240, output=output)
        greedy, sampled = (each.mean_return for each in package.evaluations)
        print(f"{package.path}: greedy {greedy:.2f}, sampled {sampled:.2f}; {output}", flush=True)


if __name__ == "__main__":
    main()
