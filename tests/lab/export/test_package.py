"""Packages of trained agents as run directories, their checks, and the hub's client."""

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from phasicrl.algorithm import resume, train
from phasicrl.config import Config, EnvConfig, EvaluationConfig, LogConfig
from phasicrl.lab.export import package as package_module
from phasicrl.lab.export.export import play_exported
from phasicrl.lab.export.hub import pull, push
from phasicrl.lab.export.package import (
    EVENTS_FILE,
    HASHES_FILE,
    PACKAGE_FILES,
    check_package_hashes,
    release,
)
from phasicrl.runs.checkpoint import hash_file
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.acting import load
from phasicrl.training.evaluate import Evaluation, evaluate
from tests.helpers import assert_same, corridor, rows_of, stop_at, tiny
from tests.lab.analysis.runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return train(tiny(tmp_path / "runs"), make_env=corridor).directory


@pytest.fixture
def package(run: Path, tmp_path: Path) -> Path:
    (made,) = release([run], output=tmp_path / "out", episodes=4, make_env=corridor)
    return made.path


@pytest.mark.long
def test_a_package_is_a_run_directory_without_local_folders(run: Path, tmp_path: Path) -> None:
    (made,) = release([run], output=f"{tmp_path}/out", episodes=4, onnx=True, make_env=corridor)
    assert made.path == tmp_path / "out" / "tiny-corridor-s3"
    files = {*PACKAGE_FILES, HASHES_FILE} - {EVENTS_FILE}  # which the run did not write
    assert {entry.name for entry in made.path.iterdir()} == files
    assert RunDirectory(made.path).metrics() == RunDirectory(run).metrics()
    assert RunDirectory(made.path).config.log.console == "auto", "also of a run of a sweep"
    wanted = evaluate(run, episodes=4, make_env=corridor)
    assert list(made.evaluations) == evaluate(made.path, episodes=4, make_env=corridor) == wanted
    assert play_exported(made.path, episodes=4, make_env=corridor) == wanted[0]
    values = [load(path, make_env=corridor).value([1.0, 0]) for path in (run, made.path)]
    assert values[0] == values[1]
    written = json.loads((made.path / "evaluation.json").read_text())["results"]
    assert [tuple(each["returns"]) for each in written] == [each.returns for each in wanted]
    config = tiny(tmp_path / "runs", init_from=str(made.path))
    assert train(config, make_env=corridor).env_steps == 128
    for name in files:
        if name != "policy.onnx":
            assert str(tmp_path).encode() not in (made.path / name).read_bytes(), name
    text = (made.path / "README.md").read_text()
    head = text.split("---")[1].strip().splitlines()
    index = json.loads(head[-1].removeprefix("model-index: "))
    greedy = made.evaluations[0]
    assert index[0]["results"][0]["metrics"][0]["value"].startswith(f"{greedy.mean_return:.2f} +/-")
    assert "128 environment steps, seed 3" in text
    assert f"evaluate . --make-env {corridor.__module__}:corridor\n" in text


def test_the_events_of_all_processes_of_a_run_are_packed_in_one_file(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny(tmp_path / "runs", log=LogConfig(console="off"))

    run = train(config, make_env=corridor, callbacks=stop_at(2)).directory
    resume(run, make_env=corridor)
    assert len(list(run.glob("events.out.tfevents.*"))) == 2
    (made,) = release([run], output=tmp_path / "out", episodes=4, make_env=corridor)
    assert EVENTS_FILE in check_package_hashes(made.path)
    found = events.EventAccumulator(str(made.path)).Reload().Scalars("losses/entropy")
    rows = rows_of(RunDirectory(run))
    assert [event.step for event in found] == [row["env_steps"] for row in rows] and len(rows) == 4
    wanted = [row["losses/entropy"] for row in rows]
    assert [event.value for event in found] == pytest.approx(wanted, rel=1e-6)


def test_the_best_weights_are_packed_with_the_step_they_are_of(tmp_path: Path) -> None:
    config = tiny(tmp_path / "runs", evaluation=EvaluationConfig(every_iterations=1, episodes=4))
    run = train(config, make_env=corridor).directory
    files = RunDirectory(run)
    at = {row["env_steps"]: row["evaluation/return"] for row in rows_of(files)}
    assert at[files.weights_env_steps("best")] == max(at.values())
    (made,) = release([run], output=tmp_path, weights="best", episodes=1, make_env=corridor)
    with pytest.raises(ValueError, match="best"):
        (run / "best.safetensors").rename(tmp_path / "best")
        release([run], output=tmp_path / "new", weights="best", episodes=1, make_env=corridor)
    (tmp_path / "best").rename(run / "best.safetensors")
    packed = RunDirectory(made.path)
    assert packed.card["env_steps"] == files.weights_env_steps("best")
    assert_same(packed.load_weights(), files.load_weights("best"))


def test_the_best_run_of_each_environment_and_difficulty(tmp_path: Path) -> None:
    """An environment is one however its id is spelled."""
    easy, hard = EnvConfig(id="procgen:maze"), EnvConfig(id="procgen:maze", distribution="hard")
    pole, same = EnvConfig(id="CartPole-v1"), EnvConfig(id="envpool:CartPole-v1")
    returns = enumerate([(easy, 20.0), (hard, 9.0), (hard, 8.0), (pole, 1.0), (same, 3.0)])
    runs = [make_run(tmp_path / str(i), [(100, value)], env=env) for i, (env, value) in returns]
    for run in runs[3:]:
        (run / "card.json").write_text('{"environment": "envpool:CartPole-v1"}')
    with pytest.warns(match="no iteration was finished"):
        found = package_module._select_best_per_task([*runs, make_run(tmp_path / "killed", [])])
    assert found == [runs[0], runs[1], runs[4]]


def test_a_page_without_a_commit_has_unknown(run: Path) -> None:
    """Code installed from a wheel has `"commit": null` in its card."""
    files = RunDirectory(run)
    format_model_card = package_module.format_model_card
    found = [Evaluation("greedy", (1.0, 3.0), (5, 7))]
    for card in ({"commit": None}, {}):
        assert "seed 3, commit unknown." in format_model_card(files.config, card, found)
    assert "seed 3, commit abc." in format_model_card(files.config, {"commit": "abc"}, found)
    env = EnvConfig(id="mine:<img src=x>[a](b)_c_-v0")
    text = format_model_card(replace(files.config, env=env), {}, found).partition("\n---\n")[2]
    assert r"on &lt;img src=x&gt;\[a\](b)\_c\_-v0" in text and "<img" not in text


@pytest.mark.parametrize(("damage", "said"), [
    (lambda path: (path / "config.json").write_text("{}"), "was changed; expected"),
    (lambda path: (path / "run.py").write_text("1"), "has or lacks run.py"),
    (lambda path: (path / "card.json").unlink(), "has or lacks card.json"),
    (lambda path: (path / HASHES_FILE).unlink(), "expected a package"),
    (lambda path: (path / HASHES_FILE).write_text("a b c\n"), "is damaged; expected hashes"),
    (lambda path: with_listed(path, "../evil.json"), "is damaged; expected hashes"),
    (lambda path: link(path), "was changed; expected"),
])  # fmt: skip
def test_a_changed_package_is_refused(package: Path, damage: Any, said: str) -> None:
    check_package_hashes(package)
    damage(package)
    with pytest.raises(ValueError, match=said):
        check_package_hashes(package)


def with_listed(path: Path, name: str) -> None:
    (path / name).write_text("1")
    text = (path / HASHES_FILE).read_text()
    (path / HASHES_FILE).write_text(f"{text}{hash_file(path / name)}  {name}\n")


def link(path: Path) -> None:
    kept = path.parent / "kept.json"
    shutil.move(path / "config.json", kept)
    (path / "config.json").symlink_to(kept)


def test_mistakes_are_refused(run: Path, package: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder without it"):
        release([run], output=package.parent, make_env=corridor)
    with pytest.raises(ValueError, match="at least one run"):
        release([])


class Hub:
    """Stand-in of the client, with a folder in place of the hub."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, []

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> None:
        self.made.append((repository, private))
        (self.folder / repository).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(
        self, *, repo_id: str, folder_path: str, allow_patterns: list[str],
        delete_patterns: list[str], commit_message: str,
    ) -> None:  # fmt: skip
        for name in delete_patterns:
            (self.folder / repo_id / name).unlink(missing_ok=True)
        for name in allow_patterns:
            shutil.copy(Path(folder_path) / name, self.folder / repo_id / name)

    def snapshot_download(
        self, repository: str, *, revision: str | None, local_dir: str, allow_patterns: list[str]
    ) -> str:
        assert revision is None
        (Path(local_dir) / ".cache").mkdir()
        for file in (self.folder / repository).iterdir():
            if file.name in allow_patterns:
                shutil.copy(file, local_dir)
        return local_dir


def test_a_pushed_package_is_pulled_and_checked(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path / "hub")
    for name in ("create_repo", "upload_folder", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    monkeypatch.delattr(huggingface_hub, "utils", raising=False)  # as in a process just started
    with pytest.raises(ValueError, match="me/my/agent"):
        push(package, "me/my/agent", dry_run=True)
    names = push(package, "me/agent", dry_run=True)
    assert set(names) == {*PACKAGE_FILES, HASHES_FILE} - {"policy.onnx", EVENTS_FILE}
    assert not hub.made
    assert push(package, "me/agent", private=True) == names and hub.made == [("me/agent", True)]
    (tmp_path / "hub/me/agent/evil.py").write_text("1")  # is not fetched
    (tmp_path / "hub/me/agent/policy.onnx").write_text("1")  # of a package before
    push(package, "me/agent")
    got = pull("me/agent", output=tmp_path / "got")
    assert sorted(entry.name for entry in got.iterdir()) == sorted(names)
    one, other = (evaluate(each, episodes=2, make_env=corridor) for each in (got, package))
    assert one == other
    with pytest.raises(ValueError, match="which exists; expected a new folder"):
        pull("me/agent", output=got)
    (tmp_path / "hub/me/empty").mkdir()
    with pytest.raises(ValueError, match=r"me/empty: .*expected a package of"):
        pull("me/empty", output=tmp_path / "empty")
    (tmp_path / "hub/me/agent/config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"me/agent: .*expected the SHA-256"):
        pull("me/agent", output=tmp_path / "other")
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".pull-*"))
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda *_, **__: 1 / 0)
    with pytest.raises(OSError, match="me/agent: division by zero"):  # an error of the client
        push(package, "me/agent")


def test_a_package_that_is_cut_off_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(package_module, "evaluate", cut)
    with pytest.raises(KeyboardInterrupt):
        release([run], output=tmp_path / "release", make_env=corridor)
    assert not list((tmp_path / "release").iterdir())
    with pytest.raises(ValueError, match="twice; expected one run of a name"):
        release([run, run], output=tmp_path / "release", make_env=corridor)


def test_the_calls_are_those_of_the_client_that_is_installed() -> None:
    """The stand-in above has the signatures of the real client."""
    for name in ("create_repo", "upload_folder", "snapshot_download"):
        ours, real = (inspect.signature(getattr(of, name)) for of in (Hub, huggingface_hub))
        assert ours.parameters.keys() - {"self", "repository"} <= real.parameters.keys(), name


def test_the_commands_of_a_page_name_what_they_need(run: Path) -> None:
    config = RunDirectory(run).config

    def make_page(config: Config, **own: str) -> str:
        found = [Evaluation("greedy", (1.0, 3.0), (5, 7))]
        return package_module.format_model_card(config, {"own": own}, found)

    text = make_page(replace(config, imports=("mine",)), schedule="mine:s")
    assert "evaluate . --import mine\n" in text and "--from config.json --import mine\n" in text
    text = make_page(config, make_env="mine:f", make_head="mine:h")
    assert "phasicrl.evaluate('.', make_env=…, make_head=…)" in text and "mine:f, mine:h" in text
    page = make_page(config, make_env="__main__:f")
    assert "phasicrl train" not in text and "phasicrl train" not in page
