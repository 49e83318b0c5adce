"""The command line: every verb, every mistake in one sentence, the paths of the configuration as
flags.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from phasicrl import cli
from phasicrl.algorithm import train
from phasicrl.analysis.compare import Comparison
from phasicrl.analysis.plot import plot_runs
from phasicrl.cli import arguments_for, main, parse_config
from phasicrl.config import ASKED_IMPORTS, AuxConfig, ModelConfig, field_paths
from phasicrl.exchange import export
from phasicrl.exchange.package import Package
from phasicrl.experiments.evaluate import Evaluation, evaluate
from phasicrl.experiments.run_suite import SuiteResult, run_suite
from phasicrl.experiments.video import film
from phasicrl.host import doctor
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
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
    texts = [
        "--title",
        "none",
        "--reference",
        "none",
        "--reference-game",
        "none",
        "--output",
        "none",
    ]
    plotted, _ = read(plot_runs, "none", "b", *texts)
    assert (list(plotted["runs"]), plotted["title"], plotted["reference_game"]) == (
        [Path("none"), Path("b")],
        "none",
        "none",
    )
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
            "unknown environment 'carpole' (did you mean 'CartPole-v1'?)",
        ),
        (
            "train procgen-ppg --env.id bigfsh",
            "unknown environment 'bigfsh' (did you mean 'bigfish'?)",
        ),
        ("train procgen-ppg --env.id procgen:bigfsh", "its games: bigfish"),
        ("train procgen-ppo --env.id gymnasium:CartPole-v1", "use --model.encoder mlp"),
        ("train classic-ppo --env.id starpilot", "are images; use --model.encoder impala"),
        ("train procgen-ppg --env.id gymnasium:CartPole-v1", "not images; use --model.encoder mlp"),
        (
            "train classic-ppo --env.num-levels 3",
            "env.num_levels is 3, which has no effect without a game of Procgen (procgen:NAME)",
        ),
        ("train procgen-ppg --env.start-level 3", "has no meaning with env.num_levels = 0"),
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


def typos(flag: str, source: random.Random) -> list[str]:
    """The flag with one letter left out, doubled, exchanged for another, and two swapped."""
    name = flag.removeprefix("--")
    at = source.randrange(len(name) - 1)
    other = source.choice(string.ascii_lowercase)
    return [
        f"--{name[:at]}{name[at + 1 :]}",
        f"--{name[:at]}{name[at]}{name[at:]}",
        f"--{name[:at]}{other}{name[at + 1 :]}",
        f"--{name[:at]}{name[at + 1]}{name[at]}{name[at + 2 :]}",
    ]


def suggestions(flags: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What is said of each of several unknown flags."""
    with pytest.raises(SystemExit):
        main(["train", "procgen-ppg", *flags])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    _, *parts = re.split(r"Arguments similar to (\S+):", said)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_a_flag_with_a_letter_wrong_is_told_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """U4, for a random place in every flag, and four kinds of mistakes."""
    source = random.Random(20)
    flags = ["--" + path.replace("_", "-") for path in field_paths()]
    wrong = {typo: flag for flag in flags for typo in typos(flag, source) if typo not in flags}
    said = suggestions(list(wrong), capsys)
    assert len(wrong) > 3 * len(flags)
    missed = [
        f"{typo} for {flag}"
        for typo, flag in wrong.items()
        if not re.search(rf"{re.escape(flag)}(?![\w.-])", said.get(typo, ""))
    ]
    assert not missed


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
    assert main(["train", "classic-ppo", *flags]) == 130
    (run,) = tmp_path.iterdir()
    out = capsys.readouterr().out
    assert (
        f"{run} was stopped after 128 steps; `phasicrl resume {run}` goes on from step-000000000128"
        in out
    )


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
    assert main(["train", "classic-ppo", *flags]) == 3
    assert "error: training has diverged" in capsys.readouterr().err
    (run,) = tmp_path.iterdir()
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


def test_environments_are_listed_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "starpilot"]) == 0
    assert "procgen:starpilot" in capsys.readouterr().out


def test_train_evaluate_plot_film_and_resume_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
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
    assert "95 % interval" in capsys.readouterr().out
    both = ["evaluate", str(run), "--episodes", "3", "--levels", "both", "--policy", "greedy"]
    assert main([*both, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["levels"] == "both" and tree["greedy"]["levels"] == "unseen"
    assert tree["train"]["greedy"]["levels"] == "train" and tree["gap"] == {"greedy": 0.0}
    assert main(both) == 0
    assert "greedy: 0.00 more on the levels of the training" in capsys.readouterr().out
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
    assert preset["config"] == json.loads(get_preset("procgen-ppg-kl").to_json())
    assert (preset["name"], preset["parent"]) == ("procgen-ppg-kl", "procgen-ppg")
    assert [env["id"] for env in said("envs", "procgen:starpilot")] == ["procgen:starpilot"]
    *_, checkpoint = said("checkpoint", "ls", str(run.directory))
    assert (checkpoint["env_steps"], checkpoint["problem"]) == (256, "")
    output = ["--output", str(tmp_path / "comparison")]
    found = said("compare", str(run.directory), *output)
    assert found["results"][0]["env_id"] == "gymnasium:CartPole-v1" and found["missed"] == []
    assert len(found["results"][0]["scores"]) == 1 and found["results"][0]["reaches"] is None
    found = said("compare", str(run.directory), *output, "--at-least", "1e6", code=1)
    assert len(found["missed"]) == 1


def test_a_machine_reads_what_an_exported_policy_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Evaluation("greedy", (1.0, 3.0), (5, 7))

    def play(run_dir: Path) -> Evaluation:
        return played

    monkeypatch.setattr(export, "play_exported", play)
    assert main(["play", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == played.to_dict()


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
     ["train", "classic-ppo", "--ppo.clipp", "1"]],
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
        assert process.wait(60) in (1, 141) and process.stderr.read() == b""


def test_a_run_is_repeated_with_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output-dir", str(tmp_path / "first")]
    assert (
        main(["train", "classic-ppo", *SMALL, *QUIET, *output, "--compute.num-threads", "1"]) == 0
    )
    (first,) = (tmp_path / "first").iterdir()
    card = RunDirectory(first).card
    card["plan"] |= {"steps_at_once": 7}  # as no plan made here would be
    RunDirectory(first).write_card(card)
    assert (
        main(
            ["train", "--from", str(first), "--same-plan", "--output-dir", str(tmp_path / "again")]
        )
        == 0
    )
    (again,) = (tmp_path / "again").iterdir()
    assert json.loads((again / "card.json").read_text())["plan"] == card["plan"]
    capsys.readouterr()
    assert "--from RUN --same-plan" in error_of(capsys, "train", "classic-ppo", "--same-plan")
    card["plan"] |= {"num_threads": 10_000}
    RunDirectory(first).write_card(card)
    assert "10000 threads, which this machine has not" in error_of(
        capsys, "train", "--from", str(first), "--same-plan"
    )
    card["plan"] = {}
    (first / "card.json").write_text(json.dumps(card))
    assert "has no plan of this version" in error_of(
        capsys, "train", "--from", str(first), "--same-plan"
    )


def test_an_old_name_of_a_preset_still_works_and_tells_the_new_one() -> None:
    with pytest.warns(
        FutureWarning, match="cartpolenovel-ppo is called cartpole-masked-velocity-ppo now"
    ):
        config = parse_config(["cartpolenovel-ppo"])
    assert config == get_preset("cartpole-masked-velocity-ppo") and config.env.observe == (0, 2)


@pytest.mark.parametrize(
    ("words", "where", "found", "said"),
    [
        (
            ["export", "run"], "phasicrl.exchange.export.export_policy",
            export.Export(Path("run/policy.onnx"), {"inputs": {}}, 1_000, 2e-7),
            {"path": "run/policy.onnx", "about": {"inputs": {}}, "observations": 1_000,
             "difference": 2e-7},
        ),
        (
            ["release", "run"], "phasicrl.exchange.package.release",
            [Package(Path("release/x"), ())], [{"path": "release/x", "evaluations": []}],
        ),
        (
            ["sweep", "results", "lr"], "phasicrl.sweeps.sweep.sweep_results",
            SuiteResult(Comparison("return", "raw", (), (), (), ()), (Path("lr/results.csv"),)),
            {"comparison": {"metric": "return", "units": "raw", "results": [], "overall": [],
                            "missed": [], "files": []}, "files": ["lr/results.csv"]},
        ),
        (
            ["suite", "fig3"], "phasicrl.experiments.run_suite.run_suite",
            SuiteResult(Comparison("return", "raw", (), (), (), ()), ()),
            {"comparison": {"metric": "return", "units": "raw", "results": [], "overall": [],
                            "missed": [], "files": []}, "files": []},
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
