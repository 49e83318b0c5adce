"""Environments of gymnax. Kind: effects."""

from typing import Any

from gymnasium.spaces import Box

from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.jax import JaxSimulator, import_without_jax_preallocation
from phasicrl.envs.options import convert_options

gymnax = import_without_jax_preallocation("gymnax")


def list_names() -> list[str]:
    """Return the ids of gymnax's environments."""
    return list(gymnax.registered_envs)


def make_simulator(name: str, options: dict[str, Any], local: EnvSlice) -> JaxSimulator:
    """Make environments of gymnax.

    Args:
        name: id in gymnax.
        options: fields of the environment's parameters, such as `max_steps_in_episode`.
        local: number of environments.

    Raises:
        ValueError: an option does not exist, or its value has a wrong type.
    """
    env, params = gymnax.make(name)
    params = params.replace(**convert_options(f"gymnax:{name}", options, vars(params)))

    def reset_one(key: Any) -> Any:
        obs, state = env.reset_env(key, params)
        return state, obs, None

    def step_one(key: Any, state: Any, action: Any) -> Any:
        # `step` would reset, and `step_env` does not know the limit of `is_truncated`.
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return state, obs, None, reward, terminated, env.is_truncated(state, params)

    convert = gymnax.environments.spaces.gymnax_space_to_gym_space
    space, actions = convert(env.observation_space(params)), convert(env.action_space(params))
    if isinstance(space, Box):  # of Catch and FourRooms in another dtype than the observations
        space = Box(space.low, space.high, space.shape)
    return JaxSimulator(reset_one, step_one, (space, actions), local.num_envs)
