"""PPG on CartPole: train, evaluate, load the agent, act with it in a loop of your own."""

import gymnasium as gym

from phasicrl import evaluate, get_preset, load, train

run = train(get_preset("cartpole-ppg").with_updates({"seed": 3}))  # cartpole-ppo is PPO
greedy, sampled = evaluate(run.directory, episodes=20)
print(f"greedy {greedy.mean_return:.0f}, sampled {sampled.mean_return:.0f}; see {run.directory}")

agent, env = load(run.directory), gym.make("CartPole-v1")
(obs, _), done, total = env.reset(), False, 0.0
while not done:
    obs, reward, terminated, truncated, _ = env.step(agent.act(obs))
    total, done = total + float(reward), terminated or truncated
print(f"{total:.0f} in your own loop")
