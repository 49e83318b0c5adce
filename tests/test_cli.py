"""The command line: commands, options as paths of the configuration, mistakes in one sentence."""

import io
import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import pytest

from phasicrl import cli, evaluate
from phasicrl.algorithm import train
from phasicrl.cli import all_commands, main, parse_and_call, parse_config
from phasicrl.lab.analysis.plot import plot_runs
from phasicrl.lab.experiments.run_suite import run_suite
from phasicrl.presets import PRESETS, get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.training import evaluation
from phasicrl.training.run import Run
from tests.helpers import TRAIN, corridor, stop_at

SMALL = [
    *["--total-env-steps", "256", "--env.id", "gymnasium:CartPole-v1", "--env.num-envs", "4"],
    *["--ppo.num-steps", "16", "--ppo.num-minibatches", "1", "--log.no-tensorboard"],
]


UNNAMED = partial(corridor)
"""Callable that has no `__name__`, unlike a function."""


def error_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """Return the error of a command, on one line without tyro's box."""
    try:
        assert main(list(words)) == code
    except SystemExit as stop:
        assert stop.code == code
    captured = capsys.readouterr()
    text = " ".join((captured.err + captured.out).replace("│", " ").split())
    assert "Traceback" not in text
    return text


@pytest.mark.long
def test_a_run_with_an_environment_of_ones_own_is_used_from_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = "tests.corridor:corridor"
    words = ("--output-dir", str(tmp_path), *SMALL[:2], *SMALL[4:])
    assert main(["train", "classic-ppo", *words, "--make-env", own]) == 0
    (run,) = map(str, tmp_path.iterdir())
    assert "_tests.corridor.corridor_s" in Path(run).name
    others = ["--output-dir", str(tmp_path / "others"), *words[2:]]
    for start in (["classic-ppo"], ["--from", run]):
        assert main(["train", *start, *others, "--make-env", "tests.test_cli:UNNAMED"]) == 0
    renamed = map(RunDirectory, (tmp_path / "others").iterdir())
    assert [files.env_id for files in renamed] == ["tests.test_cli.UNNAMED"] * 2
    lines = "evaluate {0} --episodes 2|export {0} --format torch|resume {0}|train --from {0}"
    for line in lines.format(run).split("|"):
        command = line.split()
        text = error_of(capsys, *command)
        assert "--make-env" in text and (own in text or command[0] == "train")
        more = ["--output-dir", str(tmp_path / "more")] if command[0] == "train" else []
        assert main([*command, *more, f"--make-env={own}"]) == 0, command
    nested = ["--make-env", "tests:corridor.corridor"]
    assert main([*nested, "evaluate", run, "--episodes", "2"]) == 0, "a command after the option"
    vectors = [*words[2:], "--output-dir", str(tmp_path / "vectors"), "--make-env"]
    assert main(["train", "classic-ppo", *vectors, "tests.envs.simulators:make_counting"]) == 0
    (run,) = map(str, (tmp_path / "vectors").iterdir())
    assert "--make-env" in error_of(capsys, "evaluate", run)
    maker = ["--make-env", "tests.envs.simulators:make_counting"]
    assert main(["evaluate", run, "--episodes", "2", *maker]) == 0
    changed = ["--make-env", "tests.test_cli:UNNAMED", "--total-env-steps", "512"]
    assert main(["resume", str(next(tmp_path.glob("classic*"))), *changed]) == 0
    changed = ["--from", str(next((tmp_path / "others").iterdir())), "--env.id", "lamps", *others]
    assert main(["train", *changed, "--make-env", own]) == 0
    (lamps,) = (tmp_path / "others").glob("*_lamps_*")
    assert main(["train", "--from", str(lamps), "--resume", "auto", "--make-env", own]) == 0
    assert len([*(tmp_path / "others").iterdir()]) == 3, "an id of the user stays"
    for wrong in ("tests.corridor:none", "tests.nowhere:f", "corridor"):
        text = error_of(capsys, "evaluate", run, "--make-env", wrong)
        assert f"make_env is '{wrong}'; expected MODULE:FUNCTION" in text


def test_a_run_with_objects_of_ones_own_is_not_trained_again_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = get_preset("classic-ppo").with_updates({"total_env_steps": 512})
    config = replace(config, output_dir=str(tmp_path))
    run = train(config, schedule=lambda progress: {"ppo.clip": 0.1})
    for file in (run.directory, run.directory / "config.json"):
        assert "expected the same schedule" in error_of(capsys, "train", "--from", str(file))


def test_flags_are_the_paths_of_the_configuration() -> None:
    words = """procgen-ppg --env.id bigfish --env.num-envs 32 --env.distribution hard --aux.every 8
        --ppo.learning-rate 1e-3 --aux.epochs 3 --model.value-path detached --seed 3
        --total-env-steps 1e6 --output-dir x --ppo.clip none --model.hidden-sizes 64 1.28e2
        --ppo.advantage-norm none --env.options a=1 b=x=y"""
    assert parse_config(str(words).split()) == get_preset("procgen-ppg").with_updates({
        "env.id": "bigfish", "env.num_envs": 32, "env.distribution": "hard", "aux.every": 8,
        "ppo.learning_rate": 1e-3, "aux.epochs": 3, "model.value_path": "detached", "seed": 3,
        "total_env_steps": 10**6, "output_dir": "x", "ppo.clip": None, "ppo.advantage_norm": "none",
        "model.hidden_sizes": (64, 128), "env.options": {"a": "1", "b": "x=y"},
    })  # fmt: skip
    same = ("--ppo.num-steps 64", "--ppo.num_steps 64", "--ppo.num-steps=64", "--ppo.num_steps=64")
    for spelling in same:
        assert parse_config(["procgen-ppo", *spelling.split()]).ppo.num_steps == 64


def test_options_of_the_environment_are_added_to_those_of_the_preset() -> None:
    words = ["compat-cleanrl-ppo-atari", "--env.options", "img_height=42"]
    assert parse_config(words).env.options == {"episodic_life": True, "img_height": "42"}


def test_a_run_is_repeated_from_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(get_preset("procgen-ppg-kl").to_json())
    for path in (tmp_path / "config.json", tmp_path):
        assert parse_config(["--from", str(path)]) == get_preset("procgen-ppg-kl")
    assert parse_config([f"--from={tmp_path}", "--seed", "9"]).seed == 9
    agent = parse_config(["--from", "cartpole-ppg"])
    assert (agent.name, agent.log.console) == ("cartpole-ppg", "auto")
    trial = tmp_path / "sweep" / "s1" / "runs" / "run"
    trial.mkdir(parents=True)
    (trial.parents[1] / "trial.json").touch()
    config = agent.with_updates({"output_dir": str(trial.parent), "log.console": "off"})
    (trial / "config.json").write_text(config.to_json())
    assert parse_config(["--from", str(trial)]) == agent


@pytest.mark.parametrize(("words", "message"), [
    ("tain", "did you mean 'train'"),
    ("sweep mak", "did you mean 'make'"),
    ("train PPO", "did you mean 'classic-ppo'"),
    ("train cartpole", "'cartpole-ppo' or 'cartpole-ppg'"),
    ("train classic-ppo --lr 1e-3 --n-envs=8", "'--ppo.learning-rate'"),
    ("train classic-ppo --lr 1e-3 --n-envs=8", "'--env.num-envs'"),
    ("train classic-ppo --ppo clip=0.1", "'--ppo.clip'"),
    ("train classic-ppo --log.tensorboard False", "--log.no-tensorboard"),
    ("train classic-ppo --log.tensorboard=false", "--log.no-tensorboard"),
    ("train classic-ppo --track", "--log.wandb"),
    ("train classic-ppo --num-epochs 4", "'--ppo.policy-epochs' or '--ppo.value-epochs'"),
    ("train classic-ppo classic-ppo", "unknown argument 'classic-ppo'"),
    ("train classic-ppo --seed 3 4", "unknown argument '4'; expected one value of --seed"),
    ("train classic-ppo --reward-norm.discount 0.9", "'--reward-norm.gamma'"),
    ("train classic-ppo --capture-video", "'--evaluation.film'"),
    ("evaluate /tmp --make-env=", "make_env is ''; expected MODULE:FUNCTION"),
    ("resume /tmp --ppo.clip 0.1", "resume has --ppo.clip; expected no option of"),
    ("resume /tmp --seed 9", "resume has --seed; expected no option of"),
    ("train classic-ppo seed=3", "unknown argument 'seed=3'; expected --OPTION VALUE (did you"),
    ("train classic-ppo --model.hidden-sizes [64,32]", "expected 64 32, with"),
    ("sweep make s classic-ppo --seeds 1,2,3", "expected 1 2 3, with"),
    ("resume cartpole-ppg", "agents/cartpole-ppg --init-from /"),
    ("train classic-ppo --output-dir=", "output_dir is empty"),
    ("train --seed 3", "the preset is --seed; expected"),
    ("train --from", "--from is empty; expected the path"),
    ("train classic-ppo --from cartpole-ppg", "--from; expected it as the first argument"),
    ("train --from /nowhere/config.json", "/nowhere/config.json is not a run directory"),
    ("train classic-ppo --env.id carpole", "did you mean 'CartPole-v1'"),
    ("train procgen-ppg --env.id bigfsh", "did you mean 'bigfish'"),
    ("train procgen-ppo --env.id gymnasium:CartPole-v1", "model.encoder is impala"),
    ("train classic-ppo --env.id starpilot", "model.encoder is mlp"),
    ("train classic-ppo --env.distribution esy", "easy"),
    ("train classic-ppo --env.options a", "KEY=VALUE"),
    ("evaluate /tmp", "/tmp is not a run directory"),
    ("plot", "expected at least one run directory"),
    ("presets nothing-like-this", "expected part of a preset's name"),
    ("envs nothing-like-this", "pattern is 'nothing-like-this'; expected part of an id"),
    ("--import no_such_module presets", "no_such_module"),
])  # fmt: skip
def test_a_users_mistake_is_one_sentence(
    words: str, message: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, *words.split())
    assert not list(tmp_path.iterdir())


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_config(["classic-ppo", *SMALL, "--output-dir=~/runs", "--log.console", "off"])
    run = train(config)
    assert run.directory.parent == tmp_path / "runs"
    name = f"~/runs/{run.directory.name}"
    assert RunDirectory(cast(Any, name)).config == parse_config([f"--from={name}"]) == run.config
    assert len(evaluate(name, episodes=1)) == 2
    assert main(["report", "--output=~/page.html", name]) == 0 and (tmp_path / "page.html").exists()


@pytest.mark.parametrize(("error", "code", "has_traceback"), [
    (MemoryError("x"), 2, False), (ValueError("x"), 2, False), (RuntimeError("x"), 1, True),
    (KeyboardInterrupt(), 130, False),
])  # fmt: skip
def test_errors_have_exit_codes_and_only_bugs_a_traceback(
    error: BaseException, code: int, has_traceback: bool,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(words: list[str]) -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", fail)
    assert main(["train"]) == code
    assert ("Traceback" in capsys.readouterr().err) == has_traceback
    if code == 2:
        assert main(["--debug", "train"]) == 2 and "Traceback" in capsys.readouterr().err


def test_a_signal_during_the_imports_of_a_command_asks_to_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setitem(cli.COMMANDS, "train", lambda _: signal.raise_signal(signal.SIGTERM))
    assert main(["train"]) == 0 and codes == [75]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_arguments_of_library_functions_are_read_from_their_signatures() -> None:
    def given(function: Any, words: str) -> dict[str, Any]:
        def stop(*args: Any, **more: Any) -> dict[str, Any]:
            return {"args": args, **more}

        return parse_and_call(wraps(function)(stop), "x", words.split())

    plotted = given(plot_runs, "a b --title T --smooth-steps 1e3")
    assert (plotted["title"], plotted["smooth_steps"]) == ("T", 1000)
    suite = given(run_suite, "fig2 --total-env-steps none --seeds 1 2")
    assert (suite["total_env_steps"], [*suite["seeds"]]) == (None, [1, 2])


def test_help_lists_every_command_and_each_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in all_commands())
    for name in all_commands():
        with pytest.raises(SystemExit) as stop:
            main([name, *["classic-ppo"] * (name == "train"), "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and "usage" in text
        takes_env = {"train", "resume", "evaluate", "video", "export", "play", "release"}
        assert name not in takes_env or "--make-env" in text, name


def test_help_of_train_is_short_has_the_presets_values_and_all_options_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lines(*words: str) -> list[str]:
        with pytest.raises(SystemExit):
            main(["train", *words])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    short, everything = lines("procgen-ppo", "--help"), lines("procgen-ppo", "--help-all")
    assert max(len(lines("--help")), len(short)) <= 100
    assert any(line.startswith("--ppo.policy-epochs 3 Number of") for line in short)
    assert any(line.startswith("--resume never Resume the newest") for line in short)
    for path in get_preset("procgen-ppo").values():
        option = "--" + path.replace("_", "-")
        assert option in " ".join(everything), option


@pytest.mark.parametrize("words", ["--help", "train --help", "train quickstart --help", "presets"])
def test_help_does_not_wait_for_torch_and_what_is_piped_has_no_colors(words: str) -> None:
    code = (
        "import sys; from phasicrl.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'gymnasium', 'numpy') if name in sys.modules])"
    )
    clean = {name: value for name, value in os.environ.items()
             if name not in ("NO_COLOR", "FORCE_COLOR")}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True,
        env=clean | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )  # fmt: skip
    assert done.stdout.endswith("[]\n") and "\x1b" not in done.stdout + done.stderr


def test_presets_are_listed_and_shown_with_source_and_differences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["presets", "procgen-ppg-kl"]) == 0
    text = capsys.readouterr().out
    assert "kl_penalty" in text and "ppo.py:104" in text
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-3]] == list(PRESETS)
    assert max(map(len, lines)) <= 80, "a terminal's width"


def test_train_evaluate_plot_and_resume_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = ["--log.console", "off", "--output-dir", str(tmp_path / "größe")]
    assert main(["train", "classic-ppg", *SMALL, *quiet, "--aux.every", "2"]) == 0
    (run,) = (tmp_path / "größe").iterdir()
    assert f"run directory: {run}" in capsys.readouterr().out
    file, no_file = tmp_path / "new" / "results.json", ["--steps-file", "none"]
    assert main(["evaluate", str(run), "--episodes", "5", "--json", str(file), *no_file]) == 0
    assert "95 % interval" in capsys.readouterr().out and not Path("none").exists()
    found = json.loads(file.read_text())
    assert [row["policy"] for row in found["results"]] == ["greedy", "sampled"]
    assert found["results"][1]["episodes"] == 5 and found["gap"] == {}
    both = ["evaluate", str(run), *["--episodes", "3", "--levels", "both", "--policies", "greedy"]]
    # As if it were trained on some levels of a game of Procgen, which are all the same.
    monkeypatch.setattr(evaluation, "check_levels", lambda *_: None)
    assert main(both) == 0
    assert "greedy: 0.00 higher on training levels" in capsys.readouterr().out
    assert main(["plot", str(run), "--output", str(tmp_path / "curves")]) == 0
    assert all((tmp_path / f"curves.{kind}").stat().st_size > 0 for kind in ("png", "svg", "csv"))
    assert main(["resume", str(run)]) == 0
    assert f"run directory: {run}" in capsys.readouterr().out


@pytest.mark.parametrize("cadence", ["0", "none"])
def test_an_interrupt_says_how_to_resume(
    cadence: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    finish = Run.finish_iteration

    def interrupted(run: Run, *arguments: Any) -> None:
        finish(run, *arguments)
        if run.iteration == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "finish_iteration", interrupted)
    words = ["--output-dir", str(tmp_path), "--checkpoint.every-minutes", cadence]
    words = ["--import", "tests.corridor", "train", "classic-ppo", *SMALL, *words]
    text = error_of(capsys, *words, code=130)
    (run,) = tmp_path.iterdir()
    call = f"`phasicrl resume {run} --import tests.corridor`"
    assert f"{run} was stopped after 128 steps" in text and call in text


def test_a_run_that_diverges_has_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output-dir", str(tmp_path), "--ppo.learning-rate", "1e30", "--log.console", "off"]
    text = error_of(capsys, "train", "classic-ppo", *SMALL, *words, code=3)
    assert "error: training has diverged" in text and " first non-finite tensor: " in text
    (run,) = tmp_path.iterdir()
    assert main(["resume", str(run)]) == 3, "the checkpoint is from before"


def test_a_stdout_of_few_letters_ends_no_run_in_a_folder_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["train", "classic-ppo", *SMALL, "--output-dir", str(tmp_path / "größe")]) == 0
    sys.stdout.flush()
    assert b"gr\\xf6\\xdfe" in written.getvalue()


def test_resume_auto_continues_the_run_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["classic-ppo", *SMALL, "--log.console", "off", "--output-dir", str(tmp_path)]

    def runs() -> dict[int, int]:
        """Return the rows of metrics by seed; there is one run of each."""
        found = [RunDirectory(path) for path in tmp_path.iterdir()]
        assert len({files.config.seed for files in found}) == len(found)
        return {files.config.seed: len(files.metrics()) for files in found}

    begun = train(parse_config(words), callbacks=stop_at(1))
    assert runs() == {begun.config.seed: 1}
    for _ in range(2):  # the second time it is finished
        assert main(["train", *words, "--resume", "auto"]) == 0
        assert runs() == {begun.config.seed: 4}
        assert str(begun.directory) in capsys.readouterr().out
    with pytest.warns(UserWarning, match=r"not the given checkpoint\.keep$"):
        more = ["--resume", "auto", "--checkpoint.keep", "5", "--compute.num-threads", "1"]
        assert main(["train", *words, *more]) == 0
    assert main(["train", *words, "--seed", "17", "--resume", "auto"]) == 0
    assert runs() == {begun.config.seed: 4, 17: 4}


@pytest.mark.long
def test_a_reader_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    """`phasicrl train … | head -1` closes the pipe early."""
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
    """The line of code is left out; warnings of other packages keep theirs."""
    shown: list[str] = []

    def warn(words: list[str]) -> None:
        shown.append(warnings.formatwarning("left out", UserWarning, cli.__file__, 3, "warn()"))

    plain, own = warnings.formatwarning, object()
    monkeypatch.setattr(warnings, "formatwarning", own)
    monkeypatch.setitem(cli.COMMANDS, "train", warn)
    assert main(["train"]) == 0 and shown == ["note: left out\n"]
    other = cli._format_warning("old", DeprecationWarning, "/elsewhere/them.py", 3, "call()")
    assert other == plain("old", DeprecationWarning, "/elsewhere/them.py", 3, "call()")
    assert warnings.formatwarning is own
