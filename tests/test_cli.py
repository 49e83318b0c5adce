"""The command line: every verb, every mistake in one sentence, the paths of the configuration as
flags.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest

from phasicrl import cli
from phasicrl.algorithm import train
from phasicrl.cli import arguments_for, main, parse_config
from phasicrl.config import (
    ASKED_IMPORTS,
    AuxConfig,
    Config,
    ModelConfig,
    ValueNormConfig,
    field_paths,
)
from phasicrl.config_io import SCHEMA, nearest_name
from phasicrl.lab import bench, doctor
from phasicrl.lab.analysis.compare import Comparison
from phasicrl.lab.analysis.plot import plot_runs
from phasicrl.lab.experiments.run_suite import SuiteResult, run_suite
from phasicrl.lab.experiments.video import film
from phasicrl.lab.export import export
from phasicrl.lab.export.package import Package
from phasicrl.presets import PRESETS, get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.session import evaluate as evaluation
from phasicrl.session.evaluate import Evaluation, evaluate
from phasicrl.session.run import Run
from tests.helpers import TRAIN

SMALL = [
    "--total-env-steps",
    "256",
    "--env.id",
    "gymnasium:CartPole-v1",
    "--env.num-envs",
    "4",
    "--ppo.num-steps",
    "16",
]
PLAYED = Evaluation("greedy", (1.0, 3.0), (5, 7))
QUIET = ["--log.console", "off", "--log.no-tensorboard"]


def error_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert main(list(words)) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return captured.err


def test_flags_are_the_paths_of_the_configuration() -> None:
    config = parse_config(
        [
            "procgen-ppg",
            "--env.id",
            "bigfish",
            "--env.num-envs",
            "32",
            "--env.num-levels",
            "200",
            "--env.distribution",
            "hard",
            "--ppo.learning-rate",
            "1e-3",
            "--aux.every",
            "8",
            "--aux.epochs",
            "3",
            "--model.value-path",
            "detached",
            "--seed",
            "3",
            "--total-env-steps",
            "1_000_000",
            "--output-dir",
            "x",
            "--ppo.clip",
            "none",
        ]
    )
    assert (config.env.id, config.env.num_envs, config.env.num_levels, config.env.distribution) == (
        "bigfish",
        32,
        200,
        "hard",
    )
    assert config.aux is not None and (config.aux.every, config.aux.epochs) == (8, 3)
    assert (config.ppo.learning_rate, config.ppo.clip, config.model.value_path) == (
        1e-3,
        None,
        "detached",
    )
    assert (config.seed, config.total_env_steps, config.output_dir) == (3, 1_000_000, "x")


def test_optional_groups_are_switched_off_by_none_and_on_by_naming_a_field() -> None:
    assert parse_config(["procgen-ppg", "--aux", "none"]).aux is None
    assert parse_config(["procgen-ppg", "--reward-norm", "NONE"]).reward_norm is None
    assert (
        parse_config(["procgen-ppg", "--reward_norm=none", "--ppo.num_steps=64"]).reward_norm
        is None
    )
    assert (
        parse_config(["procgen-ppg", "--ppo.advantage-norm", "none"]).ppo.advantage_norm == "none"
    )
    assert (
        parse_config(["cartpole-masked-velocity-ppo", "--model.memory", "none"]).model.memory
        == "none"
    )
    assert parse_config(["pendulum-ppo", "--action.squash", "none"]).action.squash == "none"
    assert parse_config(["pendulum-ppo", "--ppo.clip", "none"]).ppo.clip is None
    assert parse_config(["procgen-ppo", "--aux.every", "4"]).aux == AuxConfig(every=4)
    config = parse_config(["classic-ppo", "--aux.num-minibatches", "8", "--reward-norm.clip", "5"])
    assert (
        config.aux == AuxConfig(num_minibatches=8)
        and config.reward_norm is not None
        and config.reward_norm.clip == 5
    )


@pytest.mark.parametrize("name", ["none", "None", "NONE"])
@pytest.mark.parametrize(
    "words",
    [
        "evaluate {}",
        "evaluate --episodes 5 {}",
        "resume {}",
        "video {}",
        "video --num-envs 1 {}",
        "plot {}",
        "plot --smooth-steps 0 {} other",
    ],
)
def test_none_is_a_name_where_a_path_is_asked_for(
    capsys: pytest.CaptureFixture[str], words: str, name: str
) -> None:
    assert f"error: {name} is not a run directory" in error_of(capsys, *words.format(name).split())


def test_whole_numbers_are_read_as_people_write_them() -> None:
    words = ["--total-env-steps", "1e6", "--env.num-envs", "6_4", "--env.num-levels", "2.0e2"]
    config = parse_config(["procgen-ppg", *words, "--model.hidden-sizes", "64", "1.28e2"])
    assert (config.total_env_steps, config.env.num_envs, config.env.num_levels) == (10**6, 64, 200)
    assert config.model.hidden_sizes == (64, 128)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--total-env-steps", "1.5"], "'1.5' is no whole number; give one, such as 64 or 1e6"),
        (["--total-env-steps", "1e-3"], "'1e-3' is no whole number"),
        (["--env.num-envs", "1e400"], "'1e400' is no whole number"),
        (["--env.num-envs", "many"], "'many' is no whole number"),
        (["--model.hidden-sizes", "64,64"], "write them apart: 64 64"),
        (["--model.hidden-sizes", "64", "x"], "'x' is no whole number"),
    ],
)
def test_what_is_no_whole_number_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        parse_config(["classic-ppo", *words])
    printed = capsys.readouterr()
    text = re.sub(r"[\s│]+", " ", printed.out + printed.err)
    assert said in text and "invalid literal" not in text and "valid parse" not in text


def test_none_is_a_name_for_files_and_texts_and_off_for_what_can_be_off(tmp_path: Path) -> None:
    def read(function: Any, *words: str, **more: Any) -> tuple[dict[str, Any], Any]:
        arguments, own, rest = arguments_for("verb", function, list(words), **more)
        assert rest == []
        return arguments, own

    steps = ["--steps", "none", "--policy", "greedy"]
    words = ("policies", "steps_file")
    arguments, own = read(evaluate, "none", *steps, without=words, own=cli._EvaluateOptions)
    assert (arguments["run_dir"], own.steps, own.policy) == (Path("none"), Path("none"), "greedy")
    assert read(film, "run", "--output", "none")[0]["output"] == Path("none")
    texts = ["--title", "none", "--reference", "none", "--output", "none"]
    plotted, _ = read(plot_runs, "none", "b", *texts)
    assert (list(plotted["runs"]), plotted["title"]) == ([Path("none"), Path("b")], "none")
    assert plotted["reference"] == plotted["output"] == Path("none")
    suite, _ = read(
        run_suite, "fig2", "--tasks", "none", "--total-env-steps", "None", "--output-dir", "none"
    )
    assert (suite["name"], suite["tasks"], suite["total_env_steps"], suite["output_dir"]) == (
        "fig2",
        ["none"],
        None,
        Path("none"),
    )
    flags = [
        "--output-dir",
        "none",
        "--name",
        "None",
        "--ppo.clip",
        "None",
        "--compute.micro-batch",
        "none",
        "--model.head-init",
        "none",
    ]
    config = parse_config(["procgen-ppg", *flags])
    assert (
        config.output_dir,
        config.name,
        config.ppo.clip,
        config.compute.micro_batch,
        config.model.head_init,
    ) == ("none", "None", None, None, None)


def test_a_run_is_repeated_from_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(get_preset("procgen-ppg-kl").to_json())
    for path in (tmp_path / "config.json", tmp_path):
        assert parse_config(["--from", str(path)]) == get_preset("procgen-ppg-kl")
    assert parse_config(["--from", str(tmp_path), "--seed", "9"]).seed == 9
    assert parse_config([f"--from={tmp_path}", "--seed", "9"]).seed == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tain", "unknown command 'tain' (did you mean 'train'?)"),
        ("train procgen-pgp", "unknown preset 'procgen-pgp' (did you mean 'procgen-pp"),
        ("train --seed 3", "the preset comes first"),
        ("train --from", "--from needs the path"),
        ("train --from /nowhere/config.json", "/nowhere/config.json"),
        ("train classic-ppo --aux yes", "--aux takes only `none`"),
        (
            "train classic-ppo --env.id carpole",
            "env.id is 'carpole', an unknown environment (did you mean 'CartPole-v1'?)",
        ),
        (
            "train procgen-ppg --env.id bigfsh",
            "env.id is 'bigfsh', an unknown environment (did you mean 'bigfish'?)",
        ),
        ("train procgen-ppg --env.id procgen:bigfsh", "did you mean 'bigfish'"),
        ("train procgen-ppo --env.id gymnasium:CartPole-v1", "use --model.encoder mlp"),
        ("train classic-ppo --env.id starpilot", "are images; use --model.encoder impala"),
        ("train procgen-ppg --env.id gymnasium:CartPole-v1", "not images; use --model.encoder mlp"),
        (
            "train classic-ppo --env.num-levels 3",
            "env.num_levels is 3, which has no effect without a game of Procgen (procgen:NAME)",
        ),
        ("evaluate /tmp", "/tmp is not a run directory"),
        ("resume /tmp", "/tmp is not a run directory"),
        ("video /tmp", "/tmp is not a run directory"),
        ("plot", "name at least one run directory"),
        ("presets nothing-like-this", "no preset's name contains"),
        ("envs nothing-like-this", "no environment matches"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, message: str, tmp_path: Path
) -> None:
    where = (
        ["--output-dir", str(tmp_path)]
        if words.startswith("train ") and "--from" not in words
        else []
    )
    text = error_of(capsys, *words.split(), *where)
    assert message in text and text.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ppo.learning-rat 3", "--ppo.learning-rate"),
        ("--env.distribution esy", "'easy', 'hard'"),
        ("--env.num-envs 0", "env.num_envs is 0; it must be above zero"),
        ("--total-env-steps 0", "total_env_steps is 0"),
        ("--ppo.num-minibatches 7", "set ppo.num_minibatches to 8 or 4"),
    ],
)
def test_a_wrong_field_or_value_is_refused_with_help(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["train", "procgen-ppg", *words.split()]))  # as the program does
    assert stop.value.code == 2
    captured = capsys.readouterr()
    text = " ".join((captured.err + captured.out).replace("│", " ").split())
    assert message in text and "Traceback" not in text


def neighbors(letter: str) -> list[str]:
    """The letters beside one on a keyboard."""
    rows = [row for row in ("qwertyuiop", "asdfghjkl", "zxcvbnm") if letter in row]
    return [row[at] for row in rows for at in (row.index(letter) - 1, row.index(letter) + 1)
            if 0 <= at < len(row)]  # fmt: skip


def typos(flag: str) -> set[str]:
    """The flag with one letter missing, doubled, swapped with the next, and one of its neighbors on
    the keyboard in its place or before it.
    """
    name, found = flag.removeprefix("--"), set()
    for at, letter in enumerate(name):
        before, after = name[:at], name[at + 1 :]
        found |= {before + after, before + letter + letter + after}
        found |= {before + after[:1] + letter + after[1:]} - {name}
        found |= {
            before + near + rest for near in neighbors(letter) for rest in (after, letter + after)
        }
    return {f"--{word}" for word in found}


@pytest.mark.parametrize("share", [0.02, pytest.param(1, marks=pytest.mark.long)])
def test_a_flag_with_a_letter_wrong_is_told_the_right_one(share: float) -> None:
    """U4: of all such mistakes, or of some. Another flag will do if it is as near."""
    flags = cli._flags()
    wrong = [(typo, flag) for flag in flags for typo in sorted(typos(flag)) if typo not in flags]
    asked = random.Random(20).sample(wrong, int(share * len(wrong)))
    told = [(*pair, re.findall(r"'(.*)'", nearest_name(pair[0], flags))) for pair in asked]
    missed = [each for each in told if each[2] != [each[1]]]
    print(f"{len(asked):,} of {len(wrong):,} flags with a letter wrong: another told to {missed}")
    assert len(asked) > 200 and all(told and typo in typos(told[0]) for typo, _, told in missed)


def test_all_flags_are_known_and_others_are_told_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = cli._flags()
    assert {"--" + path.replace("_", "-") for path in field_paths()} < set(flags)
    assert {"--aux", "--env.no-action-masks", "--seed"} < set(flags)
    for typed in ("--env.io", "--env.io=3", "--env.Io"):
        text = error_of(capsys, "train", "procgen-ppg", typed, "3")
        assert f"unknown: {typed!r} (did you mean '--env.id'?); `phasicrl train" in text
    assert "unknown: '64';" in error_of(capsys, "train", "procgen-ppg", "--seed", "3", "64")
    for typed, meant in (("--resme", "--resume"), ("--scale-bach", "--scale-batch")):
        assert f"(did you mean '{meant}'?)" in error_of(capsys, "train", "classic-ppo", typed, "2")
    said = error_of(capsys, "bench", "classic-ppo", "--ppo.clp", "3")
    assert "`phasicrl bench classic-ppo --help`" in said


def test_memory_that_is_short_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(words: list[str]) -> None:
        raise MemoryError("a gradient step does not fit; try a larger ppo.num_minibatches")

    monkeypatch.setitem(cli.VERBS, "train", full)
    assert cli.main(["train"]) == cli.USER_ERROR
    assert (
        capsys.readouterr().err
        == "error: a gradient step does not fit; try a larger ppo.num_minibatches\n"
    )


def test_debug_shows_where_an_error_arose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "train", "procgen-pgp"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_help_has_the_options_of_train_that_are_no_knobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--help"], ["classic-ppo", "--help"]):
        with pytest.raises(SystemExit):
            main(["train", *words])
        said = capsys.readouterr().out
        for option in ("--resume {never,auto}", "--scale-batch", "--json"):
            assert option in said


def test_the_auxiliary_phase_is_dealt_out_to_the_environments_that_are_given() -> None:
    def minibatches(*words: str) -> int:
        aux = parse_config([*words, "--aux.epochs", "2"]).aux
        assert aux is not None
        return aux.num_minibatches

    assert minibatches("classic-ppo", "--env.num-envs", "64") == 16
    assert minibatches("procgen-ppo", "--env.num-envs", "24") == 8
    assert minibatches("classic-ppo") == 8


def test_a_field_of_a_group_that_goes_is_refused(tmp_path: Path) -> None:
    """As in a base without the group: what is named in vain is not dropped without a word."""
    base = get_preset("classic-ppo").changed({"value_norm": ValueNormConfig()})
    (tmp_path / "base.json").write_text(base.to_json())
    words = ["--from", str(tmp_path / "base.json"), "--ppo.no-baseline",
             "--ppo.estimator", "monte_carlo"]  # fmt: skip
    assert parse_config(words).value_norm is None
    with pytest.raises(ValueError, match=r"value_norm .* has no effect without"):
        parse_config([*words, "--value-norm.decay", "0.9"])
    with pytest.raises(ValueError, match=r"aux is off, so that epochs .*leave --aux none out"):
        parse_config(["procgen-ppg", "--aux", "none", "--aux.epochs", "2"])


def test_of_several_processes_one_says_what_was_scaled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = get_preset("cartpole-ppo")
    first = cli._scaled(config, 2.0)
    assert "batches 2 times as large" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert cli._scaled(config, 2.0) == first and capsys.readouterr().out == ""


def test_a_measurement_makes_the_folder_for_what_it_finds_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(config: Config, **_: Any) -> None:
        assert (tmp_path / "new").is_dir() and (tmp_path / "traces").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", functools.wraps(bench.measure)(measured))
    words = ["--output", str(tmp_path / "new" / "x.json")]
    words += ["--trace", str(tmp_path / "traces" / "y.json")]
    assert main(["bench", "classic-ppo", *words]) == 130


def test_our_own_mistakes_are_not_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(words: list[str]) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setitem(cli.VERBS, "train", broken)
    assert main(["train"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("cadence", ["0", "none"])
def test_an_interrupt_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cadence: str,
) -> None:
    finish = Run.finish_iteration

    def interrupted(run: Run, record: dict[str, float]) -> None:
        finish(run, record)
        if run.iteration == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "finish_iteration", interrupted)
    flags = [
        *SMALL,
        "--log.console",
        "plain",
        "--log.no-tensorboard",
        "--output-dir",
        str(tmp_path),
        "--checkpoint.every-minutes",
        cadence,
    ]
    assert main(["train", "classic-ppo", *flags, "--json"]) == 130
    (run,) = tmp_path.iterdir()
    said = capsys.readouterr()
    assert (
        f"{run} was stopped after 128 steps; `phasicrl resume {run}` goes on from step-000000000128"
        in said.err
    )
    found = json.loads(said.out)
    assert (found["run"], found["outcome"], found["env_steps"]) == (str(run), "stopped", 128)


def test_a_run_that_diverges_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *SMALL,
        "--log.console",
        "off",
        "--log.no-tensorboard",
        "--output-dir",
        str(tmp_path),
        "--ppo.learning-rate",
        "1e30",
    ]
    assert main(["train", "classic-ppo", *flags, "--json"]) == 3
    said = capsys.readouterr()
    assert "error: training has diverged" in said.err
    (run,) = tmp_path.iterdir()
    found = {"run": str(run), "outcome": "diverged", "env_steps": 0, "return_100": None}
    assert json.loads(said.out) == found
    assert main(["resume", str(run)]) == 3, (
        "the checkpoint is from before, and the mistake is still there"
    )


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb} " in text for verb in cli.VERBS)
    assert main([]) == 2


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    try:
        assert main([verb, "--help"]) == 0
    except SystemExit as stop:
        assert stop.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["train", "quickstart", "--help"], ["presets"]]
)
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = (
        "import sys; from phasicrl.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'gymnasium', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n")


def test_help_says_what_the_library_and_the_configuration_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def text_of(*words: str) -> str:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    assert "--fps INT Images a second. (default: 15)" in text_of("video")
    assert "--steps PATH A CSV file that gets every step" in text_of("evaluate")
    preset = text_of("train", "procgen-ppo")
    assert (
        "--model.blocks INT IMPALA: residual blocks in each stack (OPPG: 2). (default: 2)" in preset
    )
    assert (
        "--ppo.policy-epochs INT Passes over a rollout with the policy loss "
        "(E_π; PPO paper, algorithm 1; PPG paper: 1). (default: 3)" in preset
    )
    assert (
        "--ppo.clip FLOAT|none Clip range ε of the probability ratio (PPO paper, eq. 7); "
        "off: the plain surrogate. (default: 0.2)" in preset
    )
    assert (
        "--aux none Switch the group off; naming a field of it switches it on. (default: none)"
        in preset
    )
    assert str(ModelConfig.__doc__) in preset


def test_options_and_words_may_be_written_as_one_likes() -> None:
    spellings = (
        ["--ppo.num-steps", "64"],
        ["--ppo.num_steps", "64"],
        ["--ppo.num-steps=64"],
        ["--ppo.num_steps=64"],
    )
    assert {parse_config(["procgen-ppo", *words]) for words in spellings} == {
        get_preset("procgen-ppo").changed({"ppo.num_steps": 64})
    }
    words = [
        "--env.id",
        "envpool:X-v1",
        "--env.options",
        "a=1",
        "b=x=y",
        "--seed",
        "2",
        "--env.options=c=3",
    ]
    assert dict(parse_config(["classic-ppo", *words]).env.options) == {
        "a": "1",
        "b": "x=y",
        "c": "3",
    }
    assert dict(
        parse_config(["classic-ppo", *words, "--env.options", "none", "d=4"]).env.options
    ) == {"d": "4"}


def test_presets_are_shown_with_their_difference_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["presets", "procgen-ppg-kl"]) == 0
    text = capsys.readouterr().out
    assert "procgen-ppg-kl" in text and "kl_penalty" in text and "ppo.py:104" in text


def test_presets_without_a_name_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    *lines, empty, way = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, "a terminal's width"
    assert [line.split()[0] for line in lines] == list(PRESETS) and not empty
    assert all(PRESETS[line.split()[0]].summary in line for line in lines)
    assert "`phasicrl presets NAME` shows" in way
    assert main(["presets", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(PRESETS)


def test_environments_are_listed_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "starpilot"]) == 0
    assert "procgen:starpilot" in capsys.readouterr().out


def test_train_evaluate_plot_film_and_resume_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        main(
            [
                "train",
                "classic-ppg",
                *SMALL,
                *QUIET,
                "--output-dir",
                str(tmp_path),
                "--aux.every",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    (run,) = tmp_path.iterdir()
    assert f"run directory: {run}" in out and "256" in out
    assert main(["evaluate", str(run), "--episodes", "5", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["mean_return"] == tree["greedy"]["mean_return"] and tree["sampled"]["episodes"] == 5
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    out = capsys.readouterr().out
    assert "95 % interval" in out and "3 episodes on unseen levels or seeds" in " ".join(
        out.split()
    )
    both = ["evaluate", str(run), "--episodes", "3", "--levels", "both", "--policy", "greedy"]
    assert "levels is both, which has no effect" in error_of(capsys, *both)
    # As if it were trained on some levels of a game of Procgen, which are all the same.
    monkeypatch.setattr(evaluation, "refuse_levels", lambda *_: None)
    assert main([*both, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["levels"] == "both" and tree["greedy"]["levels"] == "unseen"
    assert tree["train"]["greedy"]["levels"] == "train" and tree["gap"] == {"greedy": 0.0}
    assert main(both) == 0
    out = capsys.readouterr().out
    assert "greedy: 0.00 more on the levels of the training" in out
    assert "3 episodes on unseen levels, and as many on those of its" in " ".join(out.split())
    assert (
        main(["plot", str(run), "--output", str(tmp_path / "curves"), "--metric", "losses/entropy"])
        == 0
    )
    assert all((tmp_path / f"curves.{kind}").stat().st_size > 0 for kind in ("png", "svg", "csv"))
    assert main(["resume", str(run)]) == 0
    assert f"run directory: {run}" in capsys.readouterr().out


def test_machines_read_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One value, and nothing else, on the standard output."""
    run = train(parse_config(["classic-ppo", *SMALL, *QUIET, "--output-dir", str(tmp_path)]))

    def said(*words: str, code: int = 0) -> Any:
        assert main([*words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    (preset,) = said("presets", "procgen-ppg-kl")
    assert {"schema": SCHEMA} | preset["config"] == json.loads(
        get_preset("procgen-ppg-kl").to_json()
    )
    assert (preset["name"], preset["parent"]) == ("procgen-ppg-kl", "procgen-ppg")
    assert [env["id"] for env in said("envs", "procgen:starpilot")] == ["procgen:starpilot"]
    output = ["--output", str(tmp_path / "comparison")]
    found = said("compare", str(run.directory), *output)
    assert found["results"][0]["env_id"] == "gymnasium:CartPole-v1" and found["missed"] == []
    assert len(found["results"][0]["scores"]) == 1 and found["results"][0]["reaches"] is None
    found = said("compare", str(run.directory), *output, "--at-least", "1e6", code=1)
    assert len(found["missed"]) == 1
    assert said("suite")["fig2"]["small"][0] == "starpilot"


def test_machines_read_what_a_run_came_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The progress goes to the standard error."""
    words = [*SMALL, "--log.console", "plain", "--output-dir", str(tmp_path)]
    assert main(["train", "classic-ppo", *words, "--scale-batch", "2", "--json"]) == 0
    said = capsys.readouterr()
    (run,) = tmp_path.iterdir()
    last = RunDirectory(run).metrics()[-1]["charts/episodic_return_100"]
    found = {"run": str(run), "outcome": "finished", "env_steps": 256, "return_100": last}
    assert json.loads(said.out) == found
    assert "100.0 %" in said.err and "batches 2 times as large" in said.err
    assert main(["resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["train", "classic-ppo", *words, "--ppo.num-minibatches", "7", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_stdout_of_few_letters_ends_no_run_in_a_folder_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    words = [*SMALL, "--log.no-tensorboard", "--output-dir", str(tmp_path / "größe")]
    assert main(["train", "classic-ppo", *words]) == 0
    sys.stdout.flush()
    assert b"gr\\xf6\\xdfe" in written.getvalue()


def test_a_machine_reads_what_an_exported_policy_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(run_dir: Path) -> Evaluation:
        return PLAYED

    monkeypatch.setattr(export, "play_exported", play)
    assert main(["play", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == PLAYED.to_dict()


def test_a_machine_reads_what_the_doctor_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [doctor.Check("Qt", "broken", "no Qt", "install it"), doctor.Check("CPU", "ok", "2")]
    monkeypatch.setattr(doctor, "diagnose", lambda: checks)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "Qt", "status": "broken", "found": "no Qt", "remedy": "install it"},
        {"name": "CPU", "status": "ok", "found": "2", "remedy": ""},
    ]


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_json({"a": (math.inf, math.nan, 1.5, True, None, Path("x"))})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5, True, None, "x"]}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["presets", "cartpole"], ["train", "classic-ppo", "--help"],
     ["train", "classic-ppo", "--ppo.clip", "x"]],
)  # fmt: skip
def test_what_is_piped_has_no_colors(words: list[str]) -> None:
    """Though the terminal that is not asked could show them."""
    clean = {name: value for name, value in os.environ.items()
             if name not in ("NO_COLOR", "FORCE_COLOR")}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "phasicrl", *words], capture_output=True, text=True,
        env=clean | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )  # fmt: skip
    assert len(done.stdout + done.stderr) > 100 and "\x1b" not in done.stdout + done.stderr


def test_resume_auto_goes_on_where_there_is_something_to_go_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["classic-ppo", *SMALL, *QUIET, "--output-dir", str(tmp_path)]

    def runs() -> dict[int, int]:
        """Rows of metrics by seed; there is one run of each."""
        found = [RunDirectory(path) for path in tmp_path.iterdir()]
        assert len({files.config.seed for files in found}) == len(found)
        return {files.config.seed: len(files.metrics()) for files in found}

    def stop(run: Run, record: object) -> Literal["stop"] | None:
        return "stop" if run.iteration == 1 else None

    begun = train(parse_config(words), on_iteration=stop)
    assert runs() == {begun.config.seed: 1}
    for _ in range(2):  # the second time it is done
        assert main(["train", *words, "--resume", "auto"]) == 0
        assert runs() == {begun.config.seed: 4}
        assert str(begun.directory) in capsys.readouterr().out
    assert main(["train", *words, "--seed", "17", "--resume", "auto"]) == 0
    assert runs() == {begun.config.seed: 4, 17: 4}


@pytest.mark.long
def test_a_reader_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    """As in `phasicrl train … | head -1`."""
    words = [*TRAIN, *SMALL, "--log.console", "plain", "--output-dir", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 0, process.stderr.read().decode()
        assert b"Broken" not in process.stderr.read()
    (run,) = tmp_path.iterdir()
    assert len(RunDirectory(run).metrics()) == 4


def test_a_reader_that_goes_away_ends_a_list_without_a_word() -> None:
    words = [sys.executable, "-m", "phasicrl", "presets"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141 and process.stderr.read() == b""


def test_a_warning_of_ours_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the line of code that raises it; warnings of other packages keep theirs."""
    shown: list[str] = []

    def warn(words: list[str]) -> None:
        shown.append(warnings.formatwarning("left out", UserWarning, cli.__file__, 3, "warn()"))

    plain = warnings.formatwarning
    monkeypatch.setitem(cli.VERBS, "train", warn)
    assert cli.main(["train"]) == 0 and shown == ["note: left out\n"]
    other = cli._format_warning("old", DeprecationWarning, "/elsewhere/them.py", 3, "call()")
    assert other == plain("old", DeprecationWarning, "/elsewhere/them.py", 3, "call()")
    assert warnings.formatwarning is plain


@pytest.mark.parametrize(
    ("words", "where", "found", "said"),
    [
        (
            ["export", "run"], "phasicrl.lab.export.export.export_policy",
            export.Export(Path("run/policy.onnx"), {"inputs": {}, "outputs": {}}, 1_000, 2e-7),
            {"path": "run/policy.onnx", "about": {"inputs": {}, "outputs": {}},
             "observations": 1_000, "difference": 2e-7},
        ),
        (
            ["release", "run"], "phasicrl.lab.export.package.release",
            [Package(Path("release/x"), ())], [{"path": "release/x", "evaluations": []}],
        ),
        (
            ["report", "run"], "phasicrl.lab.analysis.report.write_report",
            Path("run/report.html"), ["run/report.html"],
        ),
        (
            ["plot", "run"], "phasicrl.lab.analysis.plot.plot_runs",
            [Path("a.png"), Path("a.csv")], ["a.png", "a.csv"],
        ),
        (
            ["video", "run"], "phasicrl.lab.experiments.video.film",
            (Path("run/a.mp4"), PLAYED), {"path": "run/a.mp4", **PLAYED.to_dict()},
        ),
        (["hub", "pull", "a/x"], "phasicrl.lab.export.hub.pull", Path("x"), ["x"]),
        (
            ["suite", "fig3"], "phasicrl.lab.experiments.run_suite.run_suite",
            SuiteResult(Comparison("return", "raw", (), (), (), ()), ()),
            {"comparison": {"metric": "return", "units": "raw", "results": [], "overall": [],
                            "missed": [], "files": [], "target": None, "notes": []}, "files": []},
        ),
    ],
)  # fmt: skip
def test_a_machine_reads_what_was_made(
    words: list[str], where: str, found: Any, said: Any,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def made(given: Path, *, on_trial: Any = None) -> Any:
        return found

    monkeypatch.setattr(where, made)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == said


def test_modules_that_are_asked_for_are_so_for_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setitem(cli.VERBS, "look", lambda words: seen.append(list(ASKED_IMPORTS)))
    assert cli.main(["--import", "json", "look"]) == cli.main(["look"]) == 0
    assert seen == [["json"], []]
