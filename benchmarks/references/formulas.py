"""Their side where no reference has a feature: the papers' formulas, written out.

Sums over steps, moments of everything so far, the cells of LSTMs and divergences are computed as
they are defined, slowly. Options are those of our preset, with two networks and joint epochs. From
PyTorch come gradients, their clipping, and Adam.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from references.cases import Case
from references.quantities import Arrays, Quantities
from references.substitute import losses_noted
from torch import Tensor

from phasicrl.presets import get_preset

Data = dict[str, Tensor]
"""Samples, `[S, L, …]`, and the state before them, `[S, 4, H]`: output and cell of each LSTM."""


def moments(batches: list[Tensor], norm: Any = None) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of K batches `[…, D]`: of all samples, or by the batches' age."""
    every = torch.stack(batches).double().reshape(len(batches), -1, batches[0].shape[-1])  # [K N D]
    decay = norm.decay if norm is not None and norm.statistics == "ema" else 1.0
    weight = (decay ** -torch.arange(len(batches)).double())[:, None, None].expand_as(every)
    mean = (weight * every).sum((0, 1)) / weight[..., 0].sum()
    variance = (weight * (every - mean) ** 2).sum((0, 1)) / weight[..., 0].sum()
    return mean.to(batches[0].dtype), (variance + 1e-8).sqrt().to(batches[0].dtype)


class Side:
    """A run by the formulas, in the default precision.

    A policy is a tensor `[…, 2]`: log-probabilities, and whether the action is allowed; or means
    and standard deviations.

    Args:
        path: unused.
        precision: unused.
    """

    def __init__(self, path: Path, precision: str) -> None: ...

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Compute a case.

        Args:
            case: the comparison.
            start: initial weights.
            orders: orders of all passes over samples.
            turned: whether each minibatch's samples are added up in the opposite order.
        """
        self.case, self.start, self.turned = case, start, turned
        self.config = get_preset(case.preset).with_updates(case.changes)
        self.found, self.orders, self.recording = Quantities(), list(orders), case.experience()
        self.discrete = self.recording.action.ndim == 2
        self.weights = {
            name: torch.tensor(value, dtype=torch.get_default_dtype(), requires_grad=True)
            for name, value in start.items()
        }
        second = [name for name in start if name.startswith("value_")]
        self.networks = [[name for name in start if name not in second], second]
        ppo, every = self.config.ppo, self.weights.values()
        self.adams = {name: torch.optim.Adam(every, eps=ppo.adam_eps) for name in ("policy", "aux")}
        self.rate, self.averaged = ppo.learning_rate, [self.policy_weights()]
        self.rollouts, self.targets, self.observed = list[Data](), list[Tensor](), list[Tensor]()
        self.returns, self.running = list[Tensor](), torch.zeros(case.num_envs)
        self.scale, self.mean, self.std = torch.zeros(()), torch.zeros(()), torch.ones(())
        self.state = torch.zeros(case.num_envs, 4, self.config.model.memory_size)
        with losses_noted() as self.losses:
            for i in range(1, case.iterations + 1):
                self.policy_phase(i)
                if not i % self.config.aux.every and i < case.iterations:
                    self.auxiliary_phase(i)
        assert not self.orders, f"{len(self.orders)} orders were left"
        return self.found

    def policy_weights(self) -> Data:
        return {name: self.weights[name].detach().clone() for name in self.networks[0]}

    # --- networks and policies

    def features(self, weights: Data, prefix: str, data: Data) -> Tensor:
        """Return the features of a network, `[S, L, D]`; LSTMs write their state into the data."""
        x, which = data["obs"], slice(2, 4) if prefix else slice(0, 2)
        if self.observed:
            mean, deviation = moments(self.observed, self.config.obs_norm)
            x = ((x - mean) / deviation).clamp(-10, 10)
        names = [name for name in weights if name.startswith(f"{prefix}encoder.")]
        for weight, bias in zip(names[::2], names[1::2], strict=True):
            x = (x @ weights[weight].T + weights[bias]).tanh()
        cell = [weights[name] for name in weights if name.startswith(f"{prefix}memory.")]
        if not cell:
            return x
        state, outputs = data["state"][:, which], []
        for now, first in zip(x.unbind(1), data["first"].unbind(1), strict=True):
            output, memory = torch.where(first[:, None, None], 0, state).unbind(1)
            state = torch.stack(torch.lstm_cell(now, (output, memory), *cell), 1)
            outputs.append(state[:, 0])
        data["state"] = data["state"].clone()
        data["state"][:, which] = state.detach()
        return torch.stack(outputs, 1)

    def policy(self, data: Data, weights: Data) -> Tensor:
        """Return the policy, `[S, L, …, 2]`."""
        features = self.features(weights, "", data)
        layer = (weights[f"policy_head.linear.{name}"] for name in ("weight", "bias"))
        outputs = torch.nn.functional.linear(features, *layer)
        if not self.discrete:
            std = weights["policy_head.log_std"].exp()
            return torch.stack([outputs, std.expand_as(outputs)], -1)
        allowed = data["mask"].to(outputs.dtype).expand_as(outputs)
        total = (outputs.exp() * allowed).sum(-1, keepdim=True)
        return torch.stack([(outputs - total.log()) * allowed, allowed], -1)

    def value(self, data: Data, prefix: str = "") -> Tensor:
        """Return values; those of the auxiliary head if its prefix is given."""
        features = self.features(self.weights, "" if prefix else "value_", data)
        head = (self.weights[f"{prefix}value_head.{name}"] for name in ("weight", "bias"))
        return torch.nn.functional.linear(features, *head)[..., 0] * self.std + self.mean

    def log_prob_and_entropy(self, policy: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return `log π(a)` and `−Σ p log p`, or those of normal distributions."""
        one, two = policy.unbind(-1)
        if self.discrete:
            log_prob = one.gather(-1, action[..., None])[..., 0]
            return log_prob, -(two * one.exp() * one).sum(-1)
        density = (-((action - one) ** 2) / (2 * two**2)).exp() / (two * math.sqrt(2 * math.pi))
        return density.log().sum(-1), 0.5 * (2 * math.pi * math.e * two**2).log().sum(-1)

    def divergence(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old ‖ new), with terms that add up to 0, without gradient at `old`."""
        (one, two), (new_one, new_two) = old.unbind(-1), new.unbind(-1)
        if self.discrete:
            before, after = two * one.exp(), new_two * new_one.exp()
            return (before * (one - new_one) + after - before).sum(-1)
        ratio = two**2 / new_two**2 if self.turned else (two / new_two) ** 2
        return 0.5 * (ratio - 1 - ratio.log() + ((one - new_one) / new_two) ** 2).sum(-1)

    # --- rollouts

    @torch.no_grad()
    def rollout(self, i: int) -> Data:
        """Compute what acting finds, `[B, T, …]`."""
        one, steps = self.recording, slice((i - 1) * self.case.num_steps, i * self.case.num_steps)
        mask = np.ones((*one.reward.shape, 1), bool) if one.mask is None else one.mask[:-1]
        first = np.concatenate([np.ones_like(one.ended[:1]), one.ended])
        arrays = {
            "obs": one.obs, "after": one.obs[1:], "final": one.final_obs, "first": first,
            "starts": first[1:], "mask": mask, "action": one.action, "reward": one.reward,
            "terminated": one.terminated, "truncated": one.truncated,
        }  # fmt: skip
        data = {name: torch.from_numpy(x[steps].swapaxes(0, 1)) for name, x in arrays.items()}
        data = {name: x.float() if x.is_floating_point() else x for name, x in data.items()}
        data |= {"value": torch.zeros(data["reward"].shape), "state": self.state}
        data["next_value"], norm = data["value"].clone(), self.config.obs_norm
        if norm.statistics != "none":
            self.observed = [earlier["obs"] for earlier in self.rollouts]
        acting = self.policy(dict(data), self.weights)
        data["log_prob"], _ = self.log_prob_and_entropy(acting, data["action"])
        if norm.statistics != "none" and norm.from_first_rollout and i == 1:
            self.observed = [data["obs"]]
        for t in range(self.case.num_steps):
            now = {name: data[name][:, [t]] for name in ("obs", "first", "mask")}
            now["state"] = self.state
            self.policy(now, self.weights)
            data["value"][:, [t]] = self.value(now)
            self.state, cut = now["state"], data["truncated"][:, [t]]
            now["obs"] = torch.where(cut[..., None], data["final"][:, [t]], data["after"][:, [t]])
            now["first"] = data["starts"][:, [t]] & ~cut
            data["next_value"][:, [t]] = self.value(now)
        return data

    def normalized_reward(self, data: Data) -> Tensor:
        """Return the rewards over the deviation of all discounted returns so far."""
        data["old_scale"] = self.scale.expand(data["reward"].shape)
        if self.config.reward_norm.per == "none":
            return data["reward"]
        for reward, first in zip(data["reward"].T, data["first"].T, strict=True):
            self.running = reward + self.config.reward_norm_gamma * torch.where(
                first, 0, self.running
            )
            self.returns.append(self.running[:, None])
        self.scale = moments(self.returns)[1][0]
        return (data["reward"] / self.scale).clamp(-10, 10)

    def advantages(self, data: Data, reward: Tensor) -> Tensor:
        """Return `Σ (γλ)^k δ_{t+k}` to the end of the episode or the rollout."""
        ppo, following = self.config.ppo, torch.where(data["terminated"], 0, data["next_value"])
        delta, result = reward + ppo.gamma * following - data["value"], torch.zeros_like(reward)
        for env, t in np.ndindex(*delta.shape):
            for k in range(t, delta.shape[1]):
                result[env, t] += (ppo.gamma * ppo.gae_lambda) ** (k - t) * delta[env, k]
                if data["starts"][env, k]:
                    break
        return result

    def normalize_values(self, data: Data, reward: Tensor) -> None:
        """Measure the targets so far; values, at first small numbers, keep their meaning after."""
        old_mean, old_std, is_first = self.mean, self.std, not self.targets
        self.targets.append((data["value"] + self.advantages(data, reward))[..., None])
        (self.mean,), (self.std,) = moments(self.targets, self.config.value_norm)
        if is_first:
            for name in ("value", "next_value"):
                data[name] = data[name] * self.std + self.mean
            return
        for name in ("value_head", "aux_value_head"):
            weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            weight.mul_(old_std / self.std)
            bias.copy_((bias * old_std + old_mean - self.mean) / self.std)

    # --- the two phases

    def policy_phase(self, i: int) -> None:
        """Train on a rollout."""
        ppo, data = self.config.ppo, self.rollout(i)
        with torch.no_grad():
            data["normalized"] = reward = self.normalized_reward(data)
            if self.config.value_norm.statistics != "none":
                self.normalize_values(data, reward)
            data["advantage"] = self.advantages(data, reward)
            data["target"] = data["value"] + data["advantage"]
            data["old"] = self.policy(dict(data), self.weights)
        self.rollouts.append(data)
        names = {"values": "value", "log-probabilities": "log_prob", "advantages": "advantage",
                 "rewards, normalized": "normalized", "value targets": "target"}  # fmt: skip
        for quantity, name in names.items():
            self.found.put(i, quantity, data[name])
        for _ in range(ppo.policy_epochs):
            for rows in self.minibatches([data], ppo, ppo.num_minibatches):
                self.adapt_rate(rows)
                self.step("policy", self.loss(rows), self.rate, ppo.max_grad_norm)
                self.averaged.append(self.policy_weights())
        self.put_state(i, "policy phase")

    def loss(self, rows: Data) -> Tensor:
        """Return the clipped surrogate, the entropy bonus and the value loss."""
        ppo, advantage, proximal = self.config.ppo, rows["advantage"], rows["log_prob"]
        if ppo.proximal_decay is not None:
            powers = [ppo.proximal_decay**-k for k in range(len(self.averaged))]
            pairs = list(zip(powers, self.averaged, strict=True))
            averaged = {
                x: torch.stack([power * old[x] for power, old in pairs]).sum(0) / sum(powers)
                for x in self.networks[0]
            }
            policy = self.policy(dict(rows), averaged)
            proximal, _ = self.log_prob_and_entropy(policy, rows["action"])
        policy = self.policy(dict(rows), self.weights)
        log_prob, entropy = self.log_prob_and_entropy(policy, rows["action"])
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        ratio = (log_prob - proximal).exp()
        clipped = ratio.clamp(1 - (ppo.clip or 0), 1 + (ppo.clip or 0))
        least = torch.minimum(ratio * advantage, clipped * advantage)
        gain = (proximal - rows["log_prob"]).exp() * least + ppo.entropy_coef * entropy
        return ppo.value_coef * self.error(rows) - gain.mean()

    def error(self, rows: Data, prefix: str = "") -> Tensor:
        """Return half the squared error of values, in units of the targets' deviation."""
        return ((self.value(dict(rows), prefix) - rows["target"]) / self.std).square().mean() / 2

    @torch.no_grad()
    def adapt_rate(self, rows: Data) -> None:
        """Adapt the learning rate to the divergence of a minibatch, unless that is rounding."""
        kl = self.divergence(rows["old"], self.policy(dict(rows), self.weights)).mean()
        is_on, share = self.config.ppo.schedule == "adaptive_kl", kl / self.config.ppo.schedule_kl
        if is_on and (share > 2 or 1e-12 < share < 0.5):
            self.rate = min(max(self.rate * (1.5 if share < 1 else 1 / 1.5), 1e-5), 1e-2)

    def auxiliary_phase(self, i: int) -> None:
        """Train on all rollouts of a phase, or some."""
        aux, phase = self.config.aux, self.rollouts[-self.config.aux.every :]
        if aux.recompute_targets:
            self.recompute_targets(phase)
        for data in phase:
            data["old"] = self.policy(dict(data), self.weights).detach()
        used = aux.iterations_per_epoch or aux.every
        some = phase[-used:] if aux.iterations_from == "last" else phase
        for _ in range(aux.epochs):
            minibatches = self.minibatches(some, aux, aux.num_minibatches * len(some))
            for rows in minibatches[: aux.num_minibatches * used]:
                policy = self.policy(dict(rows), self.weights)
                loss = aux.beta_clone * self.divergence(rows["old"], policy).mean()
                loss = loss + self.error(rows, "aux_") + aux.value_coef * self.error(rows)
                self.step("aux", loss, aux.learning_rate, aux.max_grad_norm)
        self.averaged = [self.policy_weights()]
        self.put_state(i, "auxiliary phase")

    @torch.no_grad()
    def recompute_targets(self, phase: list[Data]) -> None:
        """Compute a phase's targets again, with the present values and scale of rewards.

        Values of observations that are not kept are converted from their rollout's scale.
        """
        values = [self.value(dict(data)) for data in phase]
        for k, data in enumerate(phase):
            reward, kept = (data["reward"] / self.scale).clamp(-10, 10), data["next_value"].clone()
            kept *= torch.where(data["old_scale"] > 0, data["old_scale"] / self.scale, 1)
            following = torch.cat([values[k][:, 1:], kept[:, -1:]], 1)
            if k + 1 < len(phase):
                following[:, -1] = values[k + 1][:, 0]
            following = torch.where(data["truncated"], kept, following)
            again = data | {"value": values[k], "next_value": following}
            data["target"] = values[k] + self.advantages(again, reward)

    def minibatches(self, rollouts: list[Data], group: Any, count: int) -> list[Data]:
        """Return the minibatches of the next order."""
        order = torch.from_numpy(self.orders.pop(0)).reshape(count, -1)
        order = order.flip(1) if self.turned else order
        whole = {name: torch.cat([data[name] for data in rollouts]) for name in rollouts[0]}
        if self.config.get_shuffle_unit(group) == "transitions":
            state = whole["state"].repeat_interleave(self.case.num_steps, 0)
            whole = {name: x.flatten(0, 1)[:, None] for name, x in whole.items()}
            whole["state"] = state
        return [{name: x[index] for name, x in whole.items()} for index in order]

    def step(self, task: str, loss: Tensor, rate: float, max_norm: float | None) -> None:
        """Clip the gradient of each network, and step."""
        self.adams[task].zero_grad()
        loss.backward()
        for names in self.networks:
            torch.nn.utils.clip_grad_norm_([self.weights[x] for x in names], max_norm or math.inf)
        self.adams[task].param_groups[0]["lr"] = rate
        self.adams[task].step()

    def put_state(self, i: int, phase: str) -> None:
        """Note the state after a phase."""
        adams = {task: [adam] for task, adam in self.adams.items()}
        self.found.put_state(i, self.weights, self.start, adams, phase)
        self.found.put(i, f"learning rate after the {phase}", self.rate)
        self.found.put(i, f"losses of the {phase}'s steps", self.losses)
        self.losses.clear()
