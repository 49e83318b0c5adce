"""Custom training loop, which stops when the task is solved and may change the rewards."""

from dataclasses import replace

from phasicrl import get_preset
from phasicrl.phases import auxiliary_phase, policy_phase
from phasicrl.training.build import start_run
from phasicrl.training.run import Run


def train_until_solved(run: Run, *, solved: float) -> None:
    """Train until the mean return of 100 episodes exceeds `solved`, or the budget is spent."""
    learner, buffer, episodes = run.learner, run.buffer, run.collector.episodes
    while run.env_steps < run.config.budget and not episodes.recent_mean_return > solved:
        rollout = run.collect(buffer.next_rollout())
        # Rewards [environments, steps]; add a bonus here.
        reward, _ = learner.normalize_reward(rollout)
        record = policy_phase(learner, rollout, reward)
        if learner.is_auxiliary_phase_due:
            record |= auxiliary_phase(learner, buffer)
        if buffer.is_full:
            buffer.clear()
        if run.finish_iteration(record):
            break
    run.finish()


if __name__ == "__main__":
    with start_run(replace(get_preset("classic-ppg"), total_env_steps=100_000)) as run:
        train_until_solved(run, solved=195)
    print(f"return {run.collector.episodes.recent_mean_return:.0f} after {run.env_steps:,} steps")
