"""Several processes train as one does: equality, agreement, faults."""

import json
from pathlib import Path

import pytest

from phasicrl.distributed import World
from phasicrl.presets import get_preset
from phasicrl.training.build import check_divisible_by_ranks
from tests import golden, ranks

EAGER = list(golden.runs(Path()))
SOME = ["ppo-shared-transitions-clipped", "ppg-separate", "ppo-masks-lstm", "ppg-masks-lstm"]
MORE = ["ppo-value-epochs-first-kl", "ppo-obs-norm-ema-tree", "ppo-reward-norm-steps",
        "ppg-value-norm", "ppo-adaptive-penalty", "ppg-together", "ppg-averaged",
        "ppo-lstm", "ppg-lstm", "ppo-masks", "ppg-masks"]  # fmt: skip
FEW = ["ppo-shared-transitions-clipped", "ppg-lstm", "ppg-masks"]


@pytest.mark.parametrize(("size", "names"), [
    pytest.param(2, SOME, id="2"),
    pytest.param(2, list(ranks.LOST), id="2-lost", marks=pytest.mark.long),
    pytest.param(2, MORE, id="2-more", marks=pytest.mark.long),
    pytest.param(4, FEW, id="4", marks=pytest.mark.long),
    pytest.param(2, ["ppo-compiled"], id="2-compiled", marks=pytest.mark.long),
    pytest.param(4, [*EAGER, "ppg-compiled"], id="4-all", marks=pytest.mark.slow),
])  # fmt: skip
def test_processes_learn_what_one_learns(tmp_path: Path, size: int, names: list[str]) -> None:
    """Three iterations on the same data: weights, losses and statistics, within float order."""
    ranks.run_ranks(tmp_path, size, ranks.measure_all, tmp_path, names, size)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(size)]
    for name in names:
        first, *others = (each[name] for each in found)
        alone = ranks.measure(tmp_path, name, size, None)
        assert all(other["weights"] == first["weights"] for other in others), name
        noise, order = ({str(each[name]["generators"][i]) for each in found} for i in range(2))
        assert (len(noise), len(order)) == (1, size)
        for key, numbers in alone["weights"].items():
            near = pytest.approx(numbers, rel=1e-6, abs=1e-5)
            assert first["weights"][key] == near, f"{name}: {key}"
        assert len(alone["rows"]) == 3
        for row, row_of_ranks in zip(alone["rows"], first["rows"], strict=True):
            row["charts/SPS"] = row_of_ranks["charts/SPS"]
            assert row_of_ranks == pytest.approx(row, rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.long
def test_statistics_of_a_network_of_ones_own_may_differ_by_process(tmp_path: Path) -> None:
    ranks.run_ranks(tmp_path, 2, ranks.train_noisy, tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "agent.safetensors").is_file()


@pytest.mark.parametrize("is_bound", [False, True])
def test_processes_divide_the_cores_that_they_share(tmp_path: Path, is_bound: bool) -> None:
    ranks.run_ranks(tmp_path, 2, ranks.write_cores, tmp_path, is_bound)
    cores = [(tmp_path / f"{rank}").read_text() for rank in range(2)]
    assert cores == [str([*range(8)]), str([*range(8, 16)])]


def test_parts_of_processes_that_do_not_divide_are_refused() -> None:
    config = get_preset("procgen-ppg")  # 64 environments, 8 and 16 minibatches of segments
    check_divisible_by_ranks(config, World(size=2))
    with pytest.raises(ValueError, match=r"process of 16: ppo.num_minibatches is 8.* 4 seg"):
        check_divisible_by_ranks(config, World(size=16))
