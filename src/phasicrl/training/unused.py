"""Options without effect, for the warning at the start of a run."""

from __future__ import annotations

from gymnasium.spaces import Box

from phasicrl.config import Config, get_defaults
from phasicrl.envs.protocol import VectorEnv
from phasicrl.spaces import is_image, leaves


def find_unused_options(config: Config, envs: VectorEnv, backend: str) -> dict[str, str]:
    """Return the changed options without effect, each with the condition that it needs."""
    ppo, model, aux, values = config.ppo, config.model, config.aux, config.values()
    parts = [part for _, part in leaves(envs.observation_space)]
    numbers = [part for part in parts if not is_image(part)]
    unused, dense = dict[str, str](), model.hidden_sizes

    def flag_unless(condition: object, needed: str, paths: str) -> None:
        """Flag options as unused, unless the condition that they need holds.

        `paths` are beginnings of their paths, separated by spaces.
        """
        if not condition:
            unused.update({x: needed for x in values if x.startswith(tuple(paths.split()))})

    is_continuous = any(isinstance(part, Box) for _, part in leaves(envs.action_space))
    has_ratio = ppo.objective == "surrogate" and (ppo.clip or ppo.kl_penalty)
    # fmt: off
    flag_unless(backend in ("procgen", "envpool"), "an EnvPool environment", "env.num_threads")
    flag_unless(backend in ("gymnasium", "own"), "Gymnasium", "env.parallel env.max_restarts")
    flag_unless(backend not in ("own", "vector"), "an environment's id", "env.options.")
    flag_unless(backend == "procgen", "a Procgen game",
                "env.distribution env.num_levels evaluation.levels")
    flag_unless(len(numbers) < len(parts), "images", "compute.micro_batch")
    flag_unless(is_continuous, "continuous actions", "action.")
    flag_unless(model.encoder == "impala", "model.encoder impala",
                "model.channels model.blocks model.pooling")
    flag_unless(dense and (model.encoder == "mlp" or numbers), "dense layers on numbers",
                "model.activation model.value_activation")
    flag_unless(model.value_path == "separate", "model.value_path separate",
                "model.value_activation ppo.value_learning_rate ppo.grad_norm_of")
    flag_unless(model.memory != "none", "model.memory", "model.memory_size")
    flag_unless(ppo.estimator == "gae", "ppo.estimator gae", "ppo.gae_lambda ppo.value_target")
    flag_unless(ppo.estimator == "n_step", "ppo.estimator n_step", "ppo.n_step")
    flag_unless(ppo.value_epochs, "ppo.value_epochs", "ppo.value_c ppo.epoch_order")
    flag_unless(ppo.kl_penalty, "ppo.kl_penalty", "ppo.kl_estimate ppo.kl_penalty_target")
    flag_unless(ppo.policy_epochs > 1, "ppo.policy_epochs above 1", "ppo.target_kl")
    flag_unless(ppo.schedule == "adaptive_kl", "ppo.schedule adaptive_kl", "ppo.schedule_kl")
    flag_unless(ppo.entropy_coef, "ppo.entropy_coef", "ppo.entropy_schedule")
    flag_unless(ppo.clip, "ppo.clip", "ppo.clip_schedule")
    flag_unless(ppo.uses_epoch_kl, "ppo.target_kl or ppo.kl_penalty_target", "ppo.epoch_kl")
    flag_unless(has_ratio, "ppo.clip or ppo.kl_penalty", "ppo.proximal_decay")
    flag_unless(ppo.advantage_norm == "batch" and ppo.collect_by == "steps",
                "ppo.advantage_norm batch and ppo.collect_by steps", "ppo.advantage_decay")
    flag_unless(ppo.advantage_norm != "none" and not ppo.advantage_decay,
                "ppo.advantage_norm without ppo.advantage_decay", "ppo.advantage_std")
    flag_unless(ppo.collect_by == "episodes", "ppo.collect_by episodes", "ppo.max_episodes")
    flag_unless(ppo.bootstrap_truncation, "ppo.bootstrap_truncation", "ppo.truncation_value")
    flag_unless(ppo.baseline, "ppo.baseline", "ppo.value_ ppo.epoch_order ppo.recompute_advantages "
                "ppo.bootstrap_truncation ppo.truncation_value value_norm.")
    flag_unless(aux.optimizer == "own", "aux.optimizer own", "aux.learning_rate")
    flag_unless(aux.iterations_per_epoch, "aux.iterations_per_epoch", "aux.iterations_from")
    flag_unless(config.has_auxiliary_phase, "aux.epochs", "aux. compute.aux_precision")
    flag_unless(config.reward_norm.per != "none", "reward_norm.per", "reward_norm.")
    flag_unless(config.obs_norm.statistics == "ema", "obs_norm.statistics ema", "obs_norm.decay")
    flag_unless(config.value_norm.statistics == "ema", "value_norm.statistics ema",
                "value_norm.decay")
    flag_unless(config.obs_norm.statistics != "none", "obs_norm.statistics", "obs_norm.")
    flag_unless(config.value_norm.statistics != "none", "value_norm.statistics", "value_norm.")
    flag_unless(config.evaluation.film, "evaluation.film", "evaluation.overlay")
    flag_unless(config.evaluation.every_iterations, "evaluation.every_iterations", "evaluation.")
    flag_unless(config.log.wandb, "log.wandb", "log.wandb_")
    # fmt: on
    return {path: what for path, what in unused.items() if values[path] != get_defaults().get(path)}
