"""Commands of the lab for `phasicrl.cli`."""

import os
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phasicrl import cli
from phasicrl.config_io import check_output_file, write_json

_MAX_ROWS = 20
"""Most trials of which `sweep status` lists all; of more it lists those that run or failed."""


def _video(words: list[str]) -> None:
    """Film the agent of a run, without a screen."""
    from phasicrl.lab.film.video import film

    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # else pygame takes SIGTERM for itself
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else it complains where there is no screen
    path, result = cli.parse_and_call(film, "video", words)
    returns = ", ".join(f"{value:g}" for value in result.returns)
    cli.print_lines([f"{path}: {len(result.returns)} episodes, returns {returns}"])


def _export(words: list[str]) -> None:
    """Write a policy as a file for other tools: `phasicrl export RUN [--format torch]`."""
    from phasicrl.lab.export.export import export_policy

    made = cli.parse_and_call(export_policy, "export", words)
    for kind in ("input", "output"):
        cli.print_lines(f"  {kind} {x}: {text}" for x, text in made.metadata[f"{kind}s"].items())
    on = f"on {made.num_compared:,} observations it differs from the agent"
    cli.print_lines([f"{on} by at most {made.max_relative_difference:.1g}", made.path])


def _play(words: list[str]) -> None:
    """Run episodes with an exported policy: `phasicrl play RUN [--file FILE]`."""
    from phasicrl.lab.export.export import play_exported

    cli.print_evaluations([cli.parse_and_call(play_exported, "play", words)])


def _release(words: list[str]) -> None:
    """Package trained agents: `phasicrl release RUN … [--output DIR]`."""
    from phasicrl.lab.export.package import release

    for made in cli.parse_and_call(release, "release", words):
        returns = ", ".join(f"{each.policy} {each.mean_return:.2f}" for each in made.evaluations)
        cli.print_lines([f"{made.path}: {returns}"])


def _hub(words: list[str]) -> None:
    """Upload packages to the Hugging Face Hub, or download them: `phasicrl hub push|pull …`."""
    cli.dispatch_command(words, {"push": _push, "pull": _pull}, "phasicrl hub")


def _push(words: list[str]) -> None:
    """Upload a package of `phasicrl release`: `phasicrl hub push DIR OWNER/NAME [--dry-run]`."""
    from phasicrl.lab.export.hub import push

    cli.print_lines(cli.parse_and_call(push, "hub push", words))


def _pull(words: list[str]) -> None:
    """Download a package: `phasicrl hub pull OWNER/NAME [--output DIR]`."""
    from phasicrl.lab.export.hub import pull

    cli.print_lines([cli.parse_and_call(pull, "hub pull", words)])


def _plot(words: list[str]) -> None:
    """Draw learning curves: `phasicrl plot RUN … [--reference FILE]`."""
    from phasicrl.lab.analysis.plot import plot_runs

    cli.print_lines(cli.parse_and_call(plot_runs, "plot", words))


def _report(words: list[str]) -> None:
    """Write a page about runs, with a diagnosis: `phasicrl report RUN … [--output FILE]`."""
    from phasicrl.lab.analysis.report import write_report

    cli.print_lines([cli.parse_and_call(write_report, "report", words)])


def _compare(words: list[str]) -> None:
    """Compare runs at equal steps: `phasicrl compare RUN … [--reference FILE] [--at-least X]`."""
    from phasicrl.lab.analysis.compare import compare_runs

    words = [*words, "?"] if words[-1:] == ["--reference"] else words  # for an error with all names
    comparison = cli.parse_and_call(compare_runs, "compare", words)
    _print_comparison(comparison)
    comparison.raise_missed_minimums()


def _print_comparison(comparison: Any) -> None:
    """Print the tables and the files of a comparison."""
    from phasicrl.lab.analysis.compare import make_tables

    for table in make_tables(comparison):
        cli.print_table(*table)
    cli.print_lines([*(f"note: {note}" for note in comparison.notes), *comparison.files])


def _suite(words: list[str]) -> None:
    """Train an experiment of the papers, and draw it: `phasicrl suite fig3 [--jobs 2 …]`."""
    from phasicrl.lab.experiments.run_suite import run_suite
    from phasicrl.lab.experiments.suites import SUITES

    if not words:
        return cli.print_lines(
            f"{name:<16}{suite.description}; small: {', '.join(suite.small_tasks)}"
            for name, suite in SUITES.items()
        )

    def print_trial(trial: Any) -> None:
        task, arm, budget = trial.label_parts
        cli.print_lines([f"{task}, {arm}, {int(budget):,} steps, seed {trial.config.seed}: done"])

    _print_comparison(cli.parse_and_call(partial(run_suite, on_trial=print_trial), "suite", words))


def _run_sweep_command(words: list[str]) -> None:
    """Train many configurations: `phasicrl sweep make|search|run|status DIR`."""
    commands = {"make": _write_sweep, "search": _write_search, "run": _run_sweep, "status": _status}
    cli.dispatch_command(words, commands, "phasicrl sweep")


def _write_sweep(words: list[str]) -> None:
    """Write a grid of presets, values and seeds, or add to one; nothing is trained yet."""
    from phasicrl.lab.sweeps.sweep import add_trials

    added = cli.parse_and_call(add_trials, "sweep make", words)
    print(f"{added} trials added; `phasicrl sweep run` trains them")


def _write_search(words: list[str]) -> None:
    """Write a search for settings with Optuna, or add trials to one; nothing is trained yet."""
    from phasicrl.lab.sweeps.search import write_search

    added = cli.parse_and_call(write_search, "sweep search", words)
    print(f"{added} trials added; `phasicrl sweep run` trains them")


def _run_sweep(words: list[str]) -> None:
    """Train or resume the trials of a sweep that are not finished."""
    from phasicrl.lab.sweeps.sweep import run_sweep

    run = partial(run_sweep, on_trial=lambda id, state: cli.print_lines([f"{id}: {state}"]))
    cli.parse_and_call(run, "sweep run", words)


def _status(words: list[str]) -> None:
    """Show state, steps and last return of trials, and the best one of a search."""
    from phasicrl.lab.sweeps.sweep import get_trial_statuses

    statuses = cli.parse_and_call(get_trial_statuses, "sweep status", words)
    has_tasks = len({each.task for each in statuses}) > 1
    title = statuses[0].shared_settings_text + ("" if has_tasks else f" on {statuses[0].task}")
    rows = [
        (each.id, each.arm, *[each.task] * has_tasks, each.state, f"{each.env_steps:,}",
         "–" if each.return_100 is None else f"{each.return_100:.4g}")
        for each in statuses
        if len(statuses) <= _MAX_ROWS or each.state in ("running", "stopped", "diverged", "fail")
    ]  # fmt: skip
    columns = ("trial", "settings", *["environment"] * has_tasks, "state", "steps", "return")
    cli.print_table(title, columns, rows)
    counts = Counter(each.state for each in statuses)
    cli.print_lines([", ".join(f"{number} {state}" for state, number in counts.items())])
    scored = [status for status in statuses if status.state == "complete"]
    if best := max(scored, key=lambda status: status.score or 0.0, default=None):
        folder = shlex.quote(next(word for word in words if word != "--"))
        command = f"phasicrl train --from {folder}/{best.id}/trial.json --seed 101"
        way = f"`{command}{best.import_flags}` trains it"
        cli.print_lines([f"best: {best.id}, score {best.score:.4g}; {way}"])


@dataclass(frozen=True)
class _BenchOptions:
    """Options of `bench` besides those of a run."""

    seconds: float = 30.0
    """Seconds of the measurement of the loop."""
    output: Path = Path("bench.json")
    """JSON file for all numbers."""
    trace: Path | None = None
    """File for a trace of one phase, for `chrome://tracing`."""


def _bench(words: list[str]) -> None:
    """Measure how fast this machine trains: `phasicrl bench PRESET [OPTIONS]`."""
    options, config = cli.parse_config_and_options(words, "bench", _BenchOptions)
    from phasicrl.lab.bench import measure_speed, print_report

    check_output_file(options.output)
    report = measure_speed(config, seconds=options.seconds, trace=options.trace)
    print_report(report)
    write_json(options.output, report.to_dict())
    print(f"everything: {options.output}")


def _doctor(words: list[str]) -> None:
    """Check what works on this machine, and name the remedy for what does not."""
    from phasicrl.lab.doctor import check_machine, make_check_rows

    rows = make_check_rows(cli.parse_and_call(check_machine, "doctor", words))
    cli.print_table("phasicrl doctor", ("what", "status", "found", "remedy"), rows)


COMMANDS: dict[str, cli.Command] = {
    "video": _video,
    "export": _export,
    "play": _play,
    "release": _release,
    "hub": _hub,
    "plot": _plot,
    "compare": _compare,
    "report": _report,
    "suite": _suite,
    "sweep": _run_sweep_command,
    "bench": _bench,
    "doctor": _doctor,
}
