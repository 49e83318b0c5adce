"""The command line: parse, call the library, print. Kind: effects.

tyro reads the options of a verb from the library's function, and the knobs of a run from `Config`:
what is said of them there is the help. Libraries are imported by the verb that needs them, so that
`phasicrl --help` is quick; `tyro.extras.SubcommandApp` would need all of them at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import math
import operator
import os
import re
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from phasicrl.config import (
    ASKED_IMPORTS,
    AuxConfig,
    Config,
    Options,
    defaults,
    field_texts,
    refuse_unasked_import,
    shown,
)
from phasicrl.config_io import nearest_name, printable
from phasicrl.presets import PRESETS, Preset, differences, get_preset

if TYPE_CHECKING:
    from phasicrl.lab.analysis.compare import Comparison
    from phasicrl.lab.experiments.trials import Trial
    from phasicrl.session.run import Run

_PLAIN_WARNING = warnings.formatwarning
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes besides 0; an error that has another says so itself (docs/runs.md has all)."""


@dataclass(frozen=True)
class _Common:
    """Options of every verb."""

    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show where an error arose."""
    modules: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="import", metavar="MODULE")
    ] = ()
    """Import a module first, which may register environments."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code.

    A user's mistake is one sentence; `--debug` shows where it arose.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    common, words = tyro.cli(
        _Common, args=given, prog="phasicrl", return_unknown_args=True, add_help=False
    )
    warnings.formatwarning = _format_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may have any letters
    try:
        for module in common.modules:
            _import(module)
        return _dispatch(words)
    except BrokenPipeError:  # whoever read what is printed has gone
        from phasicrl.runs.console import silence

        silence(sys.stdout)
        return BROKEN_PIPE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends so
            return BROKEN_PIPE
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        expected = not isinstance(error, RuntimeError) or hasattr(error, "exit_code")
        if common.debug or not expected:
            traceback.print_exc()
        said = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
        print(printable(said), file=sys.stderr)
        return getattr(error, "exit_code", USER_ERROR if expected else 1)
    finally:
        warnings.formatwarning = _PLAIN_WARNING
        ASKED_IMPORTS.clear()  # it was for this command


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    line: str | None = None,
) -> str:  # fmt: skip
    """Ours as a sentence, without the line of code that says it; others as Python has them."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"note: {printable(str(message))}\n"
    return _PLAIN_WARNING(message, category, filename, lineno, line)


def _import(module: str) -> None:
    """Import a module that the user named."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"--import {module}: {error}; install it, or put its folder into PYTHONPATH"
        ) from error
    ASKED_IMPORTS.append(module)


def _dispatch(words: list[str]) -> int:
    """Call the verb that the first word names."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else USER_ERROR
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("phasicrl"))
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        near = nearest_name(words[0], VERBS)
        raise ValueError(f"unknown command {words[0]!r}{near}; `phasicrl --help` lists all")
    verb(words[1:])
    return 0


def _usage() -> str:
    """What `phasicrl --help` prints."""
    verbs = "".join(f"  {name:<12}{_first_line(verb)}\n" for name, verb in VERBS.items())
    return (
        "usage: phasicrl COMMAND ...\n\n"
        "Phasic Policy Gradient and Proximal Policy Optimization.\n\n"
        f"commands:\n{verbs}\n"
        "`phasicrl COMMAND --help` says more; `--debug` shows where an error arose; "
        "`--import MODULE` imports a module first, which may register environments."
    )


def _first_line(function: Callable[..., Any]) -> str:
    """What a function does, in one line."""
    return (function.__doc__ or "").partition("\n")[0]


# --- how tyro reads what the library has

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _read_none(
    kind: PrimitiveTypeInfo,
) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Read `none`, in any case, as None where a value can be off.

    A text or a path may have that name.
    """
    is_union = kind.type_origin in (typing.Union, types.UnionType)
    members = typing.get_args(kind.type) if is_union else ()
    others = tuple(member for member in members if member is not type(None))
    texts = [member for member in (Path, str) if member in others]
    if not texts and len(others) == len(members):
        return None  # tyro's own rules
    other = texts[0] if texts else functools.reduce(operator.or_, others)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(other, kind.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec

    def read(words: list[str]) -> Any:
        if not texts and [word.lower() for word in words] == ["none"]:
            return None
        if spec.choices is not None and words[0] not in spec.choices:
            raise ValueError(f"{words[0]!r} is none of {', '.join(spec.choices)}, none")
        return spec.instance_from_str(words)

    def words_of(value: Any) -> list[str]:
        return ["none"] if value is None else spec.str_from_instance(value)

    return PrimitiveConstructorSpec(
        nargs=spec.nargs,
        metavar=spec.metavar if texts else f"{spec.metavar}|none",
        instance_from_str=read,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=words_of,
    )


@_REGISTRY.primitive_rule
def _read_whole(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read whole numbers as people write them, `1e6` too; several stand apart from each other."""
    if kind.type is int:
        return PrimitiveConstructorSpec(
            nargs=1, metavar="INT", instance_from_str=lambda words: _whole(words[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )  # fmt: skip
    if kind.type not in (tuple[int, ...], Sequence[int]):
        return None  # tyro's own rules

    def read(words: list[str]) -> tuple[int, ...]:
        if together := [word for word in words if "," in word]:
            apart = together[0].replace(",", " ").strip()
            raise ValueError(f"{together[0]!r} is no whole number; write them apart: {apart}")
        return tuple(map(_whole, words))

    return PrimitiveConstructorSpec(
        nargs="*", metavar="[INT [INT ...]]", instance_from_str=read,
        is_instance=lambda value: all(isinstance(each, int) for each in value),
        str_from_instance=lambda value: [str(each) for each in value],
    )  # fmt: skip


def _whole(word: str) -> int:
    """A whole number; `1e6` is one, `1.5` is none."""
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError):
        number = float(word)
        if number.is_integer() and abs(number) < 2**53:  # larger ones would be rounded
            return int(number)
    raise ValueError(f"{word!r} is no whole number; give one, such as 64 or 1e6")


def _print_json(tree: Any) -> None:
    """Print data classes, paths, and what is made of them, as one JSON value; infinity is null."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in dataclasses.fields(value)]
            return {name: plain(getattr(value, name)) for name in names}
        if isinstance(value, Mapping):
            return {str(key): plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        return value if isinstance(value, bool | int | str | None) else str(value)

    print(json.dumps(plain(tree), allow_nan=False))


@dataclass(frozen=True, kw_only=True)
class _Output:
    """How a command says what it found."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON value, and nothing else: for programs."""

    def working(self) -> contextlib.redirect_stdout[Any]:
        """While this is entered, `--json` sends what is printed to the standard error."""
        return contextlib.redirect_stdout(sys.stderr if self.json else sys.stdout)

    def answer(self, found: Any, show: Callable[[], object]) -> None:
        """Print what was found: as JSON, or as `show` does for people."""
        if self.json:
            return _print_json(found)
        show()

    def say(self, found: Any, lines: Iterable[object] | None = None) -> None:
        """The same with lines for people; those of a list unless given."""
        shown = found if lines is None else lines
        self.answer(found, lambda: print(printable("\n".join(map(str, shown)))))


_PYTHON_ONLY = (
    "make_env", "make_vector_env", "make_encoder", "mask_actions", "on_iteration", "on_trial"
)  # fmt: skip
"""Parameters of library functions that no word can give: objects and functions of the caller's."""
_USUAL = (tyro.conf.PositionalRequiredArgs,)


def arguments_for(
    verb: str,
    function: types.FunctionType,
    words: list[str],
    *,
    without: Sequence[str] = (),
    own: type[_Output] = _Output,
    markers: tuple[Any, ...] = _USUAL,
    others: bool = False,
) -> tuple[dict[str, Any], Any, list[str]]:
    """Read the arguments of a library function from the words of a verb.

    The function is not called here: an error of its own is not one of parsing.

    Args:
        verb: for the help.
        function: whose parameters are read, but for those in `_PYTHON_ONLY`.
        words: of the command line.
        without: parameters that have no option.
        own: options that only the command line has, `--json` among them.
        markers: tyro's, for the function's.
        others: whether there may be words that are none of these.

    Returns:
        The arguments by name, what was read of `own`, and the other words.
    """

    def collect(**arguments: Any) -> dict[str, Any]:
        return arguments

    def with_own(library: dict[str, Any], own: Any) -> Any:
        return library, own

    left_out = {*without, *_PYTHON_ONLY}
    parameters = inspect.signature(function).parameters
    kept = [
        parameter
        for name, parameter in parameters.items()
        if name not in left_out and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in kept}
    hints = typing.get_type_hints(collect, function.__globals__)
    collect.__annotations__ = hints
    typing.cast(Any, collect).__signature__ = inspect.Signature(kept)
    # tyro keeps the line breaks of a docstring, which are our source's.
    collect.__doc__ = re.sub(r"\n {8,}", " ", inspect.getdoc(function) or "")
    flat = tyro.conf.OmitArgPrefixes
    with_own.__annotations__ = {
        "library": Annotated[Any, flat, *markers, tyro.conf.arg(name="", constructor=collect)],
        "own": Annotated[own, flat, tyro.conf.arg(name="")],
    }
    found: Any = tyro.cli(
        with_own, args=words, return_unknown_args=others, prog=f"phasicrl {verb}",
        description=_first_line(function), config=(*_USUAL, tyro.conf.SuppressFixed),
        registry=_REGISTRY,
    )  # fmt: skip
    (arguments, read), rest = found if others else (found, [])
    return arguments, read, rest


# --- train and resume


@dataclass(frozen=True)
class _TrainOptions(_Output):
    """Options of `train` that are no knobs."""

    resume: Literal["never", "auto"] = "never"
    """`auto`: go on with the newest run of this experiment, seed and length, if there is one."""
    scale_batch: float | None = None
    """Learn the same from batches so many times as large: changes the knobs that belong to it."""


def _train(words: list[str]) -> None:
    """Train an agent: `phasicrl train PRESET [--seed 3 …] [--resume auto]`, or `--from RUN`."""
    options, words = tyro.cli(
        _TrainOptions, args=words, prog="phasicrl train", return_unknown_args=True, add_help=False
    )
    config = parse_config(words)
    if options.scale_batch is not None:
        with options.working():
            config = _scaled(config, options.scale_batch)
    from phasicrl.algorithm import train
    from phasicrl.lab.experiments.trials import train_or_resume

    start = train_or_resume if options.resume == "auto" else train
    _run(options, lambda: start(config))


_TRAIN_FLAGS = ["--" + each.name.replace("_", "-") for each in dataclasses.fields(_TrainOptions)]


def _help_beside_knobs() -> str:
    """The help of the options of `train` that are no knobs, without its usage line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        tyro.cli(_TrainOptions, args=["--help"], config=(tyro.conf.SuppressFixed,))
    return said.getvalue().partition("\n\n")[2].rstrip()


def _scaled(config: Config, factor: float) -> Config:
    """The configuration for batches of another size; what changes is printed."""
    from phasicrl.lab.experiments.batch_scale import scaled_batch

    scaled = scaled_batch(config, factor)
    if os.environ.get("RANK", "0") != "0":  # of several processes, one says it
        return scaled
    print(f"batches {factor:g} times as large:")
    for field, (old, new) in differences(scaled, config).items():
        print(f"  {field}: {old} → {new}")
    if config.ppo.proximal_decay is None:
        print(
            "  note: how near to which policy updates are kept still depends on the batch; "
            "--ppo.proximal-decay makes it independent (docs/distributed.md)"
        )
    return scaled


def parse_config(words: list[str], command: str = "train") -> Config:
    """The configuration that the words after `train` describe.

    They are a preset's name or `--from FILE`, then fields.

    Args:
        words: after the command.
        command: `train`, or another with the same words, for what is said of unknown ones.

    Raises:
        ValueError: no preset named, an unknown one, or values that do not go together.
    """
    base, label, words = _base(words)
    if command == "train" and {"-h", "--help"} & {*words}:
        print(_help_beside_knobs())
    given = _given_knobs(base, words, f"phasicrl {command} {label}")
    # What the base sets and these words make useless goes without a word; what was named in vain is
    # refused.
    return base.changed(given, reset_idle=True, keep=given)


def _base(words: list[str]) -> tuple[Config, str, list[str]]:
    """The configuration that the fields are added to, its name for people, and the fields' words.

    These first words are read here: the help of all others has the values of this configuration.
    """
    if not words or words[0] in ("-h", "--help"):
        print("usage: phasicrl train PRESET [FIELDS]")
        print("       phasicrl train --from RUN [FIELDS]")
        print(f"\n{_help_beside_knobs()}\n\npresets:")
        print("\n".join(_preset_lines()))
        print("\n`phasicrl train PRESET --help` lists every field with its value in that preset.")
        raise SystemExit(0 if words else USER_ERROR)
    words = _apart(words)
    if words[0] == "--from":
        if len(words) < 2:
            raise ValueError("--from needs the path of a config.json")
        from phasicrl.runs.directory import RunDirectory, read_config

        path = Path(words[1])
        base = RunDirectory(path).config if path.is_dir() else read_config(path)
        refuse_unasked_import(base)
        return base, f"--from {path}", words[2:]
    if words[0].startswith("-"):
        raise ValueError(
            f"the preset comes first: `phasicrl train PRESET {words[0]} …`; "
            "`phasicrl presets` lists them"
        )
    return get_preset(words[0]), words[0], words[1:]


def _apart(words: list[str]) -> list[str]:
    """`--from=FILE` as two words."""
    flag, equals, file = words[0].partition("=")
    return [flag, file, *words[1:]] if equals and flag == "--from" else words


_OFF = "_off"
"""Ends the names of switches such as `--aux none`, which tyro has beside the group's fields."""


def _given_knobs(base: Config, words: list[str], prog: str) -> dict[str, Any]:
    """The knobs that the words name, by path, and groups that they switch on or off."""
    # A flag that may come more than once needs a default. Every text is given: to look for comments
    # takes time.
    default, markers = {"env": {"options": ()}}, (tyro.conf.HelptextFromCommentsOff,)
    tree, unknown = tyro.cli(
        _knobs(base), args=words, prog=prog, registry=_REGISTRY, default=default, config=markers,
        return_unknown_args=True,
    )  # fmt: skip
    if unknown:
        flags = [*_flags(), *_TRAIN_FLAGS]
        near = nearest_name(unknown[0].partition("=")[0].replace("_", "-"), flags)
        raise ValueError(f"unknown: {unknown[0]!r}{near}; `{prog} --help` lists all flags")
    given: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            given |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            given[name] = value
    if options := given.pop("env.options"):
        given["env.options"] = _added_options(base.env.options, options)
    for switch in [name for name in given if name.endswith(_OFF)]:
        group, flag = switch.removesuffix(_OFF), "--" + switch.removesuffix(_OFF).replace("_", "-")
        if given.pop(switch).lower() != "none":
            raise ValueError(f"{flag} takes only `none`; its fields are set by {flag}.FIELD")
        given[group] = None
    named = {path.partition(".")[0] for path in given if "." in path} - given.keys()
    off = [name for name in named if getattr(base, name) is None]
    num_envs = given.get("env.num_envs", base.env.num_envs)
    return {name: _group_when_on(name, num_envs) for name in off} | given


def _flags() -> list[str]:
    """The flags of all knobs and groups, those with `no-` among them."""
    switches = [path for path, value in defaults().items() if isinstance(value, bool)]
    off = [re.sub(r"(\w+)$", r"no-\1", path) for path in switches]
    return ["--" + path.replace("_", "-") for path in (*defaults(), *off)]


def _knobs(base: Config) -> Any:
    """A type whose fields are those of `Config`, for tyro: only what is named is in its instances.

    Each field has its sentence and its value in `base`; groups that can be off have a switch.
    """
    texts, fields = field_texts(Config), {}
    for name, hint in typing.get_type_hints(Config).items():
        kind = next(filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))), None)
        group = getattr(base, name)
        if kind is None:
            fields[name] = _option(hint, texts[name], shown(group))
            continue
        inner_texts, inner = field_texts(typing.cast(type, kind)), {}
        for field, inner_hint in typing.get_type_hints(kind).items():
            value = shown(getattr(group or _group_when_on(name, base.env.num_envs), field))
            value += "" if group else ", once it is on"
            inner[field] = _option(inner_hint, inner_texts[field], value)
        fields[name] = Annotated[_typed_dict(kind, inner), tyro.conf.arg(help=kind.__doc__)]
        if hint is not kind:
            text = "Switch the group off; naming a field of it switches it on."
            hint = f"(default: {shown(group)})"
            off = tyro.conf.arg(name=name, metavar="none", help=text, help_behavior_hint=hint)
            fields[name + _OFF] = Annotated[str, off]
    return _typed_dict(Config, fields)


def _option(hint: Any, text: str, value: str) -> Any:
    """The type of one knob with its help."""
    metavar = None
    if typing.get_origin(hint) is Mapping:
        hint, metavar = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], "KEY=VALUE …"
    default = f"(default: {value})"
    return Annotated[hint, tyro.conf.arg(help=text, help_behavior_hint=default, metavar=metavar)]


def _typed_dict(kind: Any, fields: dict[str, Any]) -> Any:
    """A TypedDict none of whose keys must be there, described as a dataclass is."""
    made = typing.cast(Any, typing.TypedDict)(kind.__name__, fields, total=False)
    made.__doc__ = kind.__doc__
    return made


def _group_when_on(name: str, num_envs: int) -> Any:
    """What a group that is off begins with when one of its fields is named."""
    if name == "aux":
        # The usual number of minibatches, or as many as these environments can be dealt out to.
        return AuxConfig(num_minibatches=math.gcd(AuxConfig().num_minibatches, num_envs))
    members = typing.get_args(typing.get_type_hints(Config)[name])
    return next(member for member in members if member is not type(None))()


def _added_options(
    before: Mapping[str, Any], words_of_flags: tuple[tuple[str, ...], ...]
) -> Options:
    """Options of the environment with what `--env.options` says, as often as it came.

    `none` drops those before.
    """
    options = dict(before)
    for words in words_of_flags:
        if not words:
            raise ValueError("--env.options takes KEY=VALUE, or `none`; nothing was given")
        for word in words:
            key, equals, value = word.partition("=")
            if word.lower() == "none":
                options.clear()
            elif not key or not equals:
                raise ValueError(f"--env.options takes KEY=VALUE, or `none`; given was {word!r}")
            else:
                options[key] = value
    return Options(options)


def _resume(words: list[str]) -> None:
    """Continue a run from its last checkpoint."""
    from phasicrl.algorithm import resume

    arguments, own, _ = arguments_for("resume", resume, words)
    _run(own, lambda: resume(**arguments))


def _use(
    verb: str, what: str, uses: dict[str, Callable[[list[str]], None]], words: list[str]
) -> None:
    """Call the use of a verb that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: phasicrl {verb} COMMAND {what}\n\ncommands:")
        for name, use in uses.items():
            print(f"  {name:<8}{_first_line(use)}")
        raise SystemExit(0 if words else USER_ERROR)
    if words[0] not in uses:
        near = nearest_name(words[0], uses)
        raise ValueError(f"unknown: {verb} {words[0]!r}{near}; accepted: {', '.join(uses)}")
    uses[words[0]](words[1:])


def _run(own: _Output, start: Callable[[], Run]) -> None:
    """Train, and say what came of it; of several processes, one says it.

    A run that is cut short is an error, before which programs are told what it came to.
    """
    try:
        with own.working():
            run = start()
    except BaseException as error:
        if own.json and (directory := getattr(error, "run_directory", None)):
            _print_json(_result(directory, error))
        raise
    if run.world.is_first:
        own.answer(_result(run.directory), lambda: _print_result(run))


def _result(directory: Path, error: BaseException | None = None) -> dict[str, Any]:
    """What a run came to, by its last whole iteration, for programs."""
    from phasicrl.optimize import DivergedError
    from phasicrl.runs.directory import RunDirectory

    files, name = RunDirectory(directory), "charts/episodic_return_100"
    rows = files.metrics(name) if files.last_rows(1) else []
    outcome = "finished" if error is None else "failed"
    if isinstance(error, DivergedError):
        outcome = "diverged"
    elif isinstance(error, KeyboardInterrupt | SystemExit):
        outcome = "stopped"
    return {
        "run": directory, "outcome": outcome, "env_steps": rows[-1]["env_steps"] if rows else 0,
        "return_100": next((row[name] for row in reversed(rows) if name in row), None),
    }  # fmt: skip


def _print_result(run: Run) -> None:
    """Where the run directory is, and one table of results."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"{run.config.name} on {run.envs.name}, seed {run.config.seed}"
    table = Table(title=Text(printable(title)), show_header=False)
    for name, value in run.summary().items():
        table.add_row(name, value)
    Console().print(table)
    print(printable(f"run directory: {run.directory}"))


def _suite(words: list[str]) -> None:
    """Train an experiment of the papers, and draw it: `phasicrl suite fig3 [--jobs 2 …]`."""
    from phasicrl.lab.experiments.run_suite import run_suite
    from phasicrl.lab.experiments.suites import SUITES

    if words in ([], ["--json"]):
        known = {name: {"about": each.about, "small": each.small} for name, each in SUITES.items()}
        small = {name: ", ".join(suite.small) for name, suite in SUITES.items()}
        lines = (f"{name:<16}{SUITES[name].about}; small: {tasks}" for name, tasks in small.items())
        return _Output(json=bool(words)).say(known, lines)
    arguments, own, _ = arguments_for("suite", run_suite, words)

    def on_trial(trial: Trial) -> None:
        task, arm, budget = trial.label
        text = f"{task}, {arm}, {int(budget):,} steps, seed {trial.config.seed}: done"
        print(printable(text), flush=True)

    with own.working():
        found = run_suite(**arguments, on_trial=on_trial)
    own.answer(found, lambda: _print_comparison(found.comparison, found.files))


# --- sweeps


def _sweep(words: list[str]) -> None:
    """Train many configurations, on one machine or several: `phasicrl sweep make|run|… DIR`."""
    uses = {
        "make": _make_sweep, "search": _make_search, "run": _run_sweep, "status": _sweep_status
    }  # fmt: skip
    _use("sweep", "DIR", uses, words)


def _make_sweep(words: list[str]) -> None:
    """Write a grid of presets, values and seeds, or add to one; nothing is trained yet."""
    from phasicrl.lab.sweeps.sweep import make_sweep

    arguments, own, _ = arguments_for("sweep make", make_sweep, words)
    _answer_made(own, arguments["directory"], make_sweep(**arguments))


def _make_search(words: list[str]) -> None:
    """Write a search for settings with Optuna, or give one more trials; nothing is trained yet."""
    from phasicrl.lab.sweeps.search import make_search

    arguments, own, _ = arguments_for("sweep search", make_search, words)
    _answer_made(own, arguments["directory"], make_search(**arguments))


def _answer_made(own: _Output, directory: Path, added: int) -> None:
    """Print the number of new trials, and the next command."""
    line = f"{added} trials added to {directory}; `phasicrl sweep run {directory}` trains them"
    own.say({"directory": directory, "added": added}, [line])


def _run_sweep(words: list[str]) -> None:
    """Train or resume the trials of a sweep that are not finished."""
    from phasicrl.lab.sweeps.sweep import run_sweep

    def on_trial(id: str, state: str) -> None:
        print(printable(f"{id}: {state}"), flush=True)

    arguments, own, _ = arguments_for("sweep run", run_sweep, words)
    with own.working():
        run_sweep(**arguments, on_trial=on_trial)
    _answer_status(own, arguments["directory"])


def _sweep_status(words: list[str]) -> None:
    """Show state, steps and last return of each trial, and the best one of a search."""
    from phasicrl.lab.sweeps.sweep import sweep_status

    arguments, own, _ = arguments_for("sweep status", sweep_status, words)
    _answer_status(own, **arguments)


def _answer_status(own: _Output, directory: Path) -> None:
    """Print the state of each trial of a sweep."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from phasicrl.lab.sweeps.sweep import sweep_status

    statuses = sweep_status(directory)
    scored = [status for status in statuses if status.state == "complete"]
    best = max(scored, key=lambda status: status.score or 0.0, default=None)

    def show() -> None:
        table = Table(show_lines=True)
        for column in ("trial", "settings", "environment", "state", "steps", "return"):
            table.add_column(column, overflow="fold")
        for each in statuses:
            mean = "–" if each.return_100 is None else f"{each.return_100:.4g}"
            row = (each.id, each.arm, each.env, each.state, f"{each.env_steps:,}", mean)
            table.add_row(*(Text(printable(cell)) for cell in row))
        Console().print(table)
        if best is not None:
            way = f"phasicrl train --from {directory / best.id}/trial.json --seed 101"
            print(printable(f"best: {best.id}, score {best.score:.4g}; `{way}` trains it"))

    own.answer(statuses, show)


@dataclass(frozen=True)
class _BenchOutput(_Output):
    """What only the command line has."""

    output: Path = Path("bench.json")
    """Gets everything, as JSON."""


def _bench(words: list[str]) -> None:
    """Measure how fast this machine trains: `phasicrl bench PRESET [FIELDS] [--seconds 30 …]`."""
    if words[:1] in (["-h"], ["--help"]):
        words = ["PRESET", *words]
    if not words or words[0].startswith("-"):
        raise ValueError("name a preset first: `phasicrl bench PRESET`; `phasicrl presets` has all")
    from phasicrl.lab.bench import measure, print_report

    arguments, own, rest = arguments_for(
        "bench PRESET", measure, words[1:], without=("config",), own=_BenchOutput, others=True
    )
    config = parse_config([words[0], *rest], "bench")
    for path in (own.output, arguments["trace"] or own.output):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = measure(config, **arguments)
    own.output.write_text(report.to_json() + "\n")

    def show() -> None:
        print_report(report)
        print(f"everything: {own.output}")

    own.answer(json.loads(report.to_json()), show)


# --- after training


@dataclass(frozen=True)
class _EvaluateOptions(_Output):
    """What only the command line has, or has in other words."""

    policy: Literal["both", "greedy", "sampled"] = "both"
    """Most likely action, drawn action, or one after the other."""
    steps: Path | None = None
    """A CSV file that gets every step: reward, return, mean, deviation, entropy, action."""


_PLAYED_ON = {
    "unseen": "unseen levels or seeds",
    "train": "the levels of its training",
    "both": "unseen levels, and as many on those of its training",
}
"""What episodes were played on, in words."""


def _evaluate(words: list[str]) -> None:
    """Play episodes that the agent has not trained on, and report their returns."""
    from phasicrl.session.evaluate import evaluate, generalization_gaps

    arguments, own, _ = arguments_for(
        "evaluate", evaluate, words, without=("policies", "steps_file"), own=_EvaluateOptions
    )
    policies = ("greedy", "sampled") if own.policy == "both" else (own.policy,)
    results = evaluate(**arguments, policies=policies, steps_file=own.steps)
    rows = [result.to_dict() for result in results]
    run, levels = str(arguments["run_dir"]), arguments["levels"]
    gaps = generalization_gaps(results)
    tree = rows[0] | {"run": run, "levels": levels, "seed": arguments["seed"]}
    tree |= dict(zip(policies, rows, strict=False))  # of the levels that come first
    trained = dict(zip(policies, rows[len(policies) :], strict=False))
    tree |= {"train": trained, "gap": gaps} if gaps else {}

    def show() -> None:
        title = f"{run}: {arguments['episodes']} episodes on {_PLAYED_ON[levels]}"
        _print_evaluation(title, rows)
        for policy, value in gaps.items():
            print(f"{policy}: {value:.2f} more on the levels of the training than on unseen ones")

    own.answer(tree, show)


def _print_evaluation(title: str, rows: list[dict[str, Any]]) -> None:
    """The returns as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column("policy")
    for column in ("mean return", "95 % interval", "deviation", "median", "mean length"):
        table.add_column(column, justify="right")
    kinds = {row["levels"] for row in rows}
    for row in rows:
        low, high = row["interval_95"]
        numbers = (row["mean_return"], row["std_return"], row["median_return"], row["mean_length"])
        mean, std, median, length = (f"{number:.2f}" for number in numbers)
        interval = f"{low:.2f} … {high:.2f}"
        what = row["policy"] if len(kinds) == 1 else f"{row['policy']}, {row['levels']}"
        table.add_row(what, mean, interval, std, median, length)
    Console().print(table)


def _video(words: list[str]) -> None:
    """Film the agent of a run; no screen needed."""
    from phasicrl.lab.experiments.video import film

    arguments, own, _ = arguments_for("video", film, words)
    path, result = film(**arguments)
    returns = ", ".join(f"{value:g}" for value in result.returns)
    line = f"{path}: {len(result.returns)} episodes, returns {returns}"
    own.say({"path": path, **result.to_dict()}, [line])


def _export(words: list[str]) -> None:
    """Write a policy as a file for other tools: `phasicrl export RUN [--format torch]`."""
    from phasicrl.lab.export.export import export_policy

    arguments, own, _ = arguments_for("export", export_policy, words)
    made = export_policy(**arguments)
    named = [(what, *each) for what in ("inputs", "outputs") for each in made.about[what].items()]
    lines = [f"  {what[:-1]} {name}: {about}" for what, name, about in named]
    lines += [
        f"on {made.observations:,} observations it says what the agent says, "
        f"to {made.difference:.1g}\n{made.path}"
    ]
    own.say(made, lines)


def _play(words: list[str]) -> None:
    """Let an exported policy act in its environments: `phasicrl play RUN [--file FILE]`."""
    from phasicrl.lab.export.export import play_exported, policy_file

    arguments, own, _ = arguments_for("play", play_exported, words)
    played = play_exported(**arguments).to_dict()

    def show() -> None:
        file = policy_file(arguments["file"] or arguments["run_dir"])
        title = f"{file}: {arguments['episodes']} episodes of the exported policy"
        _print_evaluation(title, [played])

    own.answer(played, show)


def _release(words: list[str]) -> None:
    """Write packages of trained agents to give away: `phasicrl release RUN … [--output DIR]`."""
    from phasicrl.lab.export.package import release

    arguments, own, _ = arguments_for("release", release, words)
    packages = release(**arguments)
    lines = []
    for made in packages:
        returns = ", ".join(f"{each.policy} {each.mean_return:.2f}" for each in made.evaluations)
        lines.append(f"{made.path}: {returns}")
    own.say(packages, lines)


def _hub(words: list[str]) -> None:
    """Send packages to the Hugging Face Hub and fetch them: `phasicrl hub push|pull …`."""
    _use("hub", "…", {"push": _push, "pull": _pull}, words)


def _push(words: list[str]) -> None:
    """Upload a package of `phasicrl release`: `phasicrl hub push DIR OWNER/NAME [--dry-run]`."""
    from phasicrl.lab.export.hub import push

    arguments, own, _ = arguments_for("hub push", push, words)
    names = push(**arguments)
    done = "would upload" if arguments["dry_run"] else "uploaded"
    own.say(names, [f"{done} to {arguments['repository']}: {', '.join(names)}"])


def _pull(words: list[str]) -> None:
    """Download a package: `phasicrl hub pull OWNER/NAME [--output DIR]`."""
    from phasicrl.lab.export.hub import pull

    arguments, own, _ = arguments_for("hub pull", pull, words)
    own.say([pull(**arguments)])


def _plot(words: list[str]) -> None:
    """Draw learning curves: `phasicrl plot RUN … [--reference FILE]`."""
    from phasicrl.lab.analysis.plot import plot_runs

    arguments, own, _ = arguments_for("plot", plot_runs, words)
    own.say(plot_runs(**arguments))


def _report(words: list[str]) -> None:
    """Write a page about runs, with a diagnosis: `phasicrl report RUN … [--output FILE]`."""
    from phasicrl.lab.analysis.report import write_report

    arguments, own, _ = arguments_for("report", write_report, words)
    own.say([write_report(**arguments)])


def _compare(words: list[str]) -> None:
    """Compare runs at equal steps: `phasicrl compare RUN … [--reference FILE] [--at-least X]`."""
    from phasicrl.lab.analysis.compare import compare_runs

    arguments, own, _ = arguments_for("compare", compare_runs, words)
    comparison = compare_runs(**arguments)
    own.answer(comparison, lambda: _print_comparison(comparison, comparison.files))
    comparison.require_bounds()


def _print_comparison(comparison: Comparison, files: Sequence[Path]) -> None:
    """Print who is where, and what was written."""
    from rich.console import Console

    from phasicrl.lab.analysis.compare import tables

    console = Console()
    for table in tables(comparison):
        console.print(table)
    for path in files:
        print(printable(str(path)))


# --- lists


def _presets(words: list[str]) -> None:
    """List the presets: `phasicrl presets NAME` shows the source and what is changed."""
    arguments, own, _ = arguments_for(
        "presets", _presets_named, words, markers=(tyro.conf.Positional,)
    )
    found = _presets_named(**arguments)
    fields = ("summary", "source", "parent", "config")
    rows = [
        {"name": name} | {field: getattr(preset, field) for field in fields}
        for name, preset in found.items()
    ]
    if arguments["pattern"]:
        return own.answer(rows, lambda: _print_presets(found))
    way = "`phasicrl presets NAME` shows where its numbers come from, and what it changes"
    own.say(rows, [*_preset_lines(), "", way])


def _preset_lines() -> list[str]:
    """Each preset with what it is for."""
    return [f"  {name:<30}{preset.summary}" for name, preset in PRESETS.items()]


def _presets_named(pattern: str = "") -> dict[str, Preset]:
    """List the presets; of those that are named also the source and the difference to the parent.

    Args:
        pattern: part of a name; such presets are shown in full.
    """
    found = {name: preset for name, preset in PRESETS.items() if pattern in name}
    if not found:
        raise ValueError(f"no preset's name contains {pattern!r}{nearest_name(pattern, PRESETS)}")
    return found


def _print_presets(shown: Mapping[str, Preset]) -> None:
    """The presets as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    for column in ("preset", "what and whence", "difference to its parent"):
        table.add_column(column, no_wrap=column == "preset")
    for name, preset in shown.items():
        parent = Config() if preset.parent is None else PRESETS[preset.parent].config
        lines = [f"[bold]{preset.parent or 'the defaults'}[/bold], but"]
        for field, (old, new) in differences(preset.config, parent).items():
            lines.append(f"{field} {'none' if new is None else new} [dim](was {old})[/dim]")
        table.add_row(name, f"{preset.summary}\n[dim]{preset.source}[/dim]", "\n".join(lines))
    Console().print(table)


def _envs(words: list[str]) -> None:
    """List what can be trained: `phasicrl envs PATTERN`."""
    from phasicrl.envs.make import list_envs

    arguments, own, _ = arguments_for("envs", list_envs, words, markers=(tyro.conf.Positional,))
    listings = list_envs(**arguments)
    if not listings:
        raise ValueError(
            f"no environment matches {arguments['pattern']!r}; "
            "`phasicrl envs` lists all, and * and ? stand for any letters"
        )
    own.say(listings)


def _doctor(words: list[str]) -> None:
    """Say what works on this machine, and the remedy for what does not."""
    from rich.console import Console

    from phasicrl.lab.doctor import as_table, diagnose

    _, own, _ = arguments_for("doctor", diagnose, words)
    with own.working(), Console().status("looking at everything that can be used; some seconds …"):
        found = diagnose()
    own.answer(found, lambda: Console().print(as_table(found)))


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
    "video": _video,
    "export": _export,
    "play": _play,
    "release": _release,
    "hub": _hub,
    "plot": _plot,
    "compare": _compare,
    "report": _report,
    "suite": _suite,
    "sweep": _sweep,
    "bench": _bench,
    "presets": _presets,
    "envs": _envs,
    "doctor": _doctor,
}
