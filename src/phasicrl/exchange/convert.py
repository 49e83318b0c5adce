"""Settings of CleanRL and RL Baselines3 Zoo as configurations of ours. Kind: effects (files).

Everything that was given is accounted for: what it became, or why it became nothing.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym

from phasicrl.config import Config, EnvConfig, ObsNormConfig, Options, RewardNormConfig, shown
from phasicrl.config_io import nearest_name, read_text
from phasicrl.envs.make import make_envs
from phasicrl.host.machine import optional_module
from phasicrl.presets import get_preset
from phasicrl.spaces import leaves

Changes = dict[str, Any]
"""Values by the paths of fields."""


@dataclass
class Converted:
    """A configuration, and what became of each setting.

    Attributes:
        config: that does the same, as far as it can be said here.
        taken: settings that were taken over, and the fields that they became.
        left: settings that have no counterpart, or one of another meaning, and why.
    """

    config: Config
    taken: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


# --- CleanRL

_SCRIPTS: dict[str, tuple[str, Changes]] = {
    "ppo": ("compat-cleanrl-ppo", {}),
    "ppo_continuous_action": ("compat-cleanrl-ppo-continuous", {}),
    "ppo_atari": ("compat-cleanrl-ppo-atari", {}),
    "ppo_atari_envpool": ("compat-cleanrl-ppo-atari", {}),
    "ppo_atari_multigpu": ("compat-cleanrl-ppo-atari", {}),
    "ppo_atari_lstm": (
        "compat-cleanrl-ppo-atari",
        {
            "model.memory": "lstm", "model.memory_size": 128, "ppo.minibatch_by": "segments",
            "env.options": Options({"episodic_life": True, "stack_num": 1}),
        },
    ),
    "ppo_procgen": ("compat-cleanrl-ppo-procgen", {}),
    "ppg_procgen": ("compat-cleanrl-ppg", {}),
}  # fmt: skip
"""CleanRL's scripts: the preset that does the same, and what else is different."""

_CLEANRL_FIELDS = {
    "seed": "seed", "total_timesteps": "total_env_steps",
    "num_steps": "ppo.num_steps", "gamma": "ppo.gamma",
    "gae_lambda": "ppo.gae_lambda", "num_minibatches": "ppo.num_minibatches",
    "ent_coef": "ppo.entropy_coef", "vf_coef": "ppo.value_coef",
    "target_kl": "ppo.target_kl", "learning_rate": "ppo.learning_rate",
    "n_iteration": "aux.every", "e_auxiliary": "aux.epochs", "beta_clone": "aux.beta_clone",
    "track": "log.wandb", "wandb_project_name": "log.wandb_project",
    "wandb_entity": "log.wandb_entity", "torch_deterministic": "compute.deterministic",
}  # fmt: skip
"""Flags that mean the same as a field; CleanRL's deterministic kernels are those of cuDNN alone."""

_NUMBERS = frozenset(
    """
    seed total_timesteps num_envs num_steps gamma gae_lambda num_minibatches e_policy ent_coef
    vf_coef target_kl learning_rate n_iteration e_auxiliary beta_clone update_epochs clip_coef
    max_grad_norm num_aux_rollouts n_aux_grad_accum
    """.split()  # noqa: SIM905
)
"""Flags whose value is a number."""

_SWITCHES = frozenset(
    "torch_deterministic cuda track anneal_lr norm_adv clip_vloss gae adv_norm_fullbatch".split()  # noqa: SIM905
)
"""Flags that are on or off."""

_SWITCHED = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("0", "false", "f", "no", "n", "off"), False
)
"""What CleanRL reads as on and off: the words of distutils' `strtobool`."""

_LISTS = frozenset({"device_ids"})
"""Flags that take several words; none of them is read."""

_CLEANRL_LEFT = {
    "capture_video": "it films episodes of the training; `phasicrl video RUN` films others",
    "save_model": "weights are always saved",
    "upload_model": "`phasicrl release` and `phasicrl hub push` do",
    "hf_entity": "`phasicrl hub push DIR OWNER/NAME` has it",
    "v_value": "CleanRL accepts no other value than 1, which is the preset's",
    "device_ids": "`torchrun` chooses: docs/distributed.md",
    "backend": "`torchrun` chooses: docs/distributed.md",
    "local_num_envs": "env.num_envs is the number over all processes",
} | dict.fromkeys(
    ("batch_size", "minibatch_size", "num_iterations", "num_phases", "aux_batch_rollouts",
     "local_batch_size", "local_minibatch_size", "world_size"),
    "it follows from the other numbers",
)  # fmt: skip


def convert_cleanrl(command: Sequence[str]) -> Converted:
    """The configuration that does what a command of CleanRL does.

    Args:
        command: its words: the script, `ppo_atari.py` say, and flags; what comes before the script
            is passed over.

    Raises:
        ValueError: not a script of PPO or PPG, or flags that cannot be read.
    """
    scripts = [index for index, word in enumerate(command) if word.endswith(".py")]
    if not scripts:
        known = ", ".join(f"{name}.py" for name in _SCRIPTS)
        raise ValueError(f"name the script first, as in `ppo_atari.py --num-envs 8`: {known}")
    script = Path(command[scripts[0]]).stem
    if script not in _SCRIPTS:
        near = nearest_name(script, _SCRIPTS)
        raise ValueError(f"no preset for {script}.py{near}; there are {', '.join(_SCRIPTS)}")
    preset, changes = _SCRIPTS[script]
    found = Converted(get_preset(preset))
    found.taken[f"{script}.py"] = f"the preset {preset}" + _said(changes, before=", ")
    given, taken = _flags(command[scripts[0] + 1 :]), {}
    for name, value in given.items():
        meant = _cleanrl_flag(name, value, script, found.config, given)
        if meant is None:
            found.left[_flag(name)] = _CLEANRL_LEFT.get(name) or _unknown(name)
        else:
            taken[f"{_flag(name)} {shown(value)}"] = meant
            changes = changes | meant
    found.config = found.config.changed(changes, reset_idle=True)
    _tell(found, taken)
    return found


def _tell(found: Converted, taken: Mapping[str, Changes]) -> None:
    """Say what became of each setting; one that the others make useless is not in the result."""
    for setting, meant in taken.items():
        if meant and not any(_at(found.config, path) == value for path, value in meant.items()):
            found.left[setting] = "it has no effect beside the other settings"
        else:
            found.taken[setting] = _said(meant)


def _at(config: Config, path: str) -> Any:
    """The value of a field, or of a group; None in a group that is off."""
    group, _, field = path.rpartition(".")
    return getattr(getattr(config, group) if group else config, field, None)


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Flags and values, by the names of CleanRL's arguments."""
    given: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            waiting = None if equals else name
            is_off = name.startswith("no_")
            given[name.removeprefix("no_")] = _value(name, value) if equals else not is_off
        elif waiting is None:
            raise ValueError(f"{word!r} belongs to no flag")
        else:
            given[waiting] = _value(waiting, word)
            waiting = waiting if waiting in _LISTS else None
    for name in _NUMBERS & given.keys():
        if isinstance(given[name], bool | str):
            raise ValueError(f"{_flag(name)} needs a number; given was {given[name]}")
    for name in _SWITCHES & given.keys():
        if (word := str(given[name]).lower()) not in _SWITCHED:
            raise ValueError(f"{_flag(name)} is on or off, True or False; given was {given[name]}")
        given[name] = _SWITCHED[word]
    return given


def _value(name: str, word: str) -> Any:
    """What a word means: a number, yes or no, nothing, or itself."""
    if name in ("exp_name", "wandb_project_name", "wandb_entity", "env_id"):
        return word
    names = {"true": True, "false": False, "none": None}
    if word.lower() in names:
        return names[word.lower()]
    try:
        number = float(word)
    except ValueError:
        return word
    return int(number) if number.is_integer() and "." not in word else number


_ONLY_PPG = ("n_iteration", "e_auxiliary", "beta_clone", "num_aux_rollouts", "n_aux_grad_accum")


def _cleanrl_flag(
    name: str, value: Any, script: str, base: Config, given: dict[str, Any]
) -> Changes | None:
    """The fields that a flag sets; None if there are none."""
    has_aux = base.aux is not None
    clip = given.get("clip_coef", base.ppo.clip)
    if name in _ONLY_PPG and not has_aux:
        return None
    of_own: dict[str, Callable[[], Changes]] = {
        "env_id": lambda: {"env.id": _cleanrl_env(str(value), script)},
        "exp_name": lambda: {"name": str(value).replace("/", "-")},
        "cuda": lambda: {"compute.device": "auto" if value else "cpu"},
        "anneal_lr": lambda: {"ppo.schedule": "linear" if value else "constant"},
        "num_envs": lambda: {"env.num_envs": value} | (
            {"aux.num_minibatches": _aux_minibatches(base, given)} if has_aux else {}
        ),
        "update_epochs": lambda: {"ppo.policy_epochs": value, "ppo.value_epochs": value},
        "e_policy": lambda: {"ppo.policy_epochs": value, "ppo.value_epochs": value},  # joint there
        "norm_adv": lambda: {"ppo.advantage_norm": "minibatch" if value else "none"},
        "adv_norm_fullbatch": lambda: {"ppo.advantage_norm": "batch" if value else "none"},
        "gae": lambda: {} if value else {"ppo.gae_lambda": 1.0},
        "clip_coef": lambda: {"ppo.clip": value} | (
            {"ppo.value_clip": value} if given.get("clip_vloss", True) else {}
        ),
        "clip_vloss": lambda: {"ppo.value_clip": clip if value else None},
        "max_grad_norm": lambda: {"ppo.max_grad_norm": value} | (
            {"aux.max_grad_norm": value} if has_aux else {}
        ),
        "num_aux_rollouts": lambda: {"aux.num_minibatches": _aux_minibatches(base, given)},
        "n_aux_grad_accum": lambda: {"aux.num_minibatches": _aux_minibatches(base, given)},
    }  # fmt: skip
    if name in of_own:
        return of_own[name]()
    return {_CLEANRL_FIELDS[name]: value} if name in _CLEANRL_FIELDS else None


def _aux_minibatches(base: Config, given: dict[str, Any]) -> int:
    """Gradient steps for each rollout's data: CleanRL counts the segments of a step."""
    num_envs = given.get("num_envs", base.env.num_envs)
    segments = given.get("num_aux_rollouts", 4) * given.get("n_aux_grad_accum", 1)
    return max(1, num_envs // segments)


def _cleanrl_env(name: str, script: str) -> str:
    """The id of the same environment here."""
    if "procgen" in script:
        return f"procgen:{name}"
    return _atari(name) if "atari" in script else name


def _atari(name: str) -> str:
    """The game of an id of Gym's, in EnvPool: `BreakoutNoFrameskip-v4` is `envpool:Breakout-v5`."""
    game = name.rpartition("/")[2].rpartition("-")[0].removesuffix("NoFrameskip")
    return f"envpool:{game}-v5"


def _unknown(name: str) -> str:
    """What is said of a flag that sets nothing; one that only PPG has is known, but not to PPO."""
    known = {"env_id", "exp_name", *_CLEANRL_FIELDS, *_NUMBERS, *_SWITCHES, *_CLEANRL_LEFT}
    if name in known:
        return "this script of CleanRL has no such flag"
    return f"there is no such flag in CleanRL{nearest_name(_flag(name), map(_flag, known))}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _said(changes: Changes, before: str = "") -> str:
    """Fields and values in words."""
    text = ", ".join(f"{path} {shown(value)}" for path, value in changes.items())
    return before + text if text else ("" if before else "what is so anyway")


# --- RL Baselines3 Zoo

Algorithm = Literal["ppo", "ppo_lstm"]
_ZOO_FIELDS = {
    "n_timesteps": "total_env_steps", "n_envs": "env.num_envs", "n_steps": "ppo.num_steps",
    "gamma": "ppo.gamma", "gae_lambda": "ppo.gae_lambda", "ent_coef": "ppo.entropy_coef",
    "max_grad_norm": "ppo.max_grad_norm", "seed": "seed",
}  # fmt: skip
"""Keys that mean the same as a field."""

_ZOO_LEFT = {
    "use_sde": "there is no state-dependent exploration",
    "sde_sample_freq": "there is no state-dependent exploration",
    "env_wrapper": "give an environment of your own that has it (docs/environments.md)",
    "vec_env_wrapper": "give an environment of your own that has it (docs/environments.md)",
    "frame_stack": "give an environment of your own that stacks, or a memory (--model.memory lstm)",
    "callback": "there are on_iteration functions from Python",
    "device": "--compute.device chooses",
}
_ACTIVATIONS = {"ReLU": "relu", "Tanh": "tanh", "GELU": "gelu"}


def convert_sb3_zoo(file: Path, env: str, *, algorithm: Algorithm = "ppo") -> Converted:
    """The configuration that does what an entry of a file of RL Baselines3 Zoo does.

    Args:
        file: Its YAML, `ppo.yml` for example.
        env: The entry: an environment's id, or `atari` (which trains Breakout here).
        algorithm: Whose file it is; `ppo_lstm` is that of sb3-contrib's RecurrentPPO.

    Raises:
        ValueError: not such a file, no such entry, or a value that cannot be read.
        ImportError: PyYAML is missing.
    """
    entry = _zoo_entry(file, env)
    base = "compat-cleanrl-ppo-atari" if _sees_images(entry) else "compat-sb3-ppo"
    found = Converted(get_preset(base))
    ppo = get_preset("compat-sb3-ppo").ppo
    changes: Changes = {"name": f"zoo-{env}".replace("/", "-"), "ppo": ppo, "env.num_envs": 1}
    changes |= {"env.id": _zoo_env(env), "budget_rounding": "up", "env.options": Options({})}
    found.taken[env] = f"the preset {base}, env.id {changes['env.id']}"
    changes |= _of_actions(changes["env.id"], found)
    if algorithm == "ppo_lstm":
        found.left["the order of layers"] = "the memory comes behind the dense layers here"
        of_contrib = {"n_steps": 128, "batch_size": 128}  # its defaults, where SB3's PPO has others
        entry = {"enable_critic_lstm": True, "lstm_hidden_size": 256} | of_contrib | entry
    kwargs, taken = _kwargs(entry.pop("policy_kwargs", None)), {}
    for key, value in (entry | kwargs).items():
        meant = _zoo_key(key, value, entry, found)
        if meant is not None:
            taken[f"{key}: {shown(value)}"] = meant
            changes |= meant
    within = {path: changes.pop(path) for path in list(changes) if path.startswith("ppo.")}
    within |= _minibatches(entry, algorithm, found)
    changes["ppo"] = Config(ppo=ppo).changed(within, reset_idle=True).ppo
    found.config = found.config.changed(changes, reset_idle=True)
    _tell(found, taken)
    return found


def _zoo_entry(file: Path, env: str) -> dict[str, Any]:
    """An entry of a file."""
    yaml = optional_module("yaml", "files of the zoo are YAML", "convert")
    try:
        tree = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from None
    if not isinstance(tree, dict) or not all(isinstance(each, dict) for each in tree.values()):
        raise ValueError(f"{file} does not have an entry for each environment")
    if env not in tree:
        near = nearest_name(env, map(str, tree))
        raise ValueError(f"{file} has no entry {env}{near}; it has {', '.join(map(str, tree))}")
    return dict(tree[env])


def _zoo_env(env: str) -> str:
    """The id of the environment here, which may be its newer version."""
    return "envpool:Breakout-v5" if env == "atari" else env


def _of_actions(env: str, found: Converted) -> Changes:
    """Continuous actions are clipped to their range there; whether they are is asked of one."""
    try:
        envs = make_envs(EnvConfig(id=env, num_envs=1), seed=0)
    except (ValueError, ImportError, RuntimeError) as error:
        found.left[env] = f"{error}; if its actions are continuous, add --action.squash clip"
        return {}
    envs.close()
    is_continuous = any(isinstance(part, gym.spaces.Box) for _, part in leaves(envs.action_space))
    if is_continuous:
        found.taken["continuous actions"] = "action.squash clip"
    return {"action.squash": "clip"} if is_continuous else {}


def _kwargs(text: Any) -> dict[str, Any]:
    """The arguments of `dict(…)`, read and not run: names such as `nn.ReLU` stay texts."""
    if text is None or isinstance(text, dict):
        return dict(text or {})
    try:
        found = _literal(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} cannot be read as dict(…)")
    return found


def _literal(node: ast.expr) -> Any:
    """A value; `nn.ReLU` and the like by name, `dict(…)` as a dict."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args:
        raise ValueError("a call of something else than dict")
    return {str(each.arg): _literal(each.value) for each in node.keywords}


def _zoo_key(key: str, value: Any, entry: dict[str, Any], found: Converted) -> Changes | None:
    """The fields that a key sets; None if it is told elsewhere or has none."""
    of_own: dict[str, Callable[[], Changes | None]] = {
        "policy": lambda: {"model.encoder": "nature" if _sees_images(entry) else "mlp"},
        "learning_rate": lambda: _zoo_rate(value),
        "clip_range": lambda: _zoo_clip("ppo.clip", value, found),
        "clip_range_vf": lambda: _zoo_clip("ppo.value_clip", value, found),
        "n_epochs": lambda: {"ppo.policy_epochs": value, "ppo.value_epochs": value},
        # of the plain squared error there
        "vf_coef": lambda: {"ppo.value_coef": 2 * _number(key, value)},
        "normalize_advantage": lambda: {"ppo.advantage_norm": "minibatch" if value else "none"},
        "normalize": lambda: _zoo_normalize(value, entry, found),
        # there it stops at 1.5 times the number
        "target_kl": lambda: {
            "ppo.target_kl": None if value is None else 1.5 * _number(key, value)
        },
        "batch_size": lambda: None,
        "log_std_init": lambda: {"action.std_value": math.exp(value)},
        "ortho_init": lambda: {} if value else {"model.init": "torch", "model.head_init": "torch"},
        "activation_fn": lambda: {"model.activation": _ACTIVATIONS[str(value)]},
        "lstm_hidden_size": lambda: {"model.memory": "lstm", "model.memory_size": value},
        "enable_critic_lstm": lambda: _zoo_critic(bool(value), found),
    }  # fmt: skip
    if key in of_own:
        try:
            return of_own[key]()
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{key}: {value!r} is not understood") from None
    if key == "net_arch":
        return _zoo_layers(value, _sees_images(entry), found)
    if key in _ZOO_FIELDS:
        whole = key in ("n_timesteps", "n_envs", "n_steps", "seed")
        return {_ZOO_FIELDS[key]: _number(key, value, whole=whole)}
    if key == "frame_stack" and _sees_images(entry) and value == 4:
        return {}  # EnvPool stacks as many of Atari's
    if key == "env_wrapper" and "AtariWrapper" in str(value):
        options = Options({"episodic_life": "'terminal_on_life_loss': False" not in str(value)})
        return {"env.options": options, "ppo.reward_clip": 1.0}
    found.left[key] = _ZOO_LEFT.get(key, "it has no counterpart")
    return None


def _number(key: str, value: Any, *, whole: bool = False) -> float:
    """A number, which YAML may have read as a text: `1e5` has no point."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: {value!r} is not a number") from None
    return int(number) if whole else number


def _sees_images(entry: dict[str, Any]) -> bool:
    """Whether the networks are those of images, one for both; else two of 64 × 64 for numbers."""
    return "Cnn" in str(entry.get("policy"))


def _zoo_rate(value: Any) -> Changes:
    """A learning rate, `lin_` before it if it falls to zero."""
    text = str(value)
    rate, falls = float(text.removeprefix("lin_")), text.startswith("lin_")
    return {"ppo.learning_rate": rate, "ppo.schedule": "linear" if falls else "constant"}


def _zoo_clip(path: str, value: Any, found: Converted) -> Changes:
    """A clip range, which stays what it is here."""
    text = str(value)
    if text.startswith("lin_"):
        found.left[f"{path.rpartition('.')[2]} {text}"] = "it does not fall here, it stays"
    if path == "ppo.value_clip" and value is not None:
        found.left["the loss of clip_range_vf"] = (
            "there the error of the clipped value counts, here the larger one of both values'"
        )
    return {path: None if value is None else float(text.removeprefix("lin_"))}


def _zoo_normalize(value: Any, entry: dict[str, Any], found: Converted) -> Changes:
    """VecNormalize: both, or what its arguments say."""
    kwargs = {} if isinstance(value, bool) else _kwargs(value)
    changes: Changes = {}
    if "gamma" in entry and "gamma" in kwargs:  # rl_zoo3, exp_manager.py
        found.left[f"normalize gamma={kwargs.pop('gamma')}"] = (
            "the zoo puts the entry's gamma there"
        )
    if kwargs.pop("norm_obs", True) and value is not False:
        changes["obs_norm"] = ObsNormConfig(from_first_rollout=False)
        if "clip_obs" in kwargs:
            changes["obs_norm.clip"] = _number("clip_obs", kwargs.pop("clip_obs"))
    if kwargs.pop("norm_reward", True) and value is not False:
        changes["reward_norm"] = RewardNormConfig(per="step")
        for name, path in (("gamma", "reward_norm.gamma"), ("clip_reward", "reward_norm.clip")):
            if name in kwargs:
                changes[path] = _number(name, kwargs.pop(name))
    for name, given in kwargs.items():
        is_idle = name in ("clip_obs", "clip_reward", "gamma")
        why = "nothing is normalized by it" if is_idle else "it has no counterpart"
        found.left[f"normalize {name}={given}"] = why
    return changes


def _zoo_layers(value: Any, of_images: bool, found: Converted) -> Changes:
    """Widths of dense layers: of both networks, which are as wide as each other here.

    Raises:
        ValueError: a layer is no width.
    """
    if value is None:
        return {}
    arch = value[0] if isinstance(value, list) and len(value) == 1 else value
    arch = arch if isinstance(arch, dict) else {"pi": value, "vf": value}
    policy, of_value = arch.get("pi", []), arch.get("vf", [])
    for widths in (policy, of_value):
        if not isinstance(widths, list | tuple) or not all(type(width) is int for width in widths):
            raise ValueError(
                f"net_arch: {value!r} has layers that are no widths; give [64, 64] or "
                "dict(pi=[64, 64], vf=[64, 64]): the networks cannot share their first layers here"
            )
    if policy != of_value:
        found.left[f"net_arch vf={of_value}"] = f"both networks are {policy} here"
    if of_images and policy:
        found.left[f"net_arch {policy} behind images"] = "policy and values share them here"
    before = (512,) if of_images else ()  # the dense layer of SB3's NatureCNN
    return {"model.hidden_sizes": (*before, *policy)}


def _zoo_critic(has_memory: bool, found: Converted) -> Changes:
    """A value network with a memory, which it always has here."""
    if not has_memory:
        found.left["enable_critic_lstm: False"] = "the value network has a memory of its own here"
    return {}


def _minibatches(entry: dict[str, Any], algorithm: Algorithm, found: Converted) -> Changes:
    """How many minibatches a batch makes: the zoo says how large they are."""
    defaults = {"n_envs": 1, "n_steps": 2048, "batch_size": 64}
    sizes = [int(_number(key, entry.get(key, other))) for key, other in defaults.items()]
    if min(sizes) < 1:
        given = ", ".join(f"{key} {one}" for key, one in zip(defaults, sizes, strict=True))
        raise ValueError(f"{given}: each must be at least 1")
    num_envs, num_steps, size = sizes
    batch = num_envs * num_steps
    units, what = (num_envs, "segments") if algorithm == "ppo_lstm" else (batch, "transitions")
    numbers = [number for number in range(1, units + 1) if units % number == 0]
    number = min(numbers, key=lambda number: abs(math.log(batch / number / size)))
    if number * size == batch or (number == 1 and size > batch):
        found.taken[f"batch_size: {size}"] = f"ppo.num_minibatches {number}"
    else:
        made = f"ppo.num_minibatches {number}, of {batch // number} steps: {units:,} {what} are"
        found.left[f"batch_size: {size}"] = f"{made} dealt out evenly here"
    return {"ppo.num_minibatches": number, "ppo.minibatch_by": what}
