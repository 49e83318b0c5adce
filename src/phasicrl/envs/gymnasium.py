"""Gymnasium: any Python environment, stepped in this process or in one process each. Kind: effects.

Facts about Gymnasium 1.4.0 that this file rests on (held by tests in `tests/envs`):

- `AutoresetMode.SAME_STEP` (since 1.1) resets in the step of the end, and hands the true last observation over in
  `info["final_obs"]`, an object array `[B]` with None where no episode ended.
- Nothing of what an environment returns is checked: NaN passes, dtypes are cast, and an environment that writes its observations
  into one buffer overwrites its own `final_obs` with the reset. `GuardedEnv` checks and copies, beside the environment.
- What `info` says of a step that ended an episode goes to `info["final_info"]`; beside it stands what the reset said. So a mask that
  is handed over in `info` is that of the first observation of the next episode, which is the one that is returned.
- An array in `info` arrives stacked, `[B, …]`, in new memory, with `info["_key"]` saying which environments gave one; where one did
  not there are zeros.
- `AsyncVectorEnv` waits for ever, and tells the death of a process as an `EOFError` without words. `_Processes` puts that right.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import inspect
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from phasicrl.config import OptionValue
from phasicrl.envs.options import checked_options
from phasicrl.envs.protocol import EnvError, ExactState, TimeStep
from phasicrl.host.machine import place, usable_cores
from phasicrl.masks import find_blocked, flatten_mask
from phasicrl.seeding import env_seeds
from phasicrl.spaces import (
    ActionLayout,
    ObservationLayout,
    as_float32,
    check_spaces,
    choices,
    map_leaves,
)

MakeEnv = Callable[[], "gym.Env[Any, Any]"]
MaskSource = Literal["observation", "method", "info"]

MASK = "action_mask"
"""The key of an environment's mask in its observation or in its `info`, and of the flat mask in what a guard returns."""

MASK_METHOD = "action_masks"
"""The method that says the mask, as sb3-contrib calls it."""

START_REMEDY = "if it speaks of bootstrapping above, put the start of your script under `if __name__ == '__main__':`"
"""For a process that ends before it is asked for anything."""
STEP_SECONDS, RESET_SECONDS, CLOSE_SECONDS = 60.0, 300.0, 5.0
"""How long processes may take; the first reset includes their start and the making of the environment."""


@dataclass(frozen=True, slots=True)
class Interface:
    """What is the same in all environments of one kind.

    Attributes:
        observation_space: the environment's without its mask, with float32 in place of other floats.
        action_space: the environment's.
        mask_source: where the environment says which actions are allowed: in the entry `action_mask` of its observation (a `Dict`),
            by its method `action_masks()`, or in the entry `action_mask` of its `info`. None if it does not.
        reads_masks: whether anybody wants to know.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_source: MaskSource | None
    reads_masks: bool = field(default=True, compare=False)


class GymnasiumEnv:
    """B Gymnasium environments of one kind; a `VectorEnv`.

    Observations are packed and actions unpacked beside each environment, by `GuardedEnv`: between them and the trainer there are plain
    arrays only, whatever the spaces are.
    """

    exact_state: ExactState = "none"

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        num_envs: int,
        seed: int,
        name: str,
        parallel: Literal["sync", "processes"] = "sync",
        action_masks: bool = True,
        step_seconds: float = STEP_SECONDS,
        reset_seconds: float = RESET_SECONDS,
    ) -> None:
        """Prepare `num_envs` environments; each is made by a call of `make_env`, at the first reset.

        One more is made at once, to learn the spaces, and reset once to see whether there is an action mask in `info`. Without
        `action_masks` their masks are left unread: every action is tried.

        Raises:
            ValueError: spaces that are not supported, or `make_env` does not make a Gymnasium environment.
            EnvError: the environment cannot be made or reset.
            ImportError: it, or Gymnasium's vector environment, needs a package that is missing.
        """
        if not hasattr(gym.vector, "AutoresetMode"):
            raise ImportError(f"Gymnasium {gym.__version__} cannot reset in the step of the end; pip install 'gymnasium>=1.1'")
        self.name, self.num_envs = name, num_envs
        interface = replace(_probe(name, make_env), reads_masks=action_masks)
        self.observation_space, self.action_space = interface.observation_space, interface.action_space
        self._actions = ActionLayout(self.action_space)
        self.has_masks = interface.mask_source is not None
        self.mask_size = sum(choices(self.action_space)) if self.has_masks and action_masks else 0
        self.action_mask: np.ndarray | None = None
        if parallel == "processes":
            _refuse_unsendable(name, make_env)
        trainer = (os.getpid(), usable_cores())
        makers = [functools.partial(_make_guard, make_env, name, index, interface, *trainer) for index in range(num_envs)]
        mode = gym.vector.AutoresetMode.SAME_STEP
        self._vector: SyncVectorEnv | _Processes = (
            _Processes(makers, name, step_seconds, reset_seconds) if parallel == "processes" else SyncVectorEnv(makers, autoreset_mode=mode)  # type: ignore[arg-type]
        )
        if self._vector.metadata.get("autoreset_mode") != mode:
            raise EnvError(f"{name}: Gymnasium {gym.__version__} did not take the autoreset mode {mode}; install a tested version")
        self._seeds: list[int | None] | None = list(env_seeds(seed, num_envs))  # None once they were given, by the first reset

    def reset(self) -> np.ndarray:
        """Start every environment anew and return the first observations `[B, …]`; seeds are given the first time only."""
        self._refuse_closed("reset")
        obs, info = self._vector.reset(seed=self._seeds)
        self._raise_fault(info)
        if isinstance(self._vector, SyncVectorEnv) and len({id(guard.unwrapped) for guard in self._vector.envs}) < self.num_envs:
            self.close()
            raise ValueError(f"{self.name}: make_env returned the same environment twice; make a new one in it at each call")
        self._seeds = None
        self.action_mask = self._mask(info)
        return obs

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`; those whose episode ended have been reset already."""
        self._refuse_closed("step")
        if self._seeds is not None:
            raise EnvError(f"{self.name}: step() before the first reset(); call reset() once")
        self._actions.check(self.name, action, self.num_envs, action_mask=self.action_mask)
        obs, reward, terminated, truncated, info = self._vector.step(action)
        self._raise_fault(info)
        self.action_mask = self._mask(info)
        done = terminated | truncated
        return TimeStep(
            obs=obs,
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated & ~terminated,
            final_obs=np.stack(info["final_obs"][done]) if done.any() else None,
        )

    def close(self) -> None:
        """End the environments and their processes; calling it twice is harmless."""
        self._vector.close()

    def _mask(self, info: dict[str, Any]) -> np.ndarray | None:
        """The masks `[B, mask_size]` of the observations that are returned."""
        if not self.mask_size:
            return None
        assert info[f"_{MASK}"].all(), f"{self.name}: guards {np.flatnonzero(~info[f'_{MASK}'])} gave no mask"
        return info[MASK]

    def _refuse_closed(self, call: str) -> None:
        if self._vector.closed:
            raise EnvError(f"{self.name}: {call}() after close(); make new environments with make_envs")

    def _raise_fault(self, info: dict[str, Any]) -> None:
        """Turn what a guard reported into an error, and close everything: an environment that failed once is in no known state."""
        if "fault" not in info:
            return
        index = int(np.argmax(info["_fault"]))
        error = EnvError(info["fault"][index])
        if info["traceback"][index]:
            error.add_note(f"The environment's own traceback:\n{info['traceback'][index]}")
        self.close()
        raise error


def made_by_id(name: str, options: Mapping[str, OptionValue] | None = None) -> MakeEnv:
    """A function that makes Gymnasium's environment `name` (also `module:Id`) with options, and still works in another process.

    Raises:
        ValueError: Gymnasium does not know it, or it does not have such options.
    """
    env_id = name.rpartition(":")[2]
    try:
        import_module_of(name)
        spec = gym.spec(env_id)
    except (gym.error.Error, ImportError) as error:
        raise ValueError(f"Gymnasium does not find {name!r}: {error}") from error
    # By its spec, since a process of its own does not know what was registered here. Our guard checks more than Gymnasium's checker.
    return functools.partial(gym.make, spec, disable_env_checker=True, **options_for(spec, options or {}))


def import_module_of(name: str) -> None:
    """Import the module of Gymnasium's `module:Id`, which registers the id; of a plain id there is none.

    Raises:
        ImportError: it cannot be imported.
    """
    module = name.rpartition(":")[0]
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"the module {module!r} cannot be imported ({error}); install it, or put its folder into PYTHONPATH"
            ) from error


def options_for(spec: EnvSpec, given: Mapping[str, OptionValue]) -> dict[str, Any]:
    """The given options as `gym.make` takes them: `max_episode_steps`, and arguments of the environment's constructor.

    Raises:
        ValueError: the constructor does not have such an argument, or its default is of another type.
    """
    if not given:
        return {}
    name = f"gymnasium:{spec.id}"
    try:
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point or "")
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ImportError(f"{name} needs a package that is not installed: {error}") from error
    parameters = inspect.signature(creator).parameters.values()
    named = [part for part in parameters if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY) and part.name != "render_mode"]
    takes = {part.name: None if part.default is part.empty else part.default for part in named}
    limit = {"max_episode_steps": spec.max_episode_steps or -1}
    return checked_options(name, given, takes | spec.kwargs | limit, takes_more=any(part.kind is part.VAR_KEYWORD for part in parameters))


class GuardedEnv(gym.Env[Any, Any]):
    """One environment with everything it returns checked, copied and packed, and nothing raised: a fault is reported in `info`.

    Its own spaces are those of the trainer: a stored observation and a flat action. `info` holds the flat mask and is otherwise empty:
    the trainer reads nothing from it, and it would travel between processes. The environment is made at the first reset, so that a
    failure of that is a fault like any other, under the same deadline.
    """

    def __init__(self, make_env: MakeEnv, name: str, index: int, interface: Interface) -> None:
        """Guard environment `index`, which must have the given interface."""
        self._make_env, self._name, self._index, self._interface = make_env, name, index, interface
        self._layout, self._actions = ObservationLayout(interface.observation_space), ActionLayout(interface.action_space)
        self._widths = choices(interface.action_space)
        self.observation_space = _any_array(self._layout.shape, self._layout.dtype)
        self.action_space = _any_array(self._actions.shape, self._actions.dtype)
        self._env: gym.Env[Any, Any] | None = None
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset, making the environment if that was not done."""
        try:
            if self._env is None:
                self._env = self._made()
            obs, info = _answer(self._env.reset(seed=seed, options=options), "(obs, info)")
            return self._stored(obs), self._mask(obs, info)
        except (Exception, SystemExit) as error:
            return self._blank_obs(), self._report("reset", error)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step, checking what comes back."""
        self._num_steps += 1
        try:
            if self._env is None:
                raise _Fault("was called before reset()")
            own_action = map_leaves(self._interface.action_space, lambda batch: batch[0], self._actions.unflatten(np.asarray(action)[None]))
            result = _answer(self._env.step(own_action), "(obs, reward, terminated, truncated, info)")
            obs, reward, terminated, truncated, info = result
            if not math.isfinite(reward):
                raise _Fault(f"returned the reward {reward}")
            if terminated not in (False, True) or truncated not in (False, True):
                raise _Fault(f"returned terminated = {terminated!r} and truncated = {truncated!r}; True or False was expected")
            # Nobody acts on the last observation of an episode, and often nothing is allowed there.
            mask = {} if terminated or truncated else self._mask(obs, info)
            return self._stored(obs), float(reward), bool(terminated), bool(truncated), mask
        except (Exception, SystemExit) as error:
            return self._blank_obs(), 0.0, False, False, self._report("step", error)

    @property
    def unwrapped(self) -> gym.Env[Any, Any]:
        """The environment itself, once it is made."""
        return self if self._env is None else self._env.unwrapped

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            with contextlib.suppress(Exception):  # must not hide the fault that led here
                self._env.close()

    def _made(self) -> gym.Env[Any, Any]:
        """Make the environment, and compare its interface with the first one's."""
        env, expected = self._make_env(), self._interface
        if expected.mask_source == "info":  # seen only by a reset
            expected = replace(expected, mask_source=None)
        made = _interface(self._name, env)
        if made != expected:
            raise _Fault(f"made an environment with other spaces, {made}, than the first one's, {expected}")
        return env

    def _stored(self, obs: Any) -> np.ndarray:
        """A copy of an observation as it is stored."""
        try:
            stored = self._layout.pack(map_leaves(self._interface.observation_space, _batch_of_one, obs), 1)
        except ValueError as error:
            raise _Fault(f"returned {error}") from None
        fault = self._layout.find_fault(stored)
        if fault is not None:
            raise _Fault(f"returned {fault[1]}")
        return stored[0]

    def _mask(self, obs: Any, info: Any) -> dict[str, Any]:
        """What is allowed in an observation, in the form of an `info`; empty without masks."""
        source = self._interface.mask_source
        if source is None or self._env is None or not self._interface.reads_masks:
            return {}
        remedy = f"give a mask of {sum(self._widths)} values, at least one of them true for each discrete component, at every step"
        if source == "method":
            given = self._env.get_wrapper_attr(MASK_METHOD)()
        else:
            holder = obs if source == "observation" else info
            if not isinstance(holder, Mapping) or MASK not in holder:
                raise _Fault(f"returned no {MASK!r} in its {source}, where it had one at first", remedy)
            given = holder[MASK]
        try:
            mask = flatten_mask(self._interface.action_space, given)
        except ValueError as error:
            raise _Fault(f"gave {error}", remedy) from None
        blocked = find_blocked(self._widths, mask[None])
        if blocked is not None:
            raise _Fault(f"gave an action mask that allows nothing in component {blocked[1]}: {mask}", remedy)
        return {MASK: mask}

    def _blank_obs(self) -> np.ndarray:
        return np.zeros(self._layout.shape, self._layout.dtype)

    def _report(self, call: str, error: BaseException) -> dict[str, Any]:
        """What `info` says about a fault."""
        where = f"{self._name}: environment {self._index}, {call}() at step {self._num_steps}"
        if isinstance(error, _Fault):
            return {"fault": f"{where}: {error}; {error.remedy}", "traceback": ""}
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}"
        text = f"{where}: {type(error).__name__}: {error} ({place}); repair the environment"
        return {"fault": text, "traceback": "".join(traceback.format_exception(error))}


class _Fault(Exception):
    """An environment returned what it must not."""

    def __init__(self, text: str, remedy: str = "gymnasium.utils.env_checker.check_env helps to find such faults") -> None:
        super().__init__(text)
        self.remedy = remedy


def _make_guard(make_env: MakeEnv, name: str, index: int, interface: Interface, parent: int, cores: set[int]) -> GuardedEnv:
    """Make the guard of one environment. Gymnasium calls this in the trainer's process `parent` too; any other is prepared, to run on `cores`."""
    if os.getpid() != parent:
        place({0}, cores)  # inherited is the place of the thread that started it, which OpenMP may have bound to a single core
        # A signal to the whole process group (Ctrl-C, SLURM) is for the trainer, which still has to save and then ends us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1)  # asked for by `_Processes` when an environment hangs
    return GuardedEnv(make_env, name, index, interface)


class _Processes(AsyncVectorEnv[Any, Any]):
    """Gymnasium's environments in processes, with deadlines and with words for the death of one."""

    def __init__(self, makers: list[Callable[[], GuardedEnv]], name: str, step_seconds: float, reset_seconds: float) -> None:
        """Start one process for each maker."""
        self._name, self._step_seconds, self._reset_seconds = name, step_seconds, reset_seconds
        # Never "fork": it copies a process whose threads (PyTorch's, EnvPool's) may hold locks at that moment.
        context = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        try:
            super().__init__(makers, context=context, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        except (EOFError, ConnectionError) as error:  # from Python 3.14 on the server that forks them tells it first, and dies with them
            raise EnvError(f"{name}: the process of environment 0 died in its start ({type(error).__name__}); {START_REMEDY}") from None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all, within the deadline."""
        with self._watched("reset()", self._reset_seconds):
            self.reset_async(seed=seed, options=options)
            return self.reset_wait(self._reset_seconds)

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all, within the deadline."""
        with self._watched("step()", self._step_seconds):
            self.step_async(actions)
            return self.step_wait(self._step_seconds)

    def close(self, **_: Any) -> None:
        """End the processes: ask, wait a little, kill."""
        if self.closed:
            return
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def _check_spaces(self) -> None:
        """Wait for the processes to start, within the deadline. Gymnasium calls this at the end of its constructor, and waits for ever.

        Until then the caller holds the semaphores that they open by name, so that this cannot be left to the first reset.
        """
        # Before multiprocessing's own clean-up, which sends the SIGTERM that the processes ignore and then waits for ever.
        self._at_exit = functools.partial(_kill, self.processes)
        atexit.register(self._at_exit)
        with self._watched("its start", self._reset_seconds):
            for pipe in self.parent_pipes:
                pipe.send(("_check_spaces", (self.observation_mode, self.single_observation_space, self.single_action_space)))
            deadline = time.monotonic() + self._reset_seconds
            for pipe in self.parent_pipes:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise multiprocessing.TimeoutError
                pipe.recv()

    @contextlib.contextmanager
    def _watched(self, call: str, seconds: float) -> Iterator[None]:
        """Put silence and death of a process into words, and end the others."""
        try:
            yield
        except multiprocessing.TimeoutError:
            index = next((i for i, pipe in enumerate(self.parent_pipes) if not pipe.poll(0)), 0)
            pid = self.processes[index].pid
            if pid is not None and hasattr(faulthandler, "register"):
                os.kill(pid, signal.SIGUSR1)  # it prints where it stands
                time.sleep(0.3)
            self._end()
            raise EnvError(
                f"{self._name}: environment {index} has not finished {call} within {seconds:g} s; it hangs, or the machine is overloaded; "
                "where it stands is printed above"
            ) from None
        except (EOFError, OSError):
            index, how = self._who_died()
            self._end()
            remedy = (
                START_REMEDY if call == "its start" else "if it printed nothing above, memory may have run out: take fewer environments"
            )
            raise EnvError(f"{self._name}: the process of environment {index} died in {call} ({how}); {remedy}") from None

    def _who_died(self) -> tuple[int, str]:
        """Index of a dead process, and how it ended."""
        multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=CLOSE_SECONDS)
        for index, process in enumerate(self.processes):
            code = process.exitcode
            if code is not None:
                return index, f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return 0, "it closed its pipe"

    def _end(self) -> None:
        """Kill what still runs and release the pipes."""
        self.closed = True
        atexit.unregister(self._at_exit)
        _kill(self.processes)
        for pipe in self.parent_pipes:
            pipe.close()
        self.error_queue.close()


def _kill(processes: list[Any]) -> None:
    """End processes that ignore requests."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(CLOSE_SECONDS)


def _probe(name: str, make_env: MakeEnv) -> Interface:
    """Make one environment to learn its interface, and refuse spaces that are not supported."""
    if not callable(make_env):
        raise ValueError(f"{name}: make_env is {_describe(make_env)}; a function that makes an environment was expected, as there are many")
    try:
        env = make_env()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ImportError(f"{name} needs a package that is not installed: {error}") from error
    except Exception as error:
        raise EnvError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(env, gym.Env):
        raise ValueError(f"{name}: make_env made {_describe(env)}; a gymnasium.Env was expected (the older `gym` is another package)")
    with contextlib.closing(env):
        interface = _interface(name, env)
        check_spaces(name, interface.observation_space, interface.action_space)
        if interface.mask_source is None and choices(interface.action_space) and _has_mask_in_info(name, env):
            interface = replace(interface, mask_source="info")
    return interface


def _interface(name: str, env: gym.Env[Any, Any]) -> Interface:
    """The interface of an environment as far as it is known without a reset."""
    space, actions = (getattr(env, kind, None) for kind in ("observation_space", "action_space"))
    if not isinstance(space, gym.Space) or not isinstance(actions, gym.Space):
        raise ValueError(
            f"{name}: observation_space is {_describe(space)} and action_space {_describe(actions)}; Gymnasium spaces were expected"
        )
    source: MaskSource | None = None
    if choices(actions):  # there is nothing to mask in numbers
        if isinstance(space, gym.spaces.Dict) and MASK in space.spaces:
            source = "observation"
            space = gym.spaces.Dict([(key, part) for key, part in space.spaces.items() if key != MASK])
        elif env.has_wrapper_attr(MASK_METHOD):
            source = "method"
    return Interface(as_float32(space), actions, source)


def _has_mask_in_info(name: str, env: gym.Env[Any, Any]) -> bool:
    """Reset an environment to look into its `info`."""
    try:
        _, info = _answer(env.reset(seed=0), "(obs, info)")
    except Exception as error:
        words = str(error) if isinstance(error, _Fault) else f"{type(error).__name__}: {error}"
        raise EnvError(f"{name}: reset() of the environment that was made to learn the spaces: {words}; repair the environment") from error
    return isinstance(info, Mapping) and MASK in info


def _refuse_unsendable(name: str, make_env: MakeEnv) -> None:
    """Refuse a function that cannot be sent to another process, before any process is started."""
    import cloudpickle  # Gymnasium sends it with this, and depends on it

    try:
        cloudpickle.dumps(make_env)
    except Exception as error:
        raise ValueError(
            f"{name}: make_env cannot be sent to another process ({error}); make everything it needs inside of it, or set env.parallel to sync"
        ) from error


def _answer(result: Any, expected: str) -> tuple[Any, ...]:
    """What a call returned, refusing anything but a tuple of as many as expected."""
    if not isinstance(result, tuple) or len(result) != expected.count(",") + 1:
        raise _Fault(f"returned {_describe(result)}; {expected} was expected")
    return result


def _batch_of_one(value: Any) -> np.ndarray:
    """A copy of one value `[…]` as `[1, …]`."""
    try:
        return np.array(value)[None]
    except ValueError as error:
        raise ValueError(f"an observation that is no array ({error})") from None


def _any_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> gym.spaces.Box:
    """A space of all arrays of a shape and dtype."""
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return gym.spaces.Box(low, high, shape, dtype.type)


def _describe(value: Any) -> str:
    """A value in a few words, for an error message."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"an object of type {type(value).__name__}"
