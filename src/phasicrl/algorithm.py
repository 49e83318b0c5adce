"""The algorithm: collect, learn, now and then distil, log, save. Kind: effects. Start reading here.

`learn` and `learn_from` are Algorithm 1 of the PPG paper (Cobbe et al. 2021, "Phasic Policy Gradient"), with its symbols in the comments.
The two phases are in `phases.py`, what they minimise in `objectives.py`, the advantages in `returns.py`. A loop of your own collects and
calls `learn_from`, as examples/own_loop.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
from torch import Tensor

from phasicrl.config import Config
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.envs.wrappers import MaskFunction
from phasicrl.models.agent import EncoderFactory
from phasicrl.phases import Record, auxiliary_phase, policy_phase
from phasicrl.rollout import Rollout
from phasicrl.runs.run import Run, resume_run, start_run


def learn(run: Run, on_iteration: Callable[[Run, Record], None] | None = None) -> None:
    """Train until the budget is used up."""
    while run.env_steps < run.config.budget:
        run.start_iteration()

        # Perform rollouts under the current policy π, straight into the buffer B
        rollout = run.buffer.next_rollout()
        run.collect(rollout)

        record = learn_from(run, rollout, run.learning_reward(rollout))
        run.finish_iteration(record)
        if on_iteration is not None:
            on_iteration(run, record)


def learn_from(run: Run, rollout: Rollout, reward: Tensor) -> Record:
    """Learn from a rollout and from these rewards for it, `[B, T]`; returns the metrics.

    The phase is a matter of counting: every N_π-th rollout fills the buffer B.
    """
    config = run.config

    # Compute the value function target V̂ and the advantage Â for all states
    samples, record = run.targets(rollout, reward)

    # For E_π epochs: optimise the clipped surrogate; for E_V epochs: optimise the value function
    record |= policy_phase(
        run.agent, run.optimizers, samples, config.ppo,
        compute=run.compute, generator=run.generators["shuffle"], stage=run.stage,
        kl_penalty=run.kl_penalty, renew=run.renewal(rollout, reward),
    )  # fmt: skip

    # After N_π iterations, for E_aux epochs over all data in B: distil V̂ into the policy's network, keeping π where it is
    if run.buffer.is_full:
        if config.aux is not None and run.auxiliary_phase_is_due():
            record |= auxiliary_phase(
                run.agent, run.optimizers["aux"], run.buffer, config.aux,
                compute=run.compute, generator=run.generators["shuffle"], stage=run.stage,
            )  # fmt: skip
        run.buffer.clear()

    # Statistics of observations move only now: a rollout and the epochs over it saw the same ones
    run.update_statistics(rollout)
    return record


def train(
    config: Config,
    *,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
    on_iteration: Callable[[Run, Record], None] | None = None,
) -> Run:
    """Train an agent from scratch. Without `config.aux` this is PPO.

    Args:
        config: every knob; `phasicrl.presets.get_preset(name)` has the named ones.
        make_env: makes one of your own Gymnasium environments, in place of `config.env.id`.
        make_vector_env: makes a vector environment of your own, with Gymnasium's `VectorEnv` interface, in place of
            `config.env.id`; it is given the number of environments. Each of its autoreset modes will do; `NEXT_STEP` and
            `DISABLED` need `reset(options={"reset_mask": …})` to reset the chosen environments alone.
        make_encoder: makes your own network, in place of `config.model.encoder`.
        mask_actions: from observations `[B, …]` and the environments' own masks to the masks that hold at the start of training, for
            `config.env.heuristic_mask_steps` steps.
        on_iteration: called after each iteration with the run and its metrics.

    Returns:
        The finished run: `run.agent`, `run.directory`, `run.summary()`.

    Raises:
        ValueError: a configuration that cannot work here; nothing was started.
        EnvError: an environment failed.
    """
    with start_run(config, make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder, mask_actions=mask_actions) as run:
        learn(run, on_iteration)
        run.finish()
    return run


def resume(
    run_dir: Path | str,
    *,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
    on_iteration: Callable[[Run, Record], None] | None = None,
) -> Run:
    """Continue the run in `run_dir` from its newest whole checkpoint to the end of its budget; arguments as for `train`.

    Raises:
        ValueError: not a run directory, or no checkpoint in it can be used.
    """
    with resume_run(
        Path(run_dir), make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder, mask_actions=mask_actions
    ) as run:
        learn(run, on_iteration)
        run.finish()
    return run
