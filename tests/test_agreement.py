"""The comparison with the reference codes: its arithmetic, our side, and its committed result."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import agreement
from benchmarks.references import formulas, ours, playback, quantities, substitute
from phasicrl.presets import PRESETS
from tools.result_tables import AGREEMENT, agreement_rows

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RESULT = json.loads((RESULTS / "agreement.json").read_text())


def test_the_largest_difference_is_by_norm_and_over_all_updates_and_parts() -> None:
    theirs = {
        "1|weights|a": np.array([3.0, 4.0]), "2|weights|b": np.array([[0.0], [2.0]]),
        "1|values|": np.zeros(2),
    }  # fmt: skip
    ours = {
        "1|weights|a": np.array([3.0, 6.0]), "2|weights|b": np.array([0.0, 2.5]),
        "1|values|": np.array([0.0, 1e-9]), "3|weights|a": np.ones(2),
    }  # fmt: skip
    # 2 / 5 and 0.5 / 2; there is no distance to be a share of.
    assert agreement.largest(ours, theirs) == {"weights": 0.4, "values": 1e-9}
    del ours["1|values|"]
    with pytest.raises(ValueError, match=r"only one side has 1\|values\|"):
        agreement.largest(ours, theirs)


def test_a_difference_agrees_within_ten_times_the_noise_or_a_trillionth_of_the_distance() -> None:
    for difference, noise, agrees in (
        (9e-12, 1e-12, True), (1.1e-11, 1e-12, False),
        # OpenAI's shared network, Adam's first moment: a noise that happens to be small.
        (1.9e-14, 1.1e-15, True), (9e-13, 0.0, True), (1.1e-12, 1e-15, False),
    ):  # fmt: skip
        row = agreement.Row("r", "p", "o", 1, "q", difference, noise, 0.0, 0.0, 0.0, "")
        assert row.agrees("float64") == agrees and row.agrees("float32")
        assert ("*" in agreement.shown([row])) == (not agrees)


def test_a_case_becomes_rows_with_the_noise_of_its_precision() -> None:
    runs = {
        "theirs.float64": 1.0, "theirs.float64.turned": 1.25, "ours.float64": 1.5,
        "theirs.float32": 2.0, "theirs.float32.turned": 0.5, "ours.float32": 3.0,
    }  # fmt: skip
    (row,) = agreement.rows_of(0, lambda name: {"4|values|": np.array([runs[name]])})
    assert (row.updates, row.quantity) == (4, "values")
    assert (row.float64, row.noise64, row.float32, row.noise32, row.absolute64) == (
        0.5, 0.25, 0.5, 1.0, 0.5,
    )  # fmt: skip


@pytest.mark.long
def test_our_side_runs_and_names_every_quantity_of_the_result() -> None:
    side = ours.Side("float32")
    # An epoch of 5 updates, two of 2 phases.
    for program, steps, orders in (("ppg_procgen.py", 2, 5 + 2 * 2), ("ppo.py", 8, 3 * 4)):
        case = dataclasses.replace(
            next(case for case in agreement.CASES if case.name == program), num_steps=steps
        )
        found, start, dealt = side.quantities(case, None)
        assert len(dealt) == orders and start
        wanted = {row["quantity"] for row in RESULT["rows"] if row["program"] == program}
        assert wanted <= {name.split("|")[1] for name in found.arrays}
        assert all(np.isfinite(value).all() for value in found.arrays.values())
    again, _, _ = side.quantities(case, start)
    assert all(np.array_equal(value, again.arrays[name]) for name, value in found.arrays.items())


@pytest.mark.long
@pytest.mark.parametrize("name", ["LSTM", "masks", "normalized values", "PPO-EWMA", "recomputed"])
def test_the_formulas_agree_with_our_side_in_float32(name: str) -> None:
    case = next(x for x in agreement.CASES if x.name.startswith(name) and x.reference == "formulas")
    case = dataclasses.replace(case, iterations=3)
    found, start, orders = ours.Side("float32").quantities(case, None)
    side = formulas.Side(Path(), "float32")
    theirs = side.quantities(case, start, orders, turned=False)
    differences = agreement.largest(found.arrays, theirs.arrays)
    assert len(differences) > 15
    assert all(x < 1e-4 for name, x in differences.items() if not name.startswith("Adam's"))


def test_masked_recordings_allow_their_actions() -> None:
    plain, masked = (
        playback.record((playback.VECTOR, playback.FEW), 40, 2, ends="rules", masked=masked)
        for masked in (False, True)
    )
    assert np.array_equal(plain.action, masked.action)
    assert masked.mask is not None
    allowed = np.take_along_axis(masked.mask[:-1], masked.action[..., None], -1)
    assert allowed.all() and not masked.mask.all()


def test_an_episode_with_a_limit_is_cut_at_the_end_of_each_rollout() -> None:
    spaces = (playback.VECTOR, playback.FEW)
    recording = playback.record(spaces, 120, 1, ends="limit", limit=12, rollout=40)
    length, cut = 0, []
    for t in range(120):
        length += 1
        over, truncated = recording.terminated[t, 0], recording.truncated[t, 0]
        assert truncated == (length == 12) and not (over and truncated)
        cut += [t] if truncated else []
        length = 0 if over or truncated else length
    assert {39, 79, 119} <= set(cut) and recording.terminated.any()


def test_parameters_are_matched_in_order_under_each_name() -> None:
    matched = quantities.matched
    theirs = dict.fromkeys(["v.w", "a.0.w", "a.0.b", "a.2.w", "a.2.b", "s"])
    ours = ["enc.0.weight", "enc.0.bias", "enc.1.weight", "enc.1.bias", "head", "std"]
    names = {"enc": ("a.0", "a.2"), "head": ("v",), "std": ("s",), "aux": ("unused",)}
    assert list(matched(ours, theirs, names).values()) == [
        "a.0.w", "a.0.b", "a.2.w", "a.2.b", "v.w", "s",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"enc has 4 parameters here, a\.0 2 there"):
        matched(ours, theirs, {"enc": ("a.0",)})
    with pytest.raises(ValueError, match="no names for std"):
        matched(ours, theirs, {name: others for name, others in names.items() if name != "std"})


def test_in_float64_a_module_that_names_float32_gets_doubles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "of_singles.py").write_text(
        "import numpy as np, torch\nfrom torch import nn\n"
        "kinds = np.float32, torch.zeros(1, dtype=torch.float32).dtype\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for precision in ("float64", "float32"):
        sys.modules.pop("of_singles", None)
        module = substitute.fresh_import("of_singles", substitute.torch_and_numpy(precision))
        assert module.kinds == (getattr(np, precision), getattr(torch, precision))
    assert sys.modules["numpy"] is np


def test_every_row_of_the_result_agrees_unless_it_is_meant_to_differ() -> None:
    rows = [agreement.Row(**row) for row in RESULT["rows"]]
    differ = [row for row in rows if not (row.agrees("float64") and row.agrees("float32"))]
    assert differ and all(row.by_design for row in differ)


def test_the_result_is_of_every_case_and_every_quantity_has_a_place_in_the_table() -> None:
    keys = ("reference", "program", "preset", "by_design")
    found = {tuple(row[key] for key in keys) for row in RESULT["rows"]}
    cases = {(case.reference, case.name, case.preset, case.by_design) for case in agreement.CASES}
    assert found == cases
    assert {case.preset for case in agreement.CASES} <= set(PRESETS)
    assert set(RESULT["references"]) == set(agreement.REFERENCES)
    assert all("dirty" not in state["commit"] for state in (RESULT, *RESULT["references"].values()))
    elsewhere = ("norms of the initial weights", "steps of Adam")
    beginnings = tuple(name for names in AGREEMENT.values() for name in names) + elsewhere
    assert all(row["quantity"].startswith(beginnings) for row in RESULT["rows"])
    assert sum(len(agreement_rows(by_design=x)) for x in (False, True)) == len(cases)
