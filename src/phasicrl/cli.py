"""The command line: parse, call the library, print. Kind: effects. Libraries are imported by the verb that needs them, so `--help` is quick."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from phasicrl.config import (
    AuxConfig,
    Config,
    ObsNormConfig,
    Options,
    RewardNormConfig,
    ValueNormConfig,
    field_paths,
    refuse_unasked_import,
)
from phasicrl.config_io import nearest_name
from phasicrl.presets import PRESETS, differences, get_preset

if TYPE_CHECKING:
    from phasicrl.runs.run import Run

T = TypeVar("T")

USER_ERROR, ENVIRONMENT_ERROR, INTERRUPTED = 2, 4, 130
"""Exit codes besides 0."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code. A user's mistake is one sentence; `--debug` shows where it arose."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        return _dispatch(_without_imports(words))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        from phasicrl.envs.protocol import EnvError

        expected = isinstance(error, ValueError | OSError | ImportError | MemoryError | EnvError)
        if debug or not expected:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return ENVIRONMENT_ERROR if isinstance(error, EnvError) else USER_ERROR if expected else 1


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
        raise ValueError(f"unknown command {words[0]!r}{nearest_name(words[0], VERBS)}; `phasicrl --help` lists all")
    if verb in (_presets, _doctor) and words[1:2] in (["-h"], ["--help"]):
        print(f"usage: phasicrl {words[0]}{' [PART OF A NAME]' if verb is _presets else ''}\n\n{verb.__doc__}")
        return 0
    verb(words[1:])
    return 0


def _without_imports(words: list[str]) -> list[str]:
    """The words without `--import MODULE`, after importing the modules that are named so; they may register environments."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--import=") else [word])]
    while "--import" in words:
        at = words.index("--import")
        if len(words) == at + 1:
            raise ValueError("--import needs the name of a Python module")
        try:
            importlib.import_module(words[at + 1])
        except ImportError as error:
            raise ImportError(f"--import {words[at + 1]}: {error}; install it, or put its folder into PYTHONPATH") from error
        words = words[:at] + words[at + 2 :]
    return words


def _usage() -> str:
    """What `phasicrl --help` prints."""
    verbs = "\n".join(f"  {name:<10}{(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items())
    return (
        "usage: phasicrl COMMAND ...\n\nPhasic Policy Gradient and Proximal Policy Optimization.\n\n"
        f"commands:\n{verbs}\n\n`phasicrl COMMAND --help` says more; `--debug` shows where an error arose; "
        "`--import MODULE` imports a module first, which may register environments."
    )


def _parse(kind: type[T], words: list[str], verb: str) -> T:
    """Read a verb's options into the dataclass `kind`."""
    return tyro.cli(kind, args=_plain(words, kind), prog=f"phasicrl {verb}")


def _plain(words: list[str], kind: type) -> list[str]:
    """One spelling of everything: `--flag=value` is two words, flags have no underscores, and `none` is `None`, as tyro writes it.

    Only right after a flag of `kind` that can be off: a text, a path or one choice among others may have that name.
    """
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    before, can_be_off = ["", *words], _flags_that_can_be_off(kind)
    return ["None" if word.lower() == "none" and flag in can_be_off else word for flag, word in zip(before, words, strict=False)]


def _flags_that_can_be_off(kind: type, prefix: str = "--") -> set[str]:
    """Flags of a dataclass whose value may be None, and is no text otherwise."""
    flags: set[str] = set()
    for name, hint in typing.get_type_hints(kind).items():
        flag = prefix + name.replace("_", "-")
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        for group in (option for option in options if dataclasses.is_dataclass(option)):
            flags |= _flags_that_can_be_off(typing.cast(type, group), f"{flag}.")
        if type(None) in options and not {str, Path} & set(options):
            flags.add(flag)
    return flags


# --- train and resume


def _train(words: list[str]) -> None:
    """Train an agent: `phasicrl train PRESET [--env.id starpilot --seed 3 …]`, or `--from RUN/config.json`."""
    config = parse_config(words)
    from phasicrl.algorithm import train

    _print_result(train(config))


def parse_config(words: list[str]) -> Config:
    """The configuration that the words after `train` describe: a preset's name or `--from FILE`, then fields.

    Raises:
        ValueError: no preset named, an unknown one, or values that do not go together.
    """
    if not words or words[0] in ("-h", "--help"):
        print("usage: phasicrl train PRESET [FIELDS]\n       phasicrl train --from RUN/config.json [FIELDS]\n")
        print("presets:\n" + "\n".join(f"  {name:<30}{preset.summary}" for name, preset in PRESETS.items()))
        print("\n`phasicrl train PRESET --help` lists every field with its value in that preset.")
        raise SystemExit(0 if words else USER_ERROR)
    if words[0] == "--from":
        if len(words) < 2:
            raise ValueError("--from needs the path of a config.json")
        path = Path(words[1])
        base, label, words = Config.from_json((path / "config.json" if path.is_dir() else path).read_text()), f"--from {path}", words[2:]
        refuse_unasked_import(base)
    elif words[0].startswith("-"):
        raise ValueError(f"the preset comes first: `phasicrl train PRESET {words[0]} …`; `phasicrl presets` lists them")
    else:
        base, label, words = get_preset(words[0]), words[0], words[1:]
    base, words = _read_options(base, _plain(words, Config))
    groups = {"aux": AuxConfig, "reward_norm": RewardNormConfig, "obs_norm": ObsNormConfig, "value_norm": ValueNormConfig}
    for field, group in groups.items():
        base, words = _switch_group(base, words, field, group)
    given = {part.name: getattr(base, part.name) for part in dataclasses.fields(base)}
    asked = tyro.cli(
        _AskedConfig, default=_AskedConfig(**given), args=words, prog=f"phasicrl train {label}", config=(tyro.conf.AvoidSubcommands,), registry=_REGISTRY
    )  # fmt: skip
    # What the base sets and these words make useless goes without a word; what was named in vain is refused.
    named = {path for path in field_paths() if not _flags_of(path).isdisjoint(words)}
    return base.changed({part.name: getattr(asked, part.name) for part in dataclasses.fields(asked)}, reset_idle=True, keep=named)


def _flags_of(path: str) -> set[str]:
    """The flags that set a knob."""
    group, dot, name = path.replace("_", "-").rpartition(".")
    return {f"--{group}{dot}{name}", f"--{group}{dot}no-{name}"}


@dataclass(frozen=True, kw_only=True)
class _AskedConfig(Config):
    """One run."""

    def __post_init__(self) -> None:
        """Check values only: which knobs have an effect is asked when all is known."""
        self.check_values()


def _switch_group(base: Config, words: list[str], field: str, group: type[Any]) -> tuple[Config, list[str]]:
    """Optional groups: `--aux none` switches one off, naming any field of it switches it on."""
    flag = "--" + field.replace("_", "-")
    if flag in words:
        at = words.index(flag)
        if words[at + 1 : at + 2] != ["None"]:
            raise ValueError(f"{flag} takes only `none`; its fields are set by {flag}.FIELD")
        return base.changed({field: None}, reset_idle=True), words[:at] + words[at + 2 :]
    named = any(word.startswith(f"{flag}.") for word in words)
    if named and getattr(base, field) is None:
        # The usual number of minibatches, or as many of them as these environments can be dealt out to.
        default = AuxConfig(num_minibatches=gcd(AuxConfig().num_minibatches, base.env.num_envs)) if group is AuxConfig else group()
        base = replace(base, **{field: default})
    return base, words


def _read_options(base: Config, words: list[str]) -> tuple[Config, list[str]]:
    """`--env.options KEY=VALUE …`, as often as wanted: added to those of the base, or `none` to drop those."""
    flag, options, rest = "--env.options", dict(base.env.options), list(words)
    while flag in rest:
        at = rest.index(flag)
        end = next((place for place in range(at + 1, len(rest)) if rest[place].startswith("--")), len(rest))
        for word in (given := rest[at + 1 : end]):
            key, equals, value = word.partition("=")
            if word.lower() == "none":
                options.clear()
            elif not key or not equals:
                raise ValueError(f"{flag} takes KEY=VALUE, or `none`; given was {word!r}")
            else:
                options[key] = value
        if not given:
            raise ValueError(f"{flag} takes KEY=VALUE, or `none`; nothing was given")
        rest = rest[:at] + rest[end:]
    return (base.changed({"env.options": Options(options)}) if options != base.env.options else base), rest


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _show_options(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How tyro's help shows `env.options`; they were read before it is called."""
    if typing.get_origin(kind.type) is not Mapping:
        return None
    return PrimitiveConstructorSpec(
        nargs="*", metavar="KEY=VALUE", instance_from_str=lambda words: Options((key, value) for key, _, value in (word.partition("=") for word in words)),
        is_instance=lambda given: isinstance(given, Options), str_from_instance=lambda given: [f"{key}={value}" for key, value in given.items()],
    )  # fmt: skip


@dataclass(frozen=True)
class _ResumeOptions:
    """Continue a run from its last checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""


def _resume(words: list[str]) -> None:
    """Continue a run from its last checkpoint."""
    options = _parse(_ResumeOptions, words, "resume")
    from phasicrl.algorithm import resume

    _print_result(resume(options.run))


def _print_result(run: Run) -> None:
    """Where the run directory is, and one table of results."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{run.config.name} on {run.envs.name}, seed {run.config.seed}", show_header=False)
    for name, value in run.summary().items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"run directory: {run.directory}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _LadderOptions:
    """Train PPO trick by trick, from REINFORCE up, and show what each gave."""

    env: str = "CartPole-v1"
    """Id of the environment; its observations must not be images."""
    seeds: int = 5
    """Runs for each rung."""
    leave_one_out: bool = False
    """The other way round: all tricks, and then all but one."""
    total_env_steps: int | None = None
    """Budget of each run; off: 100,000."""
    jobs: int = 1
    """Runs at a time, each on one thread."""
    output_dir: Path = Path("runs/ladder")
    """Gets the runs, the table as CSV and the figure; runs that are there already are not repeated."""


def _ladder(words: list[str]) -> None:
    """Train PPO trick by trick, from REINFORCE up, and show what each gave."""
    options = _parse(_LadderOptions, words, "ladder")
    from rich.console import Console
    from rich.table import Table

    from phasicrl.experiments.ladder import draw_ladder, run_ladder

    mode = "leave-one-out" if options.leave_one_out else "ladder"
    console = Console()
    output_dir = options.output_dir / options.env.replace(":", "-").replace("/", "-")
    found = run_ladder(
        options.env, seeds=options.seeds, mode=mode, total_env_steps=options.total_env_steps, output_dir=output_dir, jobs=options.jobs,
        on_run=lambda name, seed, reached: console.print(f"{name}, seed {seed}: {reached:.1f}", highlight=False),
        say=lambda sentence: console.print(sentence, highlight=False, soft_wrap=True),
    )  # fmt: skip
    table = Table(title=f"{mode} on {options.env}: greedy return after training, {options.seeds} seeds")
    for column in ("rung", "mean", "95 % interval", "least", "last 100 training episodes"):
        table.add_column(column, justify="left" if column == "rung" else "right")
    for rung in found:
        row = rung.row()
        numbers = (f"{row['greedy_mean']:.1f}", f"{row['interval_low']:.1f} to {row['interval_high']:.1f}", f"{row['greedy_min']:.1f}")
        table.add_row(rung.name, *numbers, f"{row['last_100_mean']:.1f}")
    console.print(table)
    for ending in ("png", "svg"):
        draw_ladder(found, output_dir / f"{mode}.{ending}", title=f"{options.env}, {options.seeds} seeds")
    console.print(f"runs, table and figure: {output_dir}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _BenchOptions:
    """Measure how fast this machine trains a preset, and where the time goes."""

    seconds: float = 30.0
    """How long the whole loop is measured, after it has warmed up."""
    output: Path = Path("bench.json")
    """Gets everything, as JSON."""
    trace: Path | None = None
    """Gets every kernel of one more phase; chrome://tracing and ui.perfetto.dev show it."""


def _bench(words: list[str]) -> None:
    """Measure how fast this machine trains: `phasicrl bench PRESET [FIELDS] [--seconds 30 --output bench.json --trace trace.json]`."""
    if words[:1] in (["-h"], ["--help"]):
        words = ["PRESET", *words]
    if not words or words[0].startswith("-"):
        raise ValueError("name a preset first: `phasicrl bench PRESET`; `phasicrl presets` lists them")
    options, rest = tyro.cli(_BenchOptions, args=words[1:], prog="phasicrl bench PRESET", return_unknown_args=True)
    config = parse_config([words[0], *rest])
    from phasicrl.host.bench import measure, print_report

    report = measure(config, seconds=options.seconds, trace=options.trace)
    options.output.write_text(report.to_json() + "\n")
    print_report(report)
    print(f"everything: {options.output}")


# --- after training


@dataclass(frozen=True)
class _EvaluateOptions:
    """Play episodes that the agent has not trained on, and report their returns."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    episodes: int = 100
    """Episodes for each policy."""
    policy: Literal["both", "greedy", "sampled"] = "both"
    """Most likely action, drawn action, or one after the other."""
    levels: Literal["unseen", "train"] = "unseen"
    """Procgen: the full distribution of levels, or those of the training."""
    seed: int = 0
    """Another seed, other episodes."""
    json: bool = False
    """Print one JSON object; its `mean_return` is the greedy policy's, unless only the other was asked for."""
    steps: Path | None = None
    """A CSV file that gets every step: reward, return so far, the policy's mean, deviation and entropy, the action."""


def _evaluate(words: list[str]) -> None:
    """Play episodes that the agent has not trained on, and report their returns."""
    options = _parse(_EvaluateOptions, words, "evaluate")
    from phasicrl.experiments.evaluate import evaluate

    policies = ("greedy", "sampled") if options.policy == "both" else (options.policy,)
    results = evaluate(
        options.run, episodes=options.episodes, policies=policies, levels=options.levels, seed=options.seed, steps_file=options.steps
    )
    rows = [result.to_dict() for result in results]
    if options.json:
        tree = (
            {"run": str(options.run), "levels": options.levels, "seed": options.seed} | rows[0] | {str(row["policy"]): row for row in rows}
        )
        print(json.dumps(tree))
        return
    _print_evaluation(options, rows)


def _print_evaluation(options: _EvaluateOptions, rows: list[dict[str, Any]]) -> None:
    """The returns as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{options.run}: {options.episodes} episodes, {options.levels} levels or seeds", title_justify="left")
    for column in ("policy", "mean return", "95 % interval", "standard deviation", "median", "mean length"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        low, high = row["interval_95"]
        numbers = (row["mean_return"], row["std_return"], row["median_return"], row["mean_length"])
        mean, std, median, length = (f"{number:.2f}" for number in numbers)
        table.add_row(row["policy"], mean, f"{low:.2f} … {high:.2f}", std, median, length)
    Console().print(table)


@dataclass(frozen=True)
class _VideoOptions:
    """Film the agent of a run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    output: Path | None = None
    """The file; otherwise one in `videos/` of the run directory."""
    num_envs: int = 1
    """Environments side by side, in a square."""
    episodes: int = 3
    """Episodes played to their end, over all environments."""
    policy: Literal["sampled", "greedy"] = "sampled"
    """Drawn or most likely actions."""
    levels: Literal["unseen", "train"] = "unseen"
    """Procgen: the full distribution of levels, or those of the training."""
    seed: int = 0
    """Another seed, other episodes."""
    fps: int = 15
    """Pictures a second."""
    size: int = 512
    """At least this many pixels high and wide."""


def _video(words: list[str]) -> None:
    """Film the agent of a run; no screen needed."""
    options = _parse(_VideoOptions, words, "video")
    from phasicrl.experiments.video import film

    arguments = {name: value for name, value in vars(options).items() if name != "run"}
    path, result = film(options.run, **arguments)
    returns = ", ".join(f"{value:g}" for value in result.returns)
    print(f"{path}: {len(result.returns)} episodes, returns {returns}")


@dataclass(frozen=True)
class _PlotOptions:
    """Draw learning curves of runs over seeds, with published curves beside them if wanted."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories; those of one experiment on one environment are one curve over their seeds."""
    output: Path = Path("curves")
    """Name of the picture; .png, .svg and .csv are put behind it."""
    metric: str = "charts/episodic_return_100"
    """Which metric."""
    smooth_steps: int = 0
    """Average over so many environment steps up to each point; 0: as recorded."""
    reference: Path | None = None
    """CSV file (.gz or not) of published curves: experiment, run, game, step, episodic_return, …"""
    reference_experiments: tuple[str, ...] = ()
    """Which experiments of that file; none: all, if they are few."""
    reference_game: str | None = None
    """The game in that file, if it is not the environment's name."""
    reference_split: str = "train"
    """Which rows of that file, if it has a column `split`."""
    title: str | None = None
    """Over the figure."""


def _plot(words: list[str]) -> None:
    """Draw learning curves: `phasicrl plot RUN … [--reference FILE]`."""
    options = _parse(_PlotOptions, words, "plot")
    if not options.runs:
        raise ValueError("name at least one run directory: `phasicrl plot RUN …`")
    from phasicrl.experiments.plot import plot_runs

    arguments = {name: value for name, value in vars(options).items() if name != "runs"}
    for path in plot_runs(options.runs, **arguments):
        print(path)


# --- lists


def _presets(words: list[str]) -> None:
    """Show the presets: what each is for, its source, and how it differs from its parent."""
    from rich.console import Console
    from rich.table import Table

    pattern = words[0] if words else ""
    shown = {name: preset for name, preset in PRESETS.items() if pattern in name}
    if not shown:
        raise ValueError(f"no preset's name contains {pattern!r}{nearest_name(pattern, PRESETS)}")
    table = Table(show_lines=True)
    for column in ("preset", "what and whence", "difference to its parent"):
        table.add_column(column, no_wrap=column == "preset")
    for name, preset in shown.items():
        changes = differences(preset.config, Config() if preset.parent is None else PRESETS[preset.parent].config)
        parent = preset.parent or "the defaults"
        lines = [f"[bold]{parent}[/bold], but"] + [
            f"{field} {'none' if new is None else new} [dim](was {old})[/dim]" for field, (old, new) in changes.items()
        ]
        table.add_row(name, f"{preset.summary}\n[dim]{preset.source}[/dim]", "\n".join(lines))
    Console().print(table)


def _envs(words: list[str]) -> None:
    """List what can be trained: `phasicrl envs PATTERN`."""
    from phasicrl.envs.make import list_envs

    if words[:1] in (["-h"], ["--help"]):
        print("usage: phasicrl envs [PATTERN]\n\nPATTERN is part of a name, or a pattern with * and ?.")
        return
    listings = list_envs(words[0] if words else "*")
    if not listings:
        raise ValueError(f"no environment matches {words[0]!r}; `phasicrl envs` lists all, and * and ? stand for any letters")
    print("\n".join(map(str, listings)))


def _doctor(words: list[str]) -> None:
    """Say what works on this machine, and the remedy for what does not."""
    from phasicrl.host.doctor import print_diagnosis

    print_diagnosis()


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
    "video": _video,
    "plot": _plot,
    "ladder": _ladder,
    "bench": _bench,
    "presets": _presets,
    "envs": _envs,
    "doctor": _doctor,
}
