"""JSON of dataclasses of options, and atomic writing of files."""

import dataclasses
import difflib
import functools
import json
import os
import types
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

SCHEMA = 2
"""Schema number of `config.json` and of checkpoints, in their field `schema`."""


class ConfigError(ValueError):
    """Invalid configuration.

    Attributes:
        problems: descriptions of all problems.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments that pickle passes to the constructor."""
        return type(self), (self.problems,)


def to_dict(options: Any) -> dict[str, Any]:
    """Convert a dataclass of options to nested dicts for JSON, with the schema number."""
    return {"schema": SCHEMA} | dataclasses.asdict(options)


def from_json(options_type: type[T], text: str) -> T:
    """Parse JSON of the result of `to_dict` into an instance of the dataclass `options_type`.

    Raises:
        ConfigError: fields are unknown (the message suggests names), or values have wrong types.
        ValueError: the text is not JSON, or has another schema number.
    """
    tree = _parse_json_object(text, "this")
    check_and_pop_schema(tree)
    return _from_tree(options_type, tree, "")


def check_and_pop_schema(tree: dict[str, Any]) -> None:
    """Check and remove the schema number in the content of a file.

    Raises:
        ValueError: the schema number is another one, or missing.
    """
    if (schema := tree.pop("schema", "missing")) != SCHEMA:
        rule = f"{SCHEMA}. Use the version of phasicrl that wrote the file, see card.json"
        raise ValueError(f"schema is {schema}; expected {rule}")


def read_text(path: Path) -> str:
    """Read a text file from an untrusted source.

    Raises:
        ValueError: the file is not a regular one, or not UTF-8 text.
        OSError: the file cannot be read.
    """
    if not path.is_file() and path.exists():
        raise ValueError(f"{path} is a folder, pipe or device; expected a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}); expected UTF-8") from None


def read_instance(options_type: type[T], path: Path) -> T:
    """Read the file that `write_json` made from an instance of the dataclass `options_type`.

    Raises:
        ValueError: the file has other content; the message names the file.
        OSError: the file cannot be read.
    """
    try:
        return from_json(options_type, read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of an untrusted source.

    Raises:
        ValueError: the file is not a regular one, or holds no JSON object.
        OSError: the file cannot be read.
    """
    return _parse_json_object(read_text(path), str(path))


def _parse_json_object(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object; `name` is the file's name in errors."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged ({error}); expected JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is damaged; expected a JSON object")
    return cast(dict[str, Any], value)


def write_json(path: Path, content: Any) -> None:
    """Replace a file atomically by a JSON object, with text for paths, null for NaN and infinity.

    Args:
        path: file, which need not exist yet.
        content: mapping, or a dataclass, which is written with the schema number.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    tree = to_dict(content) if dataclasses.is_dataclass(content) else content
    plain = json.loads(json.dumps(tree, default=str), parse_constant=lambda _: None)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def check_output_file(path: Path) -> None:
    """Make the folder of a file that is written later.

    Raises:
        IsADirectoryError: there is a folder in place of the file.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a file")
    path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path to write to; atomically replace `path` by it when the block ends.

    After an exception in the block, `path` is unchanged.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    # Other processes may write the same file at the same time.
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # Of a full disk the name is missing.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or the list of names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def escape_control_chars(text: str) -> str:
    """Escape the control characters in a text for output on a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


_WORDS = """
ppo.policy_epochs+ppo.value_epochs=n_epochs,num_epochs,epochs,update_epochs env.num_envs=n_envs
ppo.clip=clip_range,clip_coef,clip_param ppo.advantage_norm=norm_adv,normalize_advantage
total_env_steps=num_timesteps,n_timesteps,timesteps,max_iterations evaluation.film=capture_video
evaluation.every_iterations=eval_freq,eval_every ppo.num_minibatches=batch_size,minibatch_size
ppo.value_clip=clip_range_vf,clip_vloss obs_norm.statistics=normalize_obs model.memory=lstm,use_rnn
checkpoint.every_iterations=save_freq aux.num_minibatches=aux.batch_size compute.device=cuda,no_cuda
ppo.schedule=anneal_lr,lr_schedule log.wandb=track,wandb_project_name env.options=max_episode_steps
model.hidden_sizes=net_arch ppo.schedule_kl=desired_kl aux.learning_rate=aux.lr ppo.learning_rate=lr
env.id=env,env_name,env.name ppo.value_coef=vf_coef model.encoder=policy aux.epochs=aux.n_epochs
ppo.num_steps=n_steps log.console=verbose output_dir=log_dir ppo.gamma=discount classic_ppo=ppo
"""
SYNONYMS = {name: to for to, by in (x.split("=") for x in _WORDS.split()) for name in by.split(",")}
"""Paths of options, and a preset, by their names in other trainers."""


def suggest_name(given: str, known: Iterable[str], labels: Mapping[str, str] | None = None) -> str:
    """Return a hint for a wrong name: ` (did you mean 'bigfish'?)`; empty without one.

    Suggests the option that other trainers call by this name, else names with the same end, else
    those with the same beginning, else the nearest one. `labels` maps names to their spelling.
    """
    names = {name.lower().lstrip("-").replace("-", "_"): name for name in known}
    word = given.lower().lstrip("-").replace("-", "_")
    end = word.rpartition(".")[2]
    paths = SYNONYMS.get(word, SYNONYMS.get(end, "")).split("+")
    in_group = [word.removesuffix(end) + path.rpartition(".")[2] for path in paths]
    matches = [name for name in in_group if name in names] or [x for x in paths if x in names]
    matches = matches or [name for name in names if f".{name}".endswith(f".{end}")][:1]
    matches = matches or sorted((name for name in names if name.startswith(word)), key=len)[:2]
    matches = matches or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    texts = [repr(labels[names[x]] if labels else names[x]) for x in matches]
    return f" (did you mean {' or '.join(texts)}?)" if matches else ""


@functools.cache
def get_types(options_type: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    hints = get_type_hints(options_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(options_type)}


def _from_tree(options_type: type[T], tree: Any, path: str) -> T:
    """Build an instance of the dataclass `options_type` from nested dicts."""
    if not isinstance(tree, dict):
        raise ValueError(f"{path.rstrip('.')} is {tree!r}; expected an object")
    hints, values, problems = get_types(options_type), dict[str, Any](), list[str]()
    for name, value in cast(dict[str, Any], tree).items():
        try:
            if name not in hints:
                hint = suggest_name(f"{path}{name}", [f"{path}{known}" for known in hints])
                raise ValueError(f"unknown field {path}{name}{hint}")
            if dataclasses.is_dataclass(hint := hints[name]):
                values[name] = _from_tree(cast(type[Any], hint), value, f"{path}{name}.")
            else:
                values[name] = convert(hint, value, f"{path}{name}")
        except ValueError as error:
            problems += error.problems if isinstance(error, ConfigError) else [str(error)]
    if problems:
        raise ConfigError(problems)
    return options_type(**values)


def convert(hint: Any, value: Any, path: str) -> Any:
    """Convert a value, from JSON or Python, to the type `hint` of the option at `path`.

    Raises:
        ValueError: the value has another type.
    """
    origin, members = get_origin(hint), get_args(hint)
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or PyTorch
    if origin in (Union, types.UnionType):
        if value is None and type(None) in members:
            return None
        # Use a literal that has the value, else the first type.
        literals = [each for each in members if value in get_args(each)]
        return convert((literals or members)[0], value, path)
    if origin is Literal:
        if value not in members:
            raise ValueError(f"{path} is {value!r}; expected {', '.join(map(str, members))}")
        return value
    if origin is Mapping and isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value).items()
        return {key: x.tolist() if hasattr(x, "tolist") else x for key, x in entries}
    if origin is tuple and isinstance(value, list | tuple):
        entries = cast("list[Any] | tuple[Any, ...]", value)
        if members[-1] is not ... and len(entries) != len(members):
            raise ValueError(f"{path} is {value!r}; expected a list of {len(members)}")
        return tuple(convert(members[0], entry, path) for entry in entries)
    is_whole = type(value) in (int, float) and value % 1 == 0 and abs(value) < 2**1023
    if hint in (int, float) and is_whole:
        return hint(value)
    if origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    kind = "an object" if origin is Mapping else "a list" if origin is tuple else hint.__name__
    remedy = ". To change it during a run, use ppo.schedule, or schedule=… in phasicrl.train"
    remedy *= path.endswith(("learning_rate", "ppo.clip", "ppo.entropy_coef"))
    raise ValueError(f"{path} is {value!r}; expected {kind}{remedy}")
