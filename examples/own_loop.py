"""The loop in your own hands: the parts that `train.py` orders are public. Here the run stops itself when the task is solved."""

from dataclasses import replace

from phasicrl import get_preset
from phasicrl.phases import auxiliary_phase, compute_targets, policy_phase
from phasicrl.run import start_run

config = replace(get_preset("classic-ppg"), total_env_steps=100_000)
with start_run(config) as run:
    while run.env_steps < config.total_env_steps and not run.collector.episodes.recent_mean > 195:
        run.start_iteration()
        rollout = run.buffer.next_rollout()
        run.collect(rollout)
        samples, record = compute_targets(rollout, run.learning_reward(rollout), config.ppo)
        tools = {"compute": run.compute, "generator": run.generators["shuffle"]}
        record |= policy_phase(run.agent, run.optimizers, samples, config.ppo, **tools)
        if run.buffer.is_full:
            record |= auxiliary_phase(run.agent, run.optimizers["aux"], run.buffer, config.aux, **tools)
            run.buffer.clear()
        run.finish_iteration(record)
    run.finish()
print(f"return {run.collector.episodes.recent_mean:.0f} after {run.env_steps:,} steps")
