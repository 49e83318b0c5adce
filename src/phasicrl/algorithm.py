"""The algorithm: collect, learn, at times distill, log, save. Kind: effects. Start reading here.

`learn` is Algorithm 1 of the PPG paper (Cobbe et al. 2021, "Phasic Policy Gradient"), with its
symbols in the comments. The two phases are in `phases.py`, what they minimize is in
`objectives.py`, the advantages are in `returns.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import gymnasium as gym

from phasicrl.config import Config
from phasicrl.distributed import join
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.envs.wrappers import MaskFunction
from phasicrl.learner import Record
from phasicrl.models.agent import EncoderFactory
from phasicrl.phases import auxiliary_phase, policy_phase
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.build import resume_run, start_run
from phasicrl.session.run import Run

OnIteration = Callable[[Run, Record], Literal["stop"] | None]
"""Called after each iteration with the run and its metrics; "stop" ends the run there."""


def learn(run: Run, on_iteration: OnIteration | None = None) -> None:
    """Train until the budget is used up, or `on_iteration` says "stop"."""
    learner, buffer = run.learner, run.buffer
    while run.env_steps < run.config.budget:
        if buffer.progress is None:  # else the run is resumed in the middle of an auxiliary phase
            # Perform rollouts under the current policy π, straight into the buffer B
            rollout = run.collect(buffer.next_rollout())

            # Compute V̂ and Â for all states; for E_π epochs, optimize the clipped surrogate; for
            # E_V epochs, the value function
            run.record = policy_phase(learner, rollout, stage=run.stage, on_epoch=run.log_epoch)

        # After N_π iterations, for E_aux epochs over all data in B: distill V̂ into the policy's
        # network, keeping π where it is
        if learner.auxiliary_phase_is_due:
            run.record |= auxiliary_phase(
                learner,
                buffer,
                stage=run.stage,
                on_epoch=run.log_epoch,
                before_epoch=run.maybe_checkpoint,
            )
        if buffer.is_full:
            buffer.clear()

        run.finish_iteration(run.record)
        with run.world.together("on_iteration"):
            wants_stop = on_iteration is not None and on_iteration(run, run.record) == "stop"
        if run.world.any(wants_stop):
            return


def train(
    config: Config,
    *,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
    on_iteration: OnIteration | None = None,
) -> Run:
    """Train an agent from scratch. Without `config.aux` this is PPO.

    Processes that `torchrun` has started train it together.

    Args:
        config: every knob; `phasicrl.presets.get_preset(name)` has the named ones.
        make_env: makes one of your own Gymnasium environments, in place of `config.env.id`.
        make_vector_env: makes a vector environment of your own, with Gymnasium's `VectorEnv`
            interface, in place of `config.env.id`; it is given the number of environments. Each of
            its autoreset modes will do; `NEXT_STEP` and `DISABLED` need
            `reset(options={"reset_mask": …})` to reset the chosen environments alone.
        make_encoder: makes your own network, in place of `config.model.encoder`.
        mask_actions: from observations `[B, …]` and the environments' own masks to the masks that
            hold at the start of training, for `config.env.heuristic_mask_steps` steps.
        on_iteration: called after each iteration with the run and its metrics. If it returns
            "stop", the run is saved and ends there; `resume` goes on to the end of its budget.

    Returns:
        The finished run: `run.agent`, `run.directory`, `run.summary()`.

    Raises:
        ValueError: a configuration that cannot work here; nothing was started.
        EnvError: an environment failed.
        RankError: another process of the run failed, or does not answer.
    """
    with (
        join(device=config.compute.device, timeout=config.compute.rank_timeout) as world,
        start_run(
            config,
            make_env=make_env,
            make_vector_env=make_vector_env,
            make_encoder=make_encoder,
            mask_actions=mask_actions,
            world=world,
        ) as run,
    ):
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
    on_iteration: OnIteration | None = None,
    accept_config_changes: bool = False,
) -> Run:
    """Continue a run from its last whole checkpoint to the end of its budget.

    Args:
        run_dir: Run directory.
        make_env: as for `train`, like the others.
        make_vector_env: as for `train`.
        make_encoder: as for `train`.
        mask_actions: as for `train`.
        on_iteration: as for `train`.
        accept_config_changes: Go on though config.json is not what the checkpoint was trained with.

    Raises:
        ValueError: not a run directory, another process trains it, no checkpoint in it can be used,
            or its configuration has changed.
    """
    compute = RunDirectory(Path(run_dir)).config.compute
    with (
        join(device=compute.device, timeout=compute.rank_timeout) as world,
        resume_run(
            Path(run_dir),
            make_env=make_env,
            make_vector_env=make_vector_env,
            make_encoder=make_encoder,
            mask_actions=mask_actions,
            accept_config_changes=accept_config_changes,
            world=world,
        ) as run,
    ):
        learn(run, on_iteration)
        run.finish()
    return run
