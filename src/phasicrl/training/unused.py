"""Options without effect, for the warning at the start of a run."""

from __future__ import annotations

from gymnasium.spaces import Box

from phasicrl.config import Config, defaults
from phasicrl.envs.protocol import VectorEnv
from phasicrl.spaces import is_image, leaves


def unused_options(config: Config, envs: VectorEnv, backend: str) -> dict[str, str]:
    """Return the changed options without effect, each with the condition that it needs."""
    ppo, model, aux, values = config.ppo, config.model, config.aux, config.values()
    parts = [part for _, part in leaves(envs.observation_space)]
    numbers = [part for part in parts if not is_image(part)]
    unused: dict[str, str] = {}

    def require(condition: object, what: str, paths: str) -> None:
        """Add options to `unused`, unless the condition that they need holds.

        `paths` are beginnings of their paths, separated by spaces.
        """
        if not condition:
            begin = tuple(paths.split())
            unused.update({path: what for path in values if path.startswith(begin)})

    dense, is_pool = model.hidden_sizes, backend in ("procgen", "envpool")
    is_continuous = any(isinstance(part, Box) for _, part in leaves(envs.action_space))
    has_ratio = ppo.objective == "surrogate" and (ppo.clip or ppo.kl_penalty)
    # fmt: off
    require(is_pool, "an EnvPool environment", "env.num_threads")
    require(backend in ("gymnasium", "own"), "Gymnasium", "env.parallel env.max_restarts")
    require(backend not in ("own", "vector"), "an environment's id", "env.options.")
    require(backend == "procgen", "a Procgen game",
         "env.distribution env.num_levels evaluation.levels")
    require(len(numbers) < len(parts), "images", "compute.micro_batch")
    require(is_continuous, "continuous actions", "action.")
    require(model.encoder == "impala", "model.encoder impala",
         "model.channels model.blocks model.pooling")
    require(dense and (model.encoder == "mlp" or numbers), "dense layers on numbers",
         "model.activation model.value_activation")
    require(model.value_path == "separate", "model.value_path separate",
         "model.value_activation ppo.value_learning_rate ppo.grad_norm_of")
    require(model.memory != "none", "model.memory", "model.memory_size")
    require(ppo.estimator == "gae", "ppo.estimator gae", "ppo.gae_lambda ppo.value_target")
    require(ppo.estimator == "n_step", "ppo.estimator n_step", "ppo.n_step")
    require(ppo.value_epochs, "ppo.value_epochs", "ppo.value_coef ppo.value_clip ppo.epoch_order")
    require(ppo.kl_penalty, "ppo.kl_penalty", "ppo.kl_estimate ppo.kl_penalty_target")
    require(ppo.policy_epochs > 1, "ppo.policy_epochs above 1", "ppo.target_kl")
    require(ppo.schedule == "adaptive_kl", "ppo.schedule adaptive_kl", "ppo.schedule_kl")
    require(ppo.uses_epoch_kl, "ppo.target_kl or ppo.kl_penalty_target", "ppo.epoch_kl")
    require(has_ratio, "ppo.clip or ppo.kl_penalty", "ppo.proximal_decay")
    require(ppo.advantage_norm == "batch" and ppo.collect_by == "steps",
         "ppo.advantage_norm batch and ppo.collect_by steps", "ppo.advantage_decay")
    require(ppo.advantage_norm != "none" and not ppo.advantage_decay,
         "ppo.advantage_norm without ppo.advantage_decay", "ppo.advantage_std")
    require(ppo.collect_by == "episodes", "ppo.collect_by episodes", "ppo.max_episodes")
    require(ppo.baseline, "ppo.baseline", "ppo.value_ ppo.epoch_order ppo.recompute_advantages "
         "ppo.bootstrap_truncation value_norm.")
    require(aux.optimizer == "own", "aux.optimizer own", "aux.learning_rate")
    require(aux.iterations_per_epoch, "aux.iterations_per_epoch", "aux.iterations_from")
    require(config.has_auxiliary_phase, "aux.epochs", "aux. compute.aux_precision")
    require(config.reward_norm.per != "none", "reward_norm.per", "reward_norm.")
    require(config.obs_norm.statistics != "none", "obs_norm.statistics", "obs_norm.")
    require(config.value_norm.statistics != "none", "value_norm.statistics", "value_norm.")
    require(config.evaluation.every_iterations, "evaluation.every_iterations", "evaluation.")
    require(config.log.wandb, "log.wandb", "log.wandb_")
    # fmt: on
    return {path: what for path, what in unused.items() if values[path] != defaults().get(path)}
