"""What training several seeds of a small network as one batched program would gain.

A gradient step and acting, for 1 to 64 seeds.

usage: python benchmarks/many_seeds.py OUT.csv

One seed is CartPole with CleanRL's settings: a policy and a value network of 64-64 tanh units, 4
environments, minibatches of 128. A gradient step is the surrogate and value loss, their gradient,
clipping by the norm of the seed, and Adam; S seeds have stacked parameters `[S, …]` and are one
compiled call, as the steps of phasicrl are (`execution.compiled`). Written here for one such
network only: this measures whether the general way would be worth building. The environments are
stepped for all seeds in one pool.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from phasicrl import objectives
from phasicrl.config import EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.execution.compiled import compile_
from phasicrl.host.machine import num_cores
from phasicrl.host.provenance import commit
from phasicrl.optimize import adam_

ENVS, STEPS, MINIBATCHES, EPOCHS, OBS, WIDTH, ACTIONS = 4, 128, 4, 4, 4, 64, 2
SEEDS = (1, 4, 16, 64)
REPEATS, SECONDS = 5, 1.0


def networks(parameters: list[Tensor], obs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[S, M, A]` and values `[S, M]` of observations `[S, M, O]`."""

    def layers(weights: list[Tensor]) -> Tensor:
        hidden = obs
        for index in range(0, 6, 2):
            hidden = torch.baddbmm(weights[index + 1], hidden, weights[index])
            hidden = hidden.tanh() if index < 4 else hidden
        return hidden

    return layers(parameters[:6]).log_softmax(-1), layers(parameters[6:])[..., 0]


def new_parameters(num_seeds: int) -> list[Tensor]:
    """Stacked weights `[S, in, out]` and biases `[S, 1, out]` of both networks."""
    sizes = [
        (OBS, WIDTH),
        (WIDTH, WIDTH),
        (WIDTH, ACTIONS),
        (OBS, WIDTH),
        (WIDTH, WIDTH),
        (WIDTH, 1),
    ]
    tensors: list[Tensor] = []
    for rows, columns in sizes:
        tensors.append(torch.randn(num_seeds, rows, columns) / rows**0.5)
        tensors.append(torch.zeros(num_seeds, 1, columns))
    return tensors


def gradient_step(*inputs: Tensor) -> Tensor:
    """One step of every seed."""
    parameters, first, second, steps = (
        list(inputs[12 * part : 12 * part + 12]) for part in range(4)
    )
    rate, obs, action, old_log_prob, advantage, target = inputs[48:]
    with torch.enable_grad():
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        log_probs, value = networks(leaves, obs)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1))[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        loss = (
            objectives.surrogate_loss(log_prob, old_log_prob, advantage, clip=0.2)
            - 0.01 * entropy
            + 0.5 * objectives.value_loss(value, target)
        )
        total = loss.mean(-1).sum()
        gradients = torch.autograd.grad(total, leaves)
    norm = torch.stack([gradient.square().sum((1, 2)) for gradient in gradients]).sum(0).sqrt()
    factor = (0.5 / (norm + 1e-6)).clamp(max=1.0).view(-1, 1, 1)
    gradients = [gradient * factor for gradient in gradients]
    good = norm.isfinite().all()
    adam_(
        parameters,
        gradients,
        first,
        second,
        steps,
        rate=rate,
        betas=(0.9, 0.999),
        eps=1e-5,
        only_if=good,
        at_once=False,
    )
    return total.detach()


def act(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Actions, log-probabilities and values of every seed; noise is Gumbel's."""
    log_probs, value = networks(list(inputs[:12]), inputs[12])
    action = (log_probs + inputs[13]).argmax(-1)
    return action, log_probs.gather(-1, action.unsqueeze(-1))[..., 0], value


def measure(num_seeds: int) -> dict[str, list[float]]:
    """Seconds of a gradient step, of acting and of stepping the environments, for all seeds."""
    parameters = new_parameters(num_seeds)
    moments = [torch.zeros_like(parameter) for _ in range(2) for parameter in parameters]
    size = ENVS * STEPS // MINIBATCHES
    batch = [
        torch.randn(num_seeds, size, OBS),
        torch.randint(ACTIONS, (num_seeds, size)),
        *(torch.randn(num_seeds, size) - 1 for _ in range(3)),
    ]
    step_inputs = [
        *parameters,
        *moments,
        *(torch.zeros(()) for _ in parameters),
        torch.tensor(2.5e-4),
        *batch,
    ]
    act_inputs = [
        *(parameter.clone() for parameter in parameters),
        torch.randn(num_seeds, ENVS, OBS),
        torch.randn(num_seeds, ENVS, ACTIONS),
    ]
    step, acting = compile_(gradient_step, step_inputs), compile_(act, act_inputs)
    envs = make_envs(EnvConfig(id="envpool:CartPole-v1", num_envs=num_seeds * ENVS), seed=0)
    envs.reset()
    actions = [torch.randint(ACTIONS, (num_seeds * ENVS,)).numpy() for _ in range(16)]
    with torch.no_grad():
        parts = {
            "gradient step": lambda _: step(*step_inputs),
            "acting": lambda _: acting(*act_inputs),
            "environments": lambda number: envs.step(actions[number % 16]),
        }
        found = {name: [seconds(part) for _ in range(REPEATS)] for name, part in parts.items()}
    envs.close()
    return found


def seconds(part: object) -> float:
    """Of one call."""
    assert callable(part)
    part(0)
    start, number = perf_counter(), 0
    while perf_counter() - start < SECONDS:
        part(number)
        number += 1
    return (perf_counter() - start) / number


def main() -> None:
    """Measure with one thread and with all; a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    made = commit() or "unknown"
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "seeds",
                "threads",
                "part",
                "microseconds",
                "least",
                "most",
                "steps_per_second_of_all_seeds",
                "commit",
            ]
        )
        for threads in sorted({1, num_cores()}):
            torch.set_num_threads(threads)
            for num_seeds in SEEDS:
                found = measure(num_seeds)
                medians = {name: statistics.median(values) for name, values in found.items()}
                # What an iteration would take if nothing else took time: no bookkeeping, no
                # storage, no targets.
                iteration = (
                    STEPS * (medians["acting"] + medians["environments"])
                    + EPOCHS * MINIBATCHES * medians["gradient step"]
                )
                rate = round(num_seeds * ENVS * STEPS / iteration)
                for name, values in found.items():
                    row = [
                        num_seeds,
                        threads,
                        name,
                        *(
                            f"{1e6 * value:.1f}"
                            for value in (medians[name], min(values), max(values))
                        ),
                    ]
                    writer.writerow([*row, rate, made])
                file.flush()
                shown = {name: round(1e6 * value) for name, value in medians.items()}
                print(num_seeds, threads, shown, f"{rate:,}", flush=True)


if __name__ == "__main__":
    main()
