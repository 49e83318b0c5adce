"""Options without effect, for the warning at the start of a run."""

from gymnasium.spaces import Box

from phasicrl.config import Config, get_defaults
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.wrappers import HeuristicMask
from phasicrl.spaces import is_image, leaves

Requirement = tuple[object, str, str]
"""Condition that options require, its description, and the beginnings of their paths."""


def find_unused_options(config: Config, envs: VectorEnv, backend: str) -> dict[str, str]:
    """Return the changed options without effect, each with the condition that it requires."""
    unused, values, defaults = dict[str, str](), config.values(), get_defaults()
    of_envs = _list_requirements_on_envs(config, envs, backend)
    for condition, description, paths in [*of_envs, *_list_option_requirements(config)]:
        if not condition:
            unused.update({x: description for x in values if x.startswith(tuple(paths.split()))})
    return {path: what for path, what in unused.items() if values[path] != defaults.get(path)}


# fmt: off
def _list_requirements_on_envs(config: Config, envs: VectorEnv, backend: str) -> list[Requirement]:
    """List the requirements of options on the environments."""
    parts, model = [part for _, part in leaves(envs.observation_space)], config.model
    # A CNN reads floats, too, if they are the only part and have three axes.
    reads_all = model.encoder != "mlp" and [len(part.shape or ()) for part in parts] == [3]
    numbers = [part for part in parts if not (is_image(part) or reads_all)]
    is_continuous = any(isinstance(part, Box) for _, part in leaves(envs.action_space))
    has_dense = model.hidden_sizes and (model.encoder == "mlp" or numbers)
    return [
        (backend in ("procgen", "envpool"), "an EnvPool environment", "env.num_threads"),
        (backend in ("gymnasium", "own"), "Gymnasium", "env.vectorization env.max_restarts"),
        (backend not in ("own", "vector"), "an env.id, such as gymnasium:MODULE:FUNCTION",
         "env.options."),
        (backend == "procgen", "a Procgen game", "env.distribution env.num_levels"),
        (backend == "procgen" and config.env.num_levels, "a Procgen game with env.num_levels",
         "evaluation.levels"),
        (any(map(is_image, parts)), "images of bytes", "compute.micro_batch"),
        (len(numbers) < len(parts), "images", "model.image_layout"),
        (is_continuous, "continuous actions", "action."),
        (has_dense, "dense layers on numbers", "model.activation model.value_activation"),
        (isinstance(envs, HeuristicMask), "mask_actions", "env.heuristic_mask_steps"),
    ]


def _list_option_requirements(config: Config) -> list[Requirement]:
    """List the requirements of options on other options; later conditions take precedence."""
    ppo, model, aux = config.ppo, config.model, config.aux
    obs_norm, value_norm = config.obs_norm.statistics, config.value_norm.statistics
    batch_decay = ppo.advantage_norm == "batch" and ppo.advantage_decay
    has_proximal = ppo.clip or ppo.kl_penalty or ppo.schedule == "adaptive_kl"
    return [
        (config.action.std not in ("fixed", "range"), "a trained action.std",
         "action.min_std action.max_std"),
        (model.encoder == "impala", "model.encoder impala",
         "model.channels model.blocks model.pooling"),
        (ppo.max_grad_norm, "ppo.max_grad_norm", "ppo.grad_norm_of"),
        (model.value_path == "separate", "model.value_path separate",
         "model.value_activation ppo.value_learning_rate ppo.grad_norm_of"),
        (model.memory != "none", "model.memory", "model.memory_size"),
        (ppo.estimator == "gae", "ppo.estimator gae", "ppo.gae_lambda ppo.value_target"),
        (ppo.estimator == "n_step", "ppo.estimator n_step", "ppo.n_step"),
        (ppo.value_epochs, "ppo.value_epochs", "ppo.value_coef ppo.value_clip ppo.epoch_order"),
        (ppo.kl_penalty, "ppo.kl_penalty", "ppo.kl_estimate ppo.kl_penalty_target"),
        (ppo.policy_epochs > 1, "ppo.policy_epochs above 1", "ppo.target_kl"),
        (ppo.schedule == "adaptive_kl", "ppo.schedule adaptive_kl", "ppo.schedule_kl"),
        (ppo.entropy_coef, "ppo.entropy_coef", "ppo.entropy_schedule"),
        (ppo.clip, "ppo.clip", "ppo.clip_schedule"),
        (ppo.uses_epoch_kl, "ppo.target_kl or ppo.kl_penalty_target", "ppo.epoch_kl"),
        (has_proximal, "ppo.clip, ppo.kl_penalty or adaptive_kl", "ppo.proximal_decay"),
        (ppo.advantage_norm == "batch", "ppo.advantage_norm batch", "ppo.advantage_decay"),
        (ppo.advantage_norm != "none" and not batch_decay,
         "ppo.advantage_norm without ppo.advantage_decay", "ppo.advantage_std"),
        (ppo.collect_by == "episodes", "ppo.collect_by episodes", "ppo.max_episodes"),
        (ppo.bootstrap_truncation, "ppo.bootstrap_truncation", "ppo.truncation_value"),
        (ppo.baseline, "ppo.baseline", "ppo.value_ ppo.epoch_order ppo.recompute_advantages "
         "ppo.bootstrap_truncation ppo.truncation_value value_norm."),
        (aux.optimizer == "own", "aux.optimizer own", "aux.learning_rate"),
        (aux.iterations_per_epoch, "aux.iterations_per_epoch", "aux.iterations_from"),
        (config.has_auxiliary_phase, "aux.epochs", "aux. compute.aux_precision"),
        (config.reward_norm.per != "none", "reward_norm.per", "reward_norm."),
        (obs_norm == "ema", "obs_norm.statistics ema", "obs_norm.decay"),
        (obs_norm != "none", "obs_norm.statistics", "obs_norm."),
        (value_norm == "ema", "value_norm.statistics ema", "value_norm.decay"),
        (value_norm != "none", "value_norm.statistics", "value_norm."),
        (config.evaluation.every_iterations, "evaluation.every_iterations", "evaluation."),
    ]
# fmt: on
