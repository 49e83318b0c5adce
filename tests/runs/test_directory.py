"""A run's files through their one reader.

What is there, what is not yet, and what was not made by a run.
"""

import json
import math
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phasicrl import resume, train
from phasicrl.config import AuxConfig, CheckpointConfig, Config, LogConfig
from phasicrl.config_io import atomic_write, escape_control_chars, read_instance
from phasicrl.lab.analysis.report import write_report
from phasicrl.runs.directory import RunDirectory
from phasicrl.system.machine import find_commit
from phasicrl.training.run import Run
from tests.corridor import Corridor
from tests.helpers import assert_same, corridor, tiny, tiny_aux


def test_everything_that_a_run_wrote_is_read_back(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    files = RunDirectory(run.directory)
    assert files.config == files.load_config(make_env=corridor) == run.config
    card, own = files.card, {"make_env": "tests.corridor:corridor"}
    assert (card["seed"], card["env_steps"], card["own"]) == (3, 128, own)
    assert card["versions"]["torch"] == torch.__version__ and card["commit"] == find_commit()
    assert [row["env_steps"] for row in files.metrics()] == [32, 64, 96, 128]
    assert [path.name for path in files.checkpoints] == ["step-000000000128-end"]
    assert_same(files.load_weights(), run.agent.state_dict())
    tied = torch.ones(2)
    files.save_weights({"one": tied, "other": tied}, env_steps=1)
    assert_same(files.load_weights(), {"one": tied, "other": tied})
    assert [path.name for path in run.directory.glob(".*")] == [".lock"], "something is left over"


def _make(config: Config) -> RunDirectory:
    files = RunDirectory.make(config)
    files.write_config(config)
    return files


def test_runs_of_a_configuration_are_found_whatever_machine_made_them(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="a[b]*")
    assert RunDirectory.find_matching_runs(config) == []
    first, second, old = (_make(config) for _ in range(3))
    text = (old.path / "config.json").read_text()
    (old.path / "config.json").write_text(text.replace('"schema": 2', '"schema": 1'))
    _make(replace(config, seed=4))
    _make(replace(config, total_env_steps=256))
    _make(config.with_updates({"ppo.gamma": 0.5}))
    (tmp_path / "a[b]*_corridor_s3_empty").mkdir()
    asked = replace(config, log=LogConfig(console="plain", tensorboard=False))
    with pytest.warns(UserWarning, match="is skipped: schema is 1"):
        found = RunDirectory.find_matching_runs(asked)
    assert sorted(run.path for run in found) == sorted((first.path, second.path))


def test_each_function_makes_another_experiment(tmp_path: Path) -> None:
    """A preset's id would be that of another environment; an id of the user stays."""
    config = tiny(tmp_path).with_updates({"env.id": Config().env.id})
    makers = (corridor, partial(Corridor, 3), corridor)
    runs = [train(config, make_env=each, resume="auto") for each in makers]
    ids = [RunDirectory(run.directory).env_id for run in runs]
    assert ids == ["tests.corridor.corridor", "tests.corridor.Corridor", "tests.corridor.corridor"]
    assert runs[0].directory == runs[2].directory and len([*tmp_path.iterdir()]) == 2
    named = train(config.with_updates({"env.id": "mine"}), make_env=corridor)
    assert RunDirectory(named.directory).env_id == "mine"
    for names_file in (False, True):
        with pytest.raises(OSError) as caught, atomic_write(tmp_path / "x.json") as temporary:
            raise OSError(30, "Read-only file system", *[str(temporary)] * names_file)
        assert caught.value.filename == str(tmp_path / "x.json")


def test_a_folder_without_a_run_is_refused_by_every_question(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    for ask in (lambda: files.config, files.load_config, files.metrics, files.load_weights):
        with pytest.raises(ValueError, match=r"is not a run directory"):
            ask()
    made = _make(tiny(tmp_path))
    with pytest.raises(ValueError, match="has no data; expected"):
        made.metrics()
    with pytest.raises(ValueError, match=f"such as {made.path}, or for plots"):
        files.metrics()
    assert files.card == {} and files.checkpoints == []


@pytest.mark.parametrize(("what", "argument"), [
    ("environment", "make_env"), ("encoder", "make_encoder"), ("head", "make_head"),
    ("mask", "mask_actions"),
])  # fmt: skip
def test_objects_of_ones_own_are_asked_for(tmp_path: Path, what: str, argument: str) -> None:
    files = _make(tiny(tmp_path))
    files.write_card({"own": {argument: "mine:make"}})
    with pytest.raises(ValueError, match=rf"with {argument}=mine:make; .* {what}\. .*{argument}=…"):
        files.load_config(**{argument: None})
    assert files.load_config(**{argument: len}) == files.load_config() == tiny(tmp_path)


def test_an_entry_of_the_card_that_has_another_type_is_named(tmp_path: Path) -> None:
    files = _make(tiny(tmp_path))
    for name in ("own", "spaces", "resumed", "run", "env_steps", "command", "machine", "versions"):
        files.write_card({name: 0.5})
        with pytest.raises(ValueError, match=rf"card\.json is damaged: {name} is 0.5"):
            files.load_config()


def test_a_row_without_its_place_or_with_other_than_numbers_is_damaged(tmp_path: Path) -> None:
    for rest in ('"phase": 1', '"iteration": "3"', '"iteration": 3, "a": 1' + "0" * 400):
        files = _with_rows(tmp_path, 2)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"env_steps": 24, {rest}}}\n')
        assert [row["iteration"] for row in files.metrics()] == [1, 2]
    largest = json.dumps({"env_steps": 24, "iteration": 3, "own/best": sys.float_info.max})
    with (_with_rows(tmp_path, 2).path / "metrics.jsonl").open("a") as file:
        file.write(f"{largest}\n")
    assert files.metrics()[-1]["own/best"] == sys.float_info.max


def test_a_configuration_that_cannot_be_read_names_its_file(tmp_path: Path) -> None:
    files = _make(tiny(tmp_path))
    path = files.path / "config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"sed": 1}))
    for ask in (lambda: files.config, lambda: read_instance(Config, path)):
        with pytest.raises(ValueError, match=rf"{path}: unknown field sed .did you mean 'seed'"):
            ask()
    mine = "gymnasium:nobodys_module:X-v0"
    for changes in ({"env": {"id": mine}}, {"evaluation": {"env_ids": [mine]}}):
        path.write_text(json.dumps(tree | changes))
        assert mine in (files.config.env.id, *files.config.evaluation.env_ids)
        with pytest.raises(ValueError, match=rf"{path} imports the module nobodys_module"):
            files.load_config()


def _with_rows(folder: Path, count: int) -> RunDirectory:
    (folder / "config.json").write_text(Config().to_json())
    row = '{{"env_steps": {}, "iteration": {}, "phase": 1, "a": 1, "b": null, "c": 0.5}}\n'
    lines = [row.format(8 * n, n) for n in range(1, count + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return RunDirectory(folder)


def test_rows_hold_what_is_asked_for_and_where_they_belong(tmp_path: Path) -> None:
    files = _with_rows(tmp_path, 3)
    rows = files.metrics("b", "unknown")
    assert [row.keys() for row in rows] == [{"env_steps", "iteration", "phase", "b"}] * 3
    assert all(math.isnan(row["b"]) for row in rows)
    assert [row["env_steps"] for row in rows] == [8, 16, 24]
    assert files.metrics()[0].keys() == {"env_steps", "iteration", "phase", "a", "b", "c"}


@pytest.mark.parametrize("count", [1, 5, 2000])
def test_the_last_rows_are_the_last_of_all(tmp_path: Path, count: int) -> None:
    files = _with_rows(tmp_path, count)
    every = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert files.last_rows(3) == every[-3:]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 1')  # torn
    assert files.last_rows(3) == every[-2:]
    long = {f"own/a_metric_with_a_name_{number}": number / 7 for number in range(500)}
    rows = [{"env_steps": step, "iteration": step} | long for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert files.last_rows(1) == rows[-1:] and files.last_rows(3) == rows[-3:]
    (tmp_path / "metrics.jsonl").unlink()
    assert files.last_rows(3) == []


@pytest.mark.parametrize(
    "link", ["metrics.jsonl", "checkpoints", "checkpoints/step-000000000128-end"]
)
def test_links_among_the_files_of_a_run_are_refused(tmp_path: Path, link: str) -> None:
    folder = train(tiny(tmp_path), make_env=corridor).directory
    outside = tmp_path / "outside"
    (folder / link).rename(outside)
    (folder / link).symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in (outside, *outside.rglob("*"))}
    with pytest.raises(ValueError, match=f"{link} is a link"):
        resume(folder, make_env=corridor)
    assert before == {path: path.stat().st_mtime_ns for path in (outside, *outside.rglob("*"))}
    whole = tmp_path / "whole"
    (folder / link).unlink()
    outside.rename(folder / link)
    whole.symlink_to(folder)
    resume(whole, make_env=corridor)  # a name for all of it is the user's own


def test_a_run_stays_in_its_directory_when_the_process_leaves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave: Any = lambda run, record: os.chdir("/")  # noqa: E731
    run = train(tiny(Path("runs")), make_env=corridor, callbacks=leave)
    assert run.directory.parent == tmp_path / "runs" and RunDirectory(run.directory).checkpoints


@pytest.mark.parametrize("aux", [None, tiny_aux(epochs=3)])
@pytest.mark.parametrize("way", ["removed", "moved", "replaced"])
def test_a_run_whose_directory_is_gone_ends_with_an_error_that_names_it(
    tmp_path: Path, way: str, aux: AuxConfig | None
) -> None:
    def take(run: Run, _: object) -> None:
        assert run.iteration == 1, "it goes on"
        if way == "removed":
            shutil.rmtree(run.directory)
        else:
            run.directory.rename(tmp_path / "elsewhere")
        if way == "replaced":  # by the empty folder that something was mounted at
            run.directory.mkdir()

    config = tiny(tmp_path / "runs", aux=aux, checkpoint=CheckpointConfig(every_minutes=0.0))
    message = r"tiny_corridor_s3.* was removed, moved or unmounted"
    with pytest.raises(ValueError, match=message) as error:
        train(config, make_env=corridor, callbacks=take)
    assert str(vars(error.value)["run_directory"]) in str(error.value)
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    if way != "removed":
        assert RunDirectory(tmp_path / "elsewhere").checkpoints[-1].name == "step-000000000000"


def test_what_a_terminal_would_obey_is_shown(tmp_path: Path) -> None:
    assert escape_control_chars("a\x1b[31mb\x07\u202e\nc\té") == "a\\x1b[31mb\\x07\\u202e\nc\té"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "report.html", "videos/film.mp4", "checkpoints/step-1/manifest.json"]
)
def test_a_pipe_among_the_files_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    """Whoever opens one waits for another program."""
    files = RunDirectory(train(tiny(tmp_path), make_env=corridor).directory)
    (files.path / name).parent.mkdir(exist_ok=True, parents=True)
    (files.path / name).unlink(missing_ok=True)
    os.mkfifo(files.path / name)
    for use in (lambda: resume(files.path, make_env=corridor), lambda: write_report([files.path])):
        with pytest.raises(ValueError, match=f"{name} is (a special|not a regular) file"):
            use()
