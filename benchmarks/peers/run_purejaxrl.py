"""Train with PureJaxRL's ppo.py as it is.

usage: run_purejaxrl.py FOLDER NUM_ENVS NUM_STEPS EPOCHS MINIBATCHES STEPS SEED

The whole training is one compiled program, so that there are two marks: after compiling, and at the
end. What it had reached when is read from its metrics afterwards, on the assumption that every
update takes the same time.
"""

import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

folder = Path(sys.argv[1])
num_envs, num_steps, epochs, minibatches, total, seed = map(int, sys.argv[2:])
sys.path.insert(0, str(folder / "purejaxrl"))
# What wrappers.py imports and ppo.py does not use.
wrappers = ("brax.envs.wrappers", "brax.envs.wrappers.training")
sys.modules |= {name: MagicMock() for name in ("brax", "brax.envs", *wrappers, "navix")}
import jax  # noqa: E402
import numpy as np  # noqa: E402
from ppo import make_train  # noqa: E402

config = {
    "LR": 2.5e-4, "NUM_ENVS": num_envs, "NUM_STEPS": num_steps, "TOTAL_TIMESTEPS": total,
    "UPDATE_EPOCHS": epochs, "NUM_MINIBATCHES": minibatches,
    "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True, "DEBUG": False,
}  # fmt: skip
key = jax.random.PRNGKey(seed)
program = jax.jit(make_train(config)).lower(key).compile()
start = time.time()
print(f"@ 0 {start} nan", flush=True)
metrics = jax.block_until_ready(program(key))["metrics"]
end = time.time()
ended, returns = (
    np.asarray(metrics[name]) for name in ("returned_episode", "returned_episode_returns")
)
finished: list[float] = []
updates = len(ended)
for update in range(updates):
    finished = [*finished, *returns[update][ended[update]].tolist()][-100:]
    mean = np.mean(finished) if finished else float("nan")
    print(
        f"@ {(update + 1) * num_envs * num_steps} "
        f"{start + (end - start) * (update + 1) / updates} {mean}",
        flush=True,
    )
