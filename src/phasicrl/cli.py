"""Command line: parses arguments, calls the library, prints the result.

Packages add commands by the entry-point group `phasicrl.commands`. tyro parses the options of a run
by `Config`, and those of other commands by a function's signature. Commands import the libraries
that they need, so that `phasicrl --help` is fast.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from phasicrl.config import Config, format_value, get_defaults, get_option_docs
from phasicrl.config_io import escape_control_chars, read_instance, suggest_name
from phasicrl.presets import PRESETS, differences, get_preset, read_trainings
from phasicrl.runs.directory import AGENTS_FOLDER, USER_OBJECTS, RunDirectory
from phasicrl.system.signals import exit_on_preemption

if TYPE_CHECKING:
    from phasicrl.training.evaluate import Evaluation
    from phasicrl.training.run import Run

_DEFAULT_FORMATWARNING = warnings.formatwarning
EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
"""Exit codes of errors without an attribute `exit_code` (docs/runs.md lists all)."""
_LIST_PATTERN = re.compile(r"(?:^|=)([\[(].*|[\w.]+(?:,[\w.]+)+)$", re.MULTILINE)
_ENV_HELP = "--make-env MODULE:FUNCTION makes your own environment"
Command = Callable[[list[str]], None]
"""Function of the arguments of one command; its docstring is the help."""

SHORT_HELP_OPTIONS = """
name seed total_env_steps stop_at_return output_dir init_from imports env.id env.num_envs
env.num_threads env.vectorization env.options env.distribution env.num_levels model.value_path
model.encoder model.channels model.hidden_sizes model.activation model.memory model.memory_size
action.std action.squash ppo.num_steps ppo.gamma ppo.gae_lambda ppo.policy_epochs ppo.value_epochs
ppo.num_minibatches ppo.clip ppo.entropy_coef ppo.value_coef ppo.learning_rate
ppo.schedule ppo.max_grad_norm aux.epochs aux.every aux.num_minibatches aux.iterations_per_epoch
aux.beta_clone aux.learning_rate reward_norm.per obs_norm.statistics value_norm.statistics
compute.device compute.num_threads log.console log.wandb checkpoint.every_minutes
evaluation.every_iterations evaluation.episodes evaluation.film
"""
"""Options that `train PRESET --help` lists; `--help-all` lists all."""


@dataclass(frozen=True)
class _ObjectOptions:
    """Objects of the user, in commands whose functions take them."""

    make_env: str | None = None
    """Function that makes an environment, or of a number of environments, as `MODULE:FUNCTION`."""


@dataclass(frozen=True)
class _GlobalOptions(_ObjectOptions):
    """Options that may stand before the command."""

    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the traceback of an error."""
    modules: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="import", metavar="MODULE")
    ] = ()
    """Module to import first, which may register environments."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options, words = tyro.cli(
        _GlobalOptions, args=arguments, prog="phasicrl", return_unknown_args=True, add_help=False
    )
    previous, warnings.formatwarning = warnings.formatwarning, _format_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may have any letters
    try:
        if "" not in sys.path:  # modules of the user may be in this folder
            sys.path.append("")
        words += [] if options.make_env is None else ["--make-env", options.make_env]
        for module in options.modules:
            importlib.import_module(module)
        are_saved = words[:1] == ["train"] and words[1:] and "--imports" not in words
        words += ["--imports", *options.modules] if options.modules and are_saved else []
        trains = {"train", "resume", "sweep", "suite"} & {*words[:1]}
        with exit_on_preemption() if trains else nullcontext():  # also during slow imports
            dispatch_command(words, all_commands(), "phasicrl")
        return 0
    except BrokenPipeError:  # the reader has closed the output
        from phasicrl.runs.console import discard_output

        discard_output(sys.stdout)
        return EXIT_BROKEN_PIPE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # raised by rich
            return EXIT_BROKEN_PIPE
        _print_list_syntax_hint(words, error.code)
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        expected = not isinstance(error, RuntimeError) or hasattr(error, "exit_code")
        if options.debug or not expected:
            traceback.print_exc()
        text = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
        print(escape_control_chars(text), file=sys.stderr)
        return getattr(error, "exit_code", EXIT_USER_ERROR if expected else 1)
    finally:
        warnings.formatwarning = previous


def _print_list_syntax_hint(words: list[str], tyro_exit_code: object) -> None:
    """Print the spelling of a list if tyro has refused one such as `[64,64]` or `64,64`."""
    if tyro_exit_code == EXIT_USER_ERROR and (given := _LIST_PATTERN.search("\n".join(words))):
        values = " ".join(re.findall(r"[\w.]+", given[1]))
        print(f"error: a list is {given[1]}; expected {values}, with spaces", file=sys.stderr)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
) -> str:
    """Format a warning of this package as one sentence, without the line of code."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"note: {escape_control_chars(str(message))}\n"
    return _DEFAULT_FORMATWARNING(message, category, filename, *rest, **more)


def all_commands() -> dict[str, Command]:
    """Return the subcommands that installed packages register, by name."""
    commands: dict[str, Command] = {}
    for entry in sorted(entry_points(group="phasicrl.commands"), key=lambda each: each.name):
        commands |= entry.load()
    return commands


def dispatch_command(words: list[str], commands: Mapping[str, Command], prog: str) -> None:
    """Run the command that the first argument names, or list the commands.

    Raises:
        ValueError: there is no such command; the message has the nearest name.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        print(f"usage: {prog} COMMAND ...\n\ncommands:")
        for name, command in commands.items():
            print(f"  {name:<12}{(command.__doc__ or '').partition(chr(10))[0]}")
        print(f"\n`{prog} COMMAND --help` lists the options of a command.")
        print("--debug prints the traceback of an error; --import MODULE imports a module first;")
        print(f"{_ENV_HELP} (train, resume, evaluate, …).")
        raise SystemExit(0 if words else EXIT_USER_ERROR)
    if words[0] == "--version":
        return print(version("phasicrl"))
    if words[0] not in commands:
        hint = suggest_name(words[0], commands)
        raise ValueError(f"unknown command {words[0]!r}{hint}. `{prog} --help` lists all")
    commands[words[0]](words[1:])


# --- tyro

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _make_value_parser(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return the parser of a `none`, integer (1e6) or `KEY=VALUE …`; else None."""
    if type_info.type is type(None):
        return PrimitiveConstructorSpec(
            nargs=1, metavar="none", choices=("none", "None"),
            instance_from_str=lambda words: None,
            is_instance=lambda value: value is None, str_from_instance=lambda value: ["none"],
        )  # fmt: skip
    if type_info.type is int:
        return PrimitiveConstructorSpec(
            nargs=1, metavar="INT", instance_from_str=lambda words: _parse_int(words[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )  # fmt: skip
    if type_info.type_origin is Mapping:
        return PrimitiveConstructorSpec(
            nargs="*", metavar="KEY=VALUE …", instance_from_str=_parse_pairs,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{key}={each}" for key, each in value.items()],
        )  # fmt: skip
    return None  # tyro's own rules


def _parse_int(word: str) -> int:
    """Parse an integer, such as `3` or `1e6`."""
    try:
        return int(word)
    except ValueError:
        number = float(word)
        if not number.is_integer():
            raise
        return int(number)


def _parse_pairs(words: list[str]) -> dict[str, str]:
    """Parse `KEY=VALUE …`."""
    if wrong := [word for word in words if "=" not in word]:
        raise ValueError(f"an argument is {wrong[0]!r}; expected KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


def parse_and_call(
    function: Callable[..., Any],
    prog: str,
    words: list[str],
    positional_mode: Any = tyro.conf.PositionalRequiredArgs,
) -> Any:
    """Parse arguments by the signature of a library function, and call the function.

    Parameters that have no text form, such as functions, keep their defaults, except `make_env`.
    """
    text = None
    if "user_objects" in inspect.signature(function).parameters:
        objects, words, _ = _extract_make_env(words)
        text = (inspect.getdoc(function) or "").partition("\nArgs:")[0] + f"\n{_ENV_HELP}"
        function = functools.partial(function, **objects)
    return tyro.cli(
        function, args=_expand_home(words), prog=f"phasicrl {prog}", registry=_REGISTRY,
        config=(positional_mode, tyro.conf.SuppressFixed), description=text,
    )  # fmt: skip


def _extract_make_env(words: list[str]) -> tuple[dict[str, Any], list[str], str]:
    """Parse `--make-env MODULE:FUNCTION`.

    Returns:
        The objects by name, the other arguments, and `MODULE:FUNCTION`.

    Raises:
        ValueError: there is no such function.
    """
    options, rest = tyro.cli(_ObjectOptions, args=words, return_unknown_args=True, add_help=False)
    if options.make_env is None:
        return {}, rest, ""
    module, _, name = options.make_env.partition(":")
    try:
        maker: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        parameters = inspect.signature(maker).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        rule = "MODULE:FUNCTION that can be imported here, as envs:MyEnv"
        raise ValueError(f"make_env is {options.make_env!r}; expected {rule} ({error})") from error
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return {"make_vector_env" if required else "make_env": maker}, rest, options.make_env


def _expand_home(words: list[str]) -> list[str]:
    """Replace `~` at the start of paths, also behind `=`, where shells do not."""
    return [re.sub(r"^(-[^=]*=)?~(?=/|$)", rf"\g<1>{Path.home()}", word) for word in words]


def print_lines(lines: Iterable[object]) -> None:
    """Print a line for each object, with control characters escaped."""
    print(escape_control_chars("\n".join(map(str, lines))))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table, as wide as the terminal at most, with numbers on the right.

    Args:
        title: title above the table.
        columns: heads of the columns; without any there is no head.
        rows: cells, which are texts without markup, or rich's `Text`.
    """
    from rich.console import Console
    from rich.table import Table

    cells = [[escape_control_chars(x) if isinstance(x, str) else x for x in row] for row in rows]
    title = escape_control_chars(title)
    has_lines = any("\n" in str(x) for row in cells for x in row)
    table = Table(title=title, title_justify="left", show_header=any(columns), show_lines=has_lines)
    for column, *values in zip(columns, *cells, strict=True):
        justify = "right" if all(re.match(r"[-–\d]", str(x)) for x in values) else "left"
        is_whole = "95 %" in column or column == "trial"
        table.add_column(column, justify=justify, no_wrap=is_whole, overflow="fold")
    for row in cells:
        table.add_row(*row)
    Console(markup=False, emoji=False).print(table)


# --- train and resume


@dataclass(frozen=True)
class _TrainOptions:
    """Options of `train`, besides those of `Config`."""

    resume: Literal["never", "auto"] = "never"
    """Resume the newest run of this experiment, seed and length, if there is one (`auto`)."""


def _train(words: list[str]) -> None:
    """Train an agent: `phasicrl train PRESET [--seed 3 …] [--resume auto]`, or `--from RUN`."""
    objects, words, make_env_path = _extract_make_env(words)
    options, config = parse_config_and_options(words, "train", _TrainOptions, make_env_path)
    from phasicrl.algorithm import train

    _print_results(train(config, resume=options.resume, **objects))


def parse_config(words: list[str]) -> Config:
    """Parse the arguments of `train`: a preset or `--from FILE`, and changes of its options."""
    return parse_config_and_options(words, "train", _TrainOptions)[1]


def parse_config_and_options(
    words: list[str], command: str, options_type: type, make_env_path: str | None = None
) -> tuple[Any, Config]:
    """Parse a preset or `--from FILE`, changes of its options, and options of a command.

    Args:
        words: arguments of the command.
        command: name of the command, for its help.
        options_type: dataclass of the command's options.
        make_env_path: `MODULE:FUNCTION` that makes the environment, which is named after it; empty
            without one; None for a command that takes none.

    Returns:
        An instance of `options_type`, and the changed configuration.

    Raises:
        ValueError: the preset is missing or unknown, or values are invalid.
    """
    options, words = tyro.cli(
        options_type, args=_expand_home(words), return_unknown_args=True, add_help=False
    )
    if not words or words[0] in ("-h", "--help"):
        usage = f"usage: phasicrl {command} PRESET|--from RUN [OPTIONS]\n\npresets:"
        print(usage, *_preset_lines(), sep="\n")
        print(f"\n`phasicrl {command} PRESET --help` lists options and their values in a preset.")
        raise SystemExit(0 if words else EXIT_USER_ERROR)
    recorded_objects: Collection[str] = ()
    first, equals, file = words[0].partition("=")
    if first == "--from":
        words = [first, file, *words[1:]] if equals else words
        if len(words) < 2:
            raise ValueError("--from is empty; expected the path of a run or a config.json")
        path = Path(words[1])
        run = RunDirectory.find(path.parent if path.is_file() else path)
        base = read_instance(Config, path) if path.is_file() else run.config
        is_trial = (run.path.resolve().parent.parent / "trial.json").is_file()  # it is in a sweep
        if is_trial or run.path.parent == AGENTS_FOLDER:
            base = base.with_updates({"output_dir": Config().output_dir, "log.console": "auto"})
        has_env = make_env_path != "" or any(word.startswith("--env.id") for word in words)
        names = [x for x, kind in USER_OBJECTS.items() if kind != "environment" or not has_env]
        if path.is_dir() or run.card:
            run.load_config(**dict.fromkeys(names))
        base.check_imports()
        words = words[1:]
        recorded_objects = dict(run.card.get("own") or {}).values()
    elif first.startswith("-"):
        rule = f"`phasicrl {command} PRESET {words[0]} …`. `phasicrl presets` lists presets"
        raise ValueError(f"the preset is {words[0]}; expected {rule}")
    else:
        base = get_preset(words[0])
    if make_env_path and make_env_path not in recorded_objects:
        base = base.with_updates({"env.id": make_env_path.replace(":", ".")})
    if {"-h", "--help"} & {*words}:
        _print_options(command, options_type, base)
        raise SystemExit(0)
    words = ["--help" if word == "--help-all" else word for word in words]
    config, unknown = tyro.cli(
        Config, default=base, args=words[1:], prog=f"phasicrl {command} {words[0]}",
        config=(tyro.conf.HelptextFromCommentsOff,), registry=_REGISTRY, return_unknown_args=True,
    )  # fmt: skip
    if unknown:
        hint = f"`phasicrl {command} PRESET --help-all` lists all options"
        raise ValueError(f"unknown {_describe_unknown(unknown, words)}. {hint}")
    return options, config.with_updates({"env.options": {**base.env.options, **config.env.options}})


def _describe_unknown(unknown: list[str], words: list[str]) -> str:
    """Describe unknown arguments, with the options that may be meant."""
    flags = [f"--{path.replace('_', '-')}" for path in get_defaults()]
    if names := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
        if "--from" in names:
            return "option --from; expected it as the first argument, in place of the preset"
        return "; unknown ".join(f"option {name}{suggest_name(name, flags)}" for name in names)
    if "=" in unknown[0]:  # such as seed=3
        hint = suggest_name(unknown[0].partition("=")[0], flags)
        return f"argument {unknown[0]!r}; expected --OPTION VALUE{hint}"
    parts = [part for word in words for part in word.split("=", 1)]
    places = [i for i in range(1, len(parts)) if parts[i] == unknown[0]]
    before = parts[: next((i for i in places if parts[i - 1] not in flags), places[0])]
    flag = next((part for part in reversed(before) if part in flags), "")
    if flag != before[-1]:
        hint = f"; expected one value of {flag}. `phasicrl sweep make` trains with several"
        return f"argument {unknown[0]!r}{hint * bool(flag)}"
    group, _, name = flag.rpartition(".")
    return f"argument {unknown[0]!r}; expected {flag} or {group}.no-{name} without it"


def _print_options(command: str, options_type: type, base: Config) -> None:
    """Print the options of a command and the common options of a run."""
    print(f"usage: phasicrl {command} PRESET|--from RUN [OPTIONS]\n\noptions:")
    print(f"  {_ENV_HELP}\n" * (command == "train"), end="")
    command_options = {field.name: field.default for field in fields(options_type)}
    values = base.values() | {"env.options": base.env.options} | command_options
    texts = {**get_option_docs(Config), **get_option_docs(options_type)}
    for part in fields(Config):
        if is_dataclass(group := getattr(base, part.name)):
            texts |= {f"{part.name}.{x}": text for x, text in get_option_docs(type(group)).items()}
    for path in (*command_options, *SHORT_HELP_OPTIONS.split()):
        option = f"--{path.replace('_', '-')} {format_value(values[path])}"
        text = texts[path].replace("\n", "\n" + 43 * " ")
        print(f"  {option:<40} {text}")
    print(f"\nValues are those of this preset. `phasicrl {command} PRESET --help-all` lists all.")


def _resume(words: list[str]) -> None:
    """Continue a run from its last checkpoint."""
    from phasicrl.algorithm import resume

    if changes := [word for word in words if re.match(r"--(\w+\.|seed|stop)", word)]:
        same = "Change config.json (not its seed) and add --accept-config-changes"
        new = "or start a new run with `phasicrl train --from RUN --init-from RUN`"
        raise ValueError(f"resume has {changes[0]}; expected no option of the run. {same}, {new}")
    _print_results(parse_and_call(resume, "resume", words))


def _print_results(run: Run) -> None:
    """Print the run directory and a table of results, on rank 0."""
    if not run.world.is_first:
        return
    title = f"{run.config.name} on {run.envs.name}, seed {run.config.seed}"
    print_table(title, ("", ""), run.format_results().items())
    print_lines([f"run directory: {run.directory}"])


# --- evaluate, presets, envs


def _evaluate(words: list[str]) -> None:
    """Run episodes without training, and print their returns."""
    from phasicrl.training.evaluate import evaluate, generalization_gaps

    results = parse_and_call(evaluate, "evaluate", words)
    print_evaluations(results)
    for policy, value in generalization_gaps(results).items():
        print(f"{policy}: {value:.2f} higher on training levels than on unseen ones")


def print_evaluations(results: list[Evaluation]) -> None:
    """Print the results of evaluations as a table."""
    columns = ("policy", "mean return", "95 % interval", "deviation", "median", "mean length")
    rows: list[tuple[str, ...]] = []
    has_both = len({result.levels for result in results}) > 1
    for result in results:
        summary: dict[str, Any] = result.to_dict()
        label = f"{result.policy}, {result.levels}" if has_both else result.policy
        interval = "{:.2f} … {:.2f}".format(*summary["interval_95"])
        rest = (f"{summary[key]:.2f}" for key in ("std_return", "median_return", "mean_length"))
        rows.append((label, f"{result.mean_return:.2f}", interval, *rest))
    print_table(f"{len(results[0].returns)} episodes", columns, rows)


_PRESETS_PAGE = "docs/reference/presets.md"


def _preset_lines() -> list[str]:
    """Return a line with name, mean return and summary for each preset, and a header."""
    returns = {
        name: f"{of['mean']:,g} ({of['seeds']})" if of["seeds"] else "in part"
        for name, of in read_trainings().items()
    }
    rows = [(name, returns.get(name, "–"), preset.summary) for name, preset in PRESETS.items()]
    header = ("preset", "return", "summary (return: greedy mean, seeds)")
    return [f"{name:<29}{value:>11}  {summary}" for name, value, summary in (header, *rows)]


def _presets(words: list[str]) -> None:
    """List the presets: `phasicrl presets NAME` shows the source and the differences."""
    parse_and_call(_show_presets, "presets", words, tyro.conf.Positional)


def _show_presets(pattern: str = "") -> None:
    """List the presets.

    Args:
        pattern: Part of a name, to show these presets with their values.
    """
    if not pattern:
        part = "in part: shorter, with other options or without a greedy evaluation"
        more = f"`phasicrl presets NAME` shows values and runs; all: {_PRESETS_PAGE}"
        return print_lines([*_preset_lines(), "", part, more])
    if not (found := {name: preset for name, preset in PRESETS.items() if pattern in name}):
        hint = suggest_name(pattern, PRESETS)
        raise ValueError(f"pattern is {pattern!r}; expected part of a preset's name{hint}")
    rows: list[tuple[str, ...]] = []
    trainings = read_trainings()
    for name, preset in found.items():
        parent = Config() if preset.parent is None else PRESETS[preset.parent].config
        lines = [f"{preset.parent or 'the defaults'}, but"]
        for path, (old, new) in differences(preset.config, parent).items():
            lines.append(f"{path} {format_value(new)} (was {format_value(old)})")
        runs = trainings[name]["runs"] if name in trainings else []
        trained = f"Trained: {'; '.join(runs)}." if runs else "Not trained here."
        rows.append((name, f"{preset.summary}\n{preset.source}\n{trained}", "\n".join(lines)))
    print_table("", ("preset", "summary, source, runs", "differences from its parent"), rows)
    print_lines([f"commands of the runs: {_PRESETS_PAGE} in the repository"])


def _envs(words: list[str]) -> None:
    """List the environments: `phasicrl envs PATTERN`."""
    from phasicrl.envs.make import list_envs

    if not (listings := parse_and_call(list_envs, "envs", words, tyro.conf.Positional)):
        raise ValueError(f"pattern is {words[0]!r}; expected part of an id, see `phasicrl envs`")
    print_lines(listings)


COMMANDS: dict[str, Command] = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
    "presets": _presets,
    "envs": _envs,
}
