"""PPG on CartPole in ten lines; one changed line makes it PPO."""

from dataclasses import replace

from phasicrl import evaluate, get_preset, train

# aux=AuxConfig() here would make it PPO.
config = replace(get_preset("classic-ppg"), seed=3, total_env_steps=30_000)
run = train(config)
greedy, sampled = evaluate(run.directory, episodes=20)
print(
    f"greedy {greedy.mean_return:.0f}, sampled {sampled.mean_return:.0f}; "
    f"everything is in {run.directory}"
)
