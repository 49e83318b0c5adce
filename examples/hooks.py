"""Early stop and a metric of your own, in a function that is called after each iteration."""

import csv

from phasicrl import get_preset, train


def on_iteration(run, record):
    """Write the size of the largest weight; stop once the task is solved."""
    largest = max(float(weight.detach().abs().max()) for weight in run.agent.parameters())
    with (run.directory / "weights.csv").open("a") as file:
        csv.writer(file).writerow([run.env_steps, largest])
    return "stop" if record.get("charts/episodic_return_100", 0) > 195 else None


run = train(get_preset("cartpole-ppg"), on_iteration=on_iteration)
print(f"return {run.collector.episodes.recent_mean:.0f} after {run.env_steps:,} steps")
