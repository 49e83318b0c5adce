"""Evaluation of a trained agent. Kind: effects (steps environments)."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from phasicrl.config import ActionSelection, Config, EvaluatedLevels, Levels, OptionValue
from phasicrl.config_io import atomic_write, check_output_file, write_json
from phasicrl.envs.protocol import VectorEnv
from phasicrl.execution.device import use_threads
from phasicrl.models.agent import Agent
from phasicrl.runs.checkpoint import load_rank_state
from phasicrl.runs.directory import RunDirectory, WeightsKind, get_user_objects
from phasicrl.spaces import describe_spaces
from phasicrl.system.machine import num_cores
from phasicrl.training import evaluation
from phasicrl.training.bootstrap import bootstrap_mean_interval
from phasicrl.training.build import EvaluationObjects, make_agent
from phasicrl.training.run import describe_objects


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """Result of an evaluation: finished episodes with one kind of actions.

    Attributes:
        policy: kind of actions: `greedy` for the most likely ones, `sampled` for random ones.
        returns: undiscounted return of each episode, in environment rewards.
        lengths: number of steps of each episode.
        levels: levels of Procgen that were played, `train` or `unseen`.
    """

    policy: ActionSelection
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    levels: Levels = "unseen"

    @property
    def mean_return(self) -> float:
        """Mean of the episodes' undiscounted returns."""
        return float(np.mean(self.returns))

    def __repr__(self) -> str:
        result = f"mean return {self.mean_return:.2f}, {len(self.returns)} episodes"
        return f"Evaluation({self.policy}, {self.levels}, {result})"

    def to_dict(self) -> dict[str, float | int | str | list[float]]:
        """Return a summary for JSON; `interval_95` is the bootstrap interval of the mean return."""
        returns = np.array(self.returns)
        return {
            "policy": self.policy,
            "levels": self.levels,
            "episodes": len(returns),
            "mean_return": self.mean_return,
            "std_return": float(returns.std()),
            "median_return": float(np.median(returns)),
            "interval_95": list(bootstrap_mean_interval(returns)),
            "mean_length": float(np.mean(self.lengths)),
        }


def generalization_gaps(results: Sequence[Evaluation]) -> dict[ActionSelection, float]:
    """Return the mean return on training levels minus that on unseen ones, by policy."""
    unseen = {each.policy: each.mean_return for each in results if each.levels == "unseen"}
    trained = [each for each in results if each.levels == "train" and each.policy in unseen]
    return {each.policy: each.mean_return - unseen[each.policy] for each in trained}


@dataclass(frozen=True, slots=True)
class SavedAgent:
    """Agent in a run directory, with the environments of its training.

    Attributes:
        run_directory: run directory.
        config: options of the run.
        env_objects: custom `make_env` and `make_vector_env`, or None.
        network_factories: custom `make_encoder` and `make_head`, or None.
    """

    run_directory: RunDirectory
    config: Config
    env_objects: Mapping[str, Any]
    network_factories: Mapping[str, Any]

    @classmethod
    def from_run(
        cls, run_dir: Path | str, levels: EvaluatedLevels = "unseen",
        **user_objects: Unpack[EvaluationObjects],
    ) -> Self:  # fmt: skip
        """Open a run directory.

        Args:
            run_dir: path of the run directory, or name of an agent that comes with phasicrl.
            levels: levels of Procgen to evaluate, see `check_levels`.
            user_objects: custom objects, see `evaluate`.

        Raises:
            ValueError: the directory is not a run directory, the levels do not exist, or a custom
                object is missing.
        """
        run_directory = RunDirectory.find(run_dir)
        objects = get_user_objects(user_objects, EvaluationObjects.__annotations__)
        config = run_directory.load_config(**objects)
        networks = {name: objects.pop(name) for name in ("make_encoder", "make_head")}
        own = run_directory.card.get("own") or {}
        for name, given in describe_objects(networks).items():
            if not str(own.get(name)).endswith(given.partition(":")[2]):
                warnings.warn(f"{name} is {given}; expected {own.get(name)}", RuntimeWarning, 3)
        evaluation.check_levels(levels, None if any(objects.values()) else config.env)
        return cls(run_directory, config, objects, networks)

    def make_envs(self, num_envs: int, levels: Levels, seed: int) -> VectorEnv:
        """Make environments for an evaluation, see `make_evaluation_envs`."""
        return evaluation.make_evaluation_envs(
            self.config, num_envs=num_envs, levels=levels, seed=seed,
            env_steps=self.run_directory.card.get("env_steps") or 0, **self.env_objects,
        )  # fmt: skip

    def load_agent(
        self, envs: VectorEnv, which: WeightsKind = "last", *, checkpoint: Path | None = None
    ) -> Agent:
        """Load the agent with its last or best weights, or with those of a checkpoint.

        Raises:
            ValueError: there are no weights yet, they do not fit the network, or the environments
                have other spaces than those of the training.
        """
        self.run_directory.check_spaces(describe_spaces(envs))
        agent = make_agent(self.config, envs, self.network_factories)
        if checkpoint is None:
            weights = self.run_directory.load_weights(which)
        else:
            weights = load_rank_state(checkpoint).state["learner"]["agent"]
        try:
            agent.load_state_dict(weights)
        except RuntimeError as error:
            given = f"{self.run_directory.path} has weights of another network"
            rule = "that of config.json. Give make_encoder or make_head if it is a custom one"
            raise ValueError(f"{given}; expected {rule} ({error})") from None
        return agent.eval()

    def run_episodes(self, agent: Agent, envs: VectorEnv, levels: Levels, **how: Any) -> Evaluation:
        """Run episodes of the agent with the run's precision, see `run_agent_episodes`."""
        precision = self.config.compute.policy_precision
        played = evaluation.run_agent_episodes(agent, envs, precision=precision, **how)
        return Evaluation(how["policy"], *played, levels)


def evaluate(
    run_dir: Path | str,
    *,
    episodes: int = 100,
    policies: Sequence[ActionSelection] = ("greedy", "sampled"),
    env_id: str | None = None,
    env_options: Mapping[str, OptionValue] | None = None,
    levels: EvaluatedLevels = "unseen",
    seed: int = 0,
    weights: WeightsKind = "last",
    steps_file: Path | str | None = None,
    json: Path | str | None = None,
    **user_objects: Unpack[EvaluationObjects],
) -> list[Evaluation]:
    """Evaluate a trained agent on new episodes.

    All environments run the same number of episodes (or one more), so that short episodes are not
    favored. Seeds depend on `seed` only, and differ from those of training. An episode of 30,000
    steps is cut, counts with its return so far, and is the last of its environment; there is a
    warning after 10,000.

    Args:
        run_dir: Run directory.
        episodes: Number of episodes for each policy.
        policies: Kinds of actions: greedy (most likely), sampled, or both.
        env_id: Environment in place of that of the training; its spaces must be the same.
        env_options: Options of the environment, in addition to those of the training.
        levels: Procgen: `unseen` (the full distribution), `train` (the training levels), or both.
        seed: Seed of environments and sampled actions.
        weights: Last weights, or best weights by the evaluations during the run.
        steps_file: CSV file for a table of every step (needs `phasicrl[lab]`).
        json: JSON file for the results.
        user_objects: Custom environments and networks, see `train`.

    Returns:
        An evaluation for each kind of levels and of actions.

    Raises:
        ValueError: the directory is not a run directory, has no weights yet, or `levels` has no
            effect for its environment (a custom one is not checked).
    """
    if not hasattr(episodes, "__index__") or episodes < 1:
        raise ValueError(f"episodes is {episodes!r}; expected an integer of at least 1")
    if not policies or any(policy not in ("greedy", "sampled") for policy in policies):
        raise ValueError(f"policies is {policies!r}; expected a list of greedy, sampled or both")
    saved = SavedAgent.from_run(run_dir, levels, **user_objects)
    env, objects = saved.config.env, {} if env_id else saved.env_objects
    if env_options and (any(objects.values()) or not isinstance(env_options, Mapping)):
        rule = "none with make_env or make_vector_env (give them to the function), else a dict"
        raise ValueError(f"env_options is {env_options!r}; expected {rule}")
    changes = {"env.id": env_id or env.id, "env.options": {**env.options, **(env_options or {})}}
    saved = replace(saved, config=saved.config.with_updates(changes), env_objects=objects)
    agent, results, threads = None, [], saved.config.compute.num_threads
    threads = threads or (1 if saved.config.model.encoder == "mlp" else num_cores())
    table_path, json_path = (Path(x).expanduser() if x else None for x in (steps_file, json))
    for path in filter(None, (table_path, json_path)):
        check_output_file(path)
    with use_threads(threads), ExitStack() as stack:
        table = None
        if table_path:
            is_plain = not table_path.exists() or table_path.is_file()  # unlike /dev/stdout
            writer = atomic_write(table_path) if is_plain else nullcontext(table_path)
            temporary = stack.enter_context(writer)
            file = stack.enter_context(temporary.open("w", newline=""))
            table = evaluation.load_lab_entry_point("StepTable")(file)
        for which, policy in product(evaluation.list_level_kinds(levels), policies):
            with closing(saved.make_envs(min(episodes, 16), which, seed)) as envs:
                agent = agent or saved.load_agent(envs, weights)
                add = None if table is None else partial(table.add, which)
                results.append(saved.run_episodes(
                    agent, envs, which, episodes=episodes, policy=policy, seed=seed, on_step=add
                ))  # fmt: skip
    if json_path:
        rows = [result.to_dict() for result in results]
        gaps = generalization_gaps(results)
        write_json(json_path, {"run": str(run_dir), "results": rows, "gap": gaps})
    return results
