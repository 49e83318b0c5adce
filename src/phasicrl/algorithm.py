"""The algorithm: collect rollouts, train on them, log, save. Kind: effects. Start reading here.

`learn` is Algorithm 1 of the PPG paper (Cobbe et al. 2021, "Phasic Policy Gradient"), with its
symbols in the comments. The two phases are in `phases.py`, the losses in `objectives.py`, the
advantages in `returns.py`.
"""

from pathlib import Path
from typing import Literal, Unpack

from phasicrl.config import Config
from phasicrl.distributed import connect_ranks
from phasicrl.phases import auxiliary_phase, policy_phase
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.build import UserObjects, restore_run, start_run
from phasicrl.training.run import Run


def learn(run: Run) -> None:
    """Train a run in place: to its budget, to `stop_at_return`, or until a callback stops it."""
    learner, buffer = run.learner, run.buffer
    run.call_callback("on_start")
    while run.env_steps < run.config.budget:
        if not buffer.is_full:  # else resumed in an auxiliary phase, or before one
            # Perform rollouts under the current policy π, and write them into the buffer B
            rollout = run.collect(buffer.next_rollout())

            # Compute V̂ and Â for all states; for E_π epochs, optimize the clipped surrogate; for
            # E_V epochs, the value function
            run.record = policy_phase(learner, rollout, on_stage=run.show, on_epoch=run.log_epoch)

        # After N_π iterations, for E_aux epochs over all data in B: distill V̂ into the policy's
        # network, with a penalty on changes of π
        if learner.is_auxiliary_phase_due:
            run.record |= auxiliary_phase(
                learner, buffer, on_stage=run.show, on_epoch=run.log_epoch,
                on_epoch_start=run.back_up_and_maybe_save,
            )  # fmt: skip
        # Keep the rollouts for the phase that is skipped at the end of a run, in case it is resumed
        # with more steps
        if buffer.is_full and not learner.is_last_auxiliary_phase_skipped:
            buffer.clear()

        # Log the metrics, call the callbacks; evaluate and save a checkpoint if either is due
        if run.finish_iteration(run.record):
            return


def train(
    config: Config, *, resume: Literal["never", "auto"] = "never",
    **user_objects: Unpack[UserObjects],
) -> Run:  # fmt: skip
    """Train an agent from scratch: PPG, or PPO if `config.aux.epochs` is 0.

    Processes started by `torchrun` train one agent together.

    Args:
        config: options of the run; `phasicrl.get_preset(name)` returns a named configuration.
        resume: `auto` resumes the newest run of this experiment, seed and length, if there is one.
        user_objects: custom callbacks, environments, networks, masks and schedules.

            - `callbacks`: instance of a subclass of `phasicrl.Callbacks`, or a function of the run
              and its metrics that is called after each iteration. If it returns "stop", the run is
              saved and ends; `phasicrl.resume` continues it.
            - `make_env`: function that returns a Gymnasium environment, in place of
              `config.env.id`.
            - `make_vector_env`: function of the number of environments that returns a Gymnasium
              `VectorEnv` of arrays or tensors, an rsl_rl `VecEnv` or a simulator
              (docs/simulators.md), in place of `config.env.id`. All autoreset modes of arrays work;
              `NEXT_STEP` and `DISABLED` need `reset(options={"reset_mask": …})`.
            - `make_encoder`: function of the observation space that returns a network, in place of
              `config.model.encoder`.
            - `make_head`: function of a head's name (`policy`, `value` or `aux_value`) and its
              numbers of features and outputs that returns a network, or None for a linear layer.
            - `mask_actions`: function of observations `[B, …]` and the environments' masks that
              returns the masks of the first `config.env.heuristic_mask_steps` steps.
            - `schedule`: function of the progress, from 0 to 1 by environment steps, that returns
              learning rates, clip range or entropy coefficient for the next iteration, such as
              `{"ppo.clip": 0.2 * (1 - progress)}`, in place of constants and of named schedules.

    Returns:
        The finished run: `run.agent`, `run.directory`, `run.format_results()`.

    Raises:
        ValueError: the configuration cannot work, and nothing was started; or training has
            diverged, or a callback or schedule returned something wrong: the error then has
            `run_directory`.
        EnvError: an environment failed.
        RankError: another process of the run failed or does not answer.
    """
    if not isinstance(config, Config):
        raise ValueError(f"config is {config!r}; expected a Config. get_preset(NAME) returns one")
    with (
        connect_ranks(device=config.compute.device, timeout=config.compute.rank_timeout) as world,
        start_run(config, resume=resume, world=world, **user_objects) as run,
    ):
        learn(run)
        run.finish()
    return run


def resume(
    run_dir: Path | str, *, total_env_steps: int | None = None, accept_config_changes: bool = False,
    **user_objects: Unpack[UserObjects],
) -> Run:  # fmt: skip
    """Resume a run from its newest usable checkpoint, and train to the end of its step budget.

    Args:
        run_dir: Run directory.
        total_env_steps: Train for more steps than before; schedules then fall more slowly.
        accept_config_changes: Resume even if config.json was changed since the checkpoint.
        user_objects: custom callbacks, environments, networks, masks and schedules, see `train`.

    Returns:
        The finished run, as from `train`.

    Raises:
        ValueError: the directory is not a run directory, is in use by another process, has no
            usable checkpoint, or its configuration was changed; or as in `train`.
        EnvError: an environment failed.
        RankError: another process of the run failed or does not answer.
    """
    run_directory = RunDirectory.find(run_dir)
    compute = run_directory.config.compute
    given = {"accept_config_changes": accept_config_changes, "total_env_steps": total_env_steps}
    with (
        connect_ranks(device=compute.device, timeout=compute.rank_timeout) as world,
        restore_run(run_directory.path, world=world, **given, **user_objects) as run,
    ):
        learn(run)
        run.finish()
    return run
