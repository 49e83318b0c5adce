"""PPG on CartPole in ten lines; changing one line makes it PPO."""

from dataclasses import replace

from phasicrl import evaluate, get_preset, train

config = replace(get_preset("cartpole-ppg"), seed=3)  # aux=AuxConfig() here makes it PPO
run = train(config)
greedy, sampled = evaluate(run.directory, episodes=20)
print(f"greedy {greedy.mean_return:.0f}, sampled {sampled.mean_return:.0f}; see {run.directory}")
