"""Games of pgx for one player. Kind: effects."""

import inspect
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.jax import JaxSimulator, import_without_jax_preallocation
from phasicrl.envs.options import convert_options

pgx = import_without_jax_preallocation("pgx")


def list_names() -> list[str]:
    """Return the ids of pgx's games; `make_simulator` refuses those for several players."""
    return list(pgx.available_envs())


def make_simulator(name: str, options: dict[str, Any], local: EnvSlice) -> JaxSimulator:
    """Make games of pgx.

    Args:
        name: id in pgx.
        options: arguments of the game's class, such as `sticky_action_prob`.
        local: only `num_envs` counts.

    Raises:
        ValueError: the game has several players, an option does not exist, or its value has a wrong
            type.
    """
    env = pgx.make(name)
    if env.num_players != 1:
        raise ValueError(f"env.id is pgx:{name}, for {env.num_players} players; expected one")
    known = {x.name: x.default for x in inspect.signature(type(env)).parameters.values()}
    env = type(env)(**convert_options(f"pgx:{name}", options, known))

    def reset_one(key: Any) -> Any:
        state = env.init(key)
        return state, state.observation, state.legal_action_mask

    def step_one(key: Any, state: Any, action: Any) -> Any:
        state = env.step(state, action, key)
        ends = state.terminated, state.truncated
        return state, state.observation, state.legal_action_mask, state.rewards[0], *ends

    # Zeros and ones, with channels last. As uint8 they would be images, divided by 255.
    spaces = Box(0, 1, env.observation_shape, np.float32), Discrete(env.num_actions)
    return JaxSimulator(reset_one, step_one, spaces, local.num_envs)
