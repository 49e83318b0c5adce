"""Early stop and metrics of your own, in methods that are called during training."""

from phasicrl import Callbacks, get_preset, train


class WatchWeights(Callbacks):
    """Log the longest episode and the largest weight; stop once the task is solved."""

    def on_start(self, run):
        self.longest = 0

    def on_episode(self, run, episode):
        self.longest = max(self.longest, episode.length)

    def on_iteration(self, run, record):
        largest = max(float(weight.detach().abs().max()) for weight in run.agent.parameters())
        run.log({"own/longest_episode": self.longest, "own/largest_weight": largest})
        return "stop" if record.get("charts/episodic_return_100", 0) > 195 else None


run = train(get_preset("cartpole-ppg"), callbacks=WatchWeights())
print(f"return {run.collector.episodes.recent_mean_return:.0f} after {run.env_steps:,} steps")
