"""Published results that the package carries, to stand beside runs. Kind: pure data.

Made by `python -m tools.reference_tables` from what the sources published.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("published")
"""A CSV file for each reference: experiment, run, game, split, distribution, num_levels, step,
episodic_return. The two of the levels are empty where a task is none of Procgen's; num_levels is of
the training, and 0 is all."""

REFERENCES = {
    "ppg-paper": "PPG and PPO on 16 games of Procgen, hard, to 100M steps, with the ablations of "
    "the PPG paper (Cobbe et al. 2020); openai/phasic-policy-gradient, results/, MIT",
    "baselines-easy": "PPO of OpenAI Baselines on 10 games of Procgen, easy, all levels, to 50M "
    "steps, three runs; openai/train-procgen, results/, MIT",
    "baselines-easy-200": "the same on 200 levels, with returns on unseen levels (split test)",
    "baselines-final": "the last returns of PPO of OpenAI Baselines on 16 games of Procgen: "
    "experiments easy, hard, easy-200 and hard-500, the last two with returns on unseen levels "
    "(split test); openai/train-procgen at 1a2ae21, results/, MIT",
    "procgen-easy-25m": "PPG and PPO of CleanRL, and OpenAI's PPG run by the same authors, on "
    "starpilot, bossfight and bigfish, easy, 25M steps; vwxyzjn/cleanrl, docs/rl-algorithms/ppg.md",
    "zoo": "PPO of RL Baselines3 Zoo (DLR-RM/rl-baselines3-zoo, benchmark.md): the best checkpoint "
    "of a single run, greedy",
    "tianshou": "PPO of Tianshou on MuJoCo (thu-ml/tianshou, examples/mujoco/README.md): means of "
    "ten seeds, on versions v1 to v3 of the tasks",
    "slm-lab": "PPO of SLM-Lab (kengz/SLM-Lab at 96be3938, docs/BENCHMARKS.md): means of four "
    "sessions in training; of Atari the best of three λ for each game",
    "cleanrl": "PPO of CleanRL (vwxyzjn/cleanrl at fe8d8a03, docs/benchmark/ppo.md and others): "
    "three seeds",
}
"""By name: what it is, and whence."""
HEADLINES = {"ppg-paper": ("ppg", "ppo")}
"""By name of what has many experiments: those that are meant if none are named."""
ONE_NUMBER = "one number"
KINDS = {
    "baselines-final": f"{ONE_NUMBER}, the last return",
    "procgen-easy-25m": f"{ONE_NUMBER}, a mean return",
    "zoo": f"{ONE_NUMBER}, the best checkpoint of one run, greedy, of Atari sampled",
    "tianshou": f"{ONE_NUMBER}, evaluations of ten seeds, the highest mean within the budget",
    "slm-lab": f"{ONE_NUMBER}, the mean of four sessions; of Atari with the best of three λ",
    "cleanrl": f"{ONE_NUMBER}, the mean of three seeds",
}
"""By name of what is no curve of runs in training: what it is."""
