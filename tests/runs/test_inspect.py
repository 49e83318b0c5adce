"""Looking at checkpoints: `phasicrl checkpoint`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import CheckpointConfig
from phasicrl.runs.inspect import diff_checkpoints, list_checkpoints, verify_run
from tests.helpers import corridor, tiny, tiny_aux


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of four iterations, of which the last three checkpoints are kept."""
    every = CheckpointConfig(every_minutes=None, every_iterations=1, keep=3)
    config = tiny(tmp_path, aux=tiny_aux(every=3), checkpoint=every)
    return train(config, make_env=corridor).directory


def test_a_list_names_each_and_what_is_wrong_with_it(folder: Path) -> None:
    found = list_checkpoints(folder)
    assert [each.env_steps for each in found] == [64, 96, 128]
    assert not any(each.problem for each in found)
    path = folder / "checkpoints" / found[1].name
    files = [file.stat().st_size for file in path.iterdir()]
    assert found[1].num_bytes == sum(files) > 1000
    tensors = path / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert not any(each.problem for each in list_checkpoints(folder)), "only every file shows it"
    _, damaged, _ = list_checkpoints(folder, every_file=True)
    assert damaged.problem == "tensors.safetensors was changed or cut short since it was saved"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("config.json", "config.json"),
        ("card.json", "card.json"),
        ("agent.safetensors", "agent.safetensors is damaged"),
        ("metrics.jsonl", "line 1 of"),
        ("checkpoints/step-000000000096/state.json", "step-000000000096: state.json was changed"),
        ("checkpoints/step-000000000128/manifest.json", "step-000000000128: "),
    ],
)
def test_verifying_finds_a_change_in_any_file(
    folder: Path, file: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_run(folder) == []
    assert main(["checkpoint", "verify", str(folder)]) == 0
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2 if file != "metrics.jsonl" else 0] ^= 0x10
    (folder / file).write_bytes(data)
    (problem,) = verify_run(folder)
    assert said in problem
    assert main(["checkpoint", "verify", str(folder)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("config.json", '"gamma": 0.9,', '"gamma": 0.8,', "ppo.gamma was 0.9 and is 0.8; put it"),
        ("metrics.jsonl", '"iteration": 2,', '"iteration": 7,', "metrics.jsonl is not what it was"),
        ("epochs.jsonl", '"iteration": 2,', '"iteration": 7,', "epochs.jsonl is not what it was"),
    ],
)
def test_verifying_finds_what_a_resumed_run_would_find_changed(
    tmp_path: Path, file: str, before: str, after: str, said: str
) -> None:
    run = train(tiny(tmp_path).changed({"log.epochs": True}), make_env=corridor)
    path, text = run.directory / file, (run.directory / file).read_text()
    assert verify_run(run.directory) == [] and before in text
    path.write_text(text.replace(before, after, 1))
    (problem,) = verify_run(run.directory)
    assert said in problem
    path.write_text(text + text.splitlines()[-1] * (file != "config.json"))
    assert verify_run(run.directory) == [], "rows after the checkpoint, perhaps torn, may follow"


def test_verifying_refuses_a_link_as_a_resumed_run_does(folder: Path, tmp_path: Path) -> None:
    (folder / "videos").symlink_to(tmp_path)
    (problem,) = verify_run(folder)
    assert "videos is a link" in problem


def test_verifying_finds_a_checkpoint_of_another_run(folder: Path, tmp_path: Path) -> None:
    other = train(tiny(tmp_path / "other"), make_env=corridor).directory
    name = "checkpoints/step-000000000128"
    shutil.rmtree(folder / name)
    shutil.copytree(other / name, folder / name)
    (problem,) = verify_run(folder)
    assert problem.startswith("step-000000000128: it is of another run")


def test_a_difference_is_of_what_has_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, found = diff_checkpoints(folder)
    assert (one, other) == ("step-000000000096", "step-000000000128")
    by_name = {each.name: each for each in found}
    assert (by_name["env_steps"].one, by_name["env_steps"].other) == ("96", "128")
    assert by_name["learner/iteration"].other == "4"
    assert any("differs by" in each.other for each in found if "/agent/" in each.name)
    # The phase's last rollout was there before; that of the next phase is new.
    assert "learner/optimizers/policy/param_groups/0/eps" not in by_name
    assert diff_checkpoints(folder, one=one, other=one)[2] == []
    assert main(["checkpoint", "diff", str(folder), "--one", "step-000000000064"]) == 0
    assert "differences between step-000000000064 and step-000000000128" in capsys.readouterr().out
    # The one that is not named is never the one that is.
    assert diff_checkpoints(folder, one=other)[:2] == (other, one)
    assert diff_checkpoints(folder, other=one)[:2] == (other, one)
    with pytest.raises(ValueError, match="has no checkpoint 'x'; it has step-000000000064, "):
        diff_checkpoints(folder, one="x")


def test_the_verb_says_what_it_can_do(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["checkpoint", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"step-{n:012d}" for n in (64, 96, 128)]
    assert all(line.endswith("good") for line in lines)
    assert main(["checkpoint", "list", str(folder)]) == 2
    assert "accepted: ls, verify, diff" in capsys.readouterr().err
