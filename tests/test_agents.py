"""The agents that the repository gives away: whole, of presets, on film, and as good as said."""

from pathlib import Path

import pytest

from phasicrl.config_io import read_json
from phasicrl.lab.export.export import export_policy, play_exported
from phasicrl.lab.export.package import EVALUATION_FILE, check_package_hashes
from phasicrl.presets import PRESETS, get_preset
from phasicrl.runs.directory import AGENTS_FOLDER, RunDirectory
from phasicrl.training.acting import load
from phasicrl.training.evaluate import evaluate
from tests.helpers import skip_without_envpool

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(AGENTS_FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_package_is_whole_and_of_a_preset_and_on_film(path: Path) -> None:
    assert "agent.safetensors" in check_package_hashes(path)
    config = RunDirectory(path).config
    assert config.name in PRESETS and config.seed >= 101
    assert config.total_env_steps == get_preset(config.name).total_env_steps
    assert (ROOT / "docs" / "films" / f"{config.name}.mp4").is_file()


def test_an_agent_plays_as_its_evaluation_says() -> None:
    """The first of the episodes in the file, played again: of CartPole all are 500."""
    skip_without_envpool()
    said = read_json(AGENTS_FOLDER / "cartpole-ppg" / EVALUATION_FILE)["results"][0]
    assert said["policy"] == "greedy" and set(said["returns"]) == {500.0}
    (greedy,) = evaluate("cartpole-ppg", episodes=3, policies=("greedy",), seed=1)
    assert greedy.returns == (500.0, 500.0, 500.0)
    assert [load("cartpole-ppg").act([0.0, 0, lean, 0]) for lean in (-0.1, 0.1)] == [0, 1]


@pytest.mark.long
def test_an_export_is_not_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_envpool()
    monkeypatch.chdir(tmp_path)
    assert export_policy("cartpole-ppg", format="torch").path.parent == Path("cartpole-ppg")
    assert play_exported("cartpole-ppg", episodes=1).returns == (500.0,)
