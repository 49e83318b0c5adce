"""Train agents of some presets; package and film the best seed of each.

usage: python benchmarks/agents.py [PRESET ...] [--seeds 1] [--first-seed 101] [--runs FOLDER]
           [--output agents] [--films docs/films]

Finished runs and packages are kept, and interrupted runs resume. LunarLander needs `pip install
box2d`. All presets with one seed take an hour on two cores.
"""

from pathlib import Path

import tyro

from phasicrl.algorithm import train
from phasicrl.lab.experiments.trials import FIRST_REPORT_SEED
from phasicrl.lab.export.package import release
from phasicrl.lab.film.video import film
from phasicrl.presets import get_preset
from phasicrl.runs.directory import AGENTS_FOLDER, RunDirectory

PRESETS = (
    "cartpole-ppg", "pendulum-ppo", "invertedpendulum-ppo", "reacher-ppo", "walker2d-ppo",
    "quickstart", "hopper-ppo", "acrobot-ppg", "lunarlander-ppg",
)  # fmt: skip


def main(
    presets: tuple[str, ...] = PRESETS,
    /,
    seeds: int = 1,
    first_seed: int = FIRST_REPORT_SEED,
    runs: Path = Path("runs/agents"),
    output: Path = AGENTS_FOLDER,
    films: Path = Path("docs/films"),
) -> None:
    """Train, package, film."""
    packed = {RunDirectory(path).config.name for path in output.glob("*")}
    for preset in set(presets) - packed:
        config = get_preset(preset).with_updates({"log.console": "off", "output_dir": str(runs)})
        trained = [
            train(config.with_updates({"seed": seed}), resume="auto").directory
            for seed in range(first_seed, first_seed + seeds)
        ]
        (package,) = release(trained, output=output, best_per_task=True)
        film(package.path, policy="greedy", size=240, output=films / f"{preset}.mp4")
        greedy, sampled = (each.mean_return for each in package.evaluations)
        path = package.path.rename(output / preset)
        print(f"{path}: greedy {greedy:.2f}, sampled {sampled:.2f}", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
