"""Requirements on a GPU, in tests that run on the CPU as well.

Both run the same bodies, so that they are known to work before there is a GPU.
`benchmarks/gpu.py` runs the GPU's half of this file.
"""

import json
import subprocess
import sys
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from phasicrl.algorithm import resume, train
from phasicrl.config import Config
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.lab.bench import measure_speed
from phasicrl.presets import get_preset
from phasicrl.runs.checkpoint import load_checkpoint
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.build import start_run
from phasicrl.training.evaluate import evaluate
from phasicrl.training.run import Run
from tests.execution.test_executor import both, setting
from tests.golden import FILE, Image, runs
from tests.golden import measure as measure_golden
from tests.helpers import corridor, mark_long, skip_without_envpool, stop_at, tiny, tiny_aux
from tests.test_procgen import small

GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
)
DEVICES = ["cpu", GPU]
OTHER = {"cpu": "cuda" if torch.cuda.is_available() else "cpu", "cuda": "cpu"}
"""Device on which a run of a device is resumed."""
GOLDEN = json.loads(FILE.read_text())
# tests/test_golden.py has those of the CPU; one keeps the test runnable.
GOLDEN_RUNS = [("cpu", "ppo-together")]
GOLDEN_RUNS += [pytest.param("cuda", name, marks=GPU.marks) for name in GOLDEN]
Precision = Literal["fp32", "bf16"]


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute convolutions in float32, not TF32, a GPU's default.

    Rounding to 10 bits would hide mistakes.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


NETWORK = {
    "model.encoder": "impala", "model.activation": "relu", "model.channels": (4, 6),
    "model.blocks": 1, "model.hidden_sizes": (8,),
}  # fmt: skip


def images(folder: Path, **changes: Any) -> Config:
    """Return PPG on tiny images with a tiny IMPALA network, whose weights are channels_last."""
    return setting(folder, **{**NETWORK, **changes})


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize(("device", "name"), GOLDEN_RUNS)
def test_a_golden_run_gives_the_committed_numbers(device: str, name: str, tmp_path: Path) -> None:
    config, make_env = runs(tmp_path)[name]
    rows = measure_golden(config.with_updates({"compute.device": device}), make_env)
    for row, golden in zip(rows, GOLDEN[name], strict=True):
        # Sums in another order, of small networks: 1e-5 at first, and Adam makes whole steps of the
        # smallest gradients.
        assert row == pytest.approx(golden, rel=0.01, abs=2e-3)


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("value_path", ["separate", "shared"])
def test_compiled_steps_equal_eager_ones(
    device: str, precision: Precision, value_path: str, tmp_path: Path
) -> None:
    changes = {"compute.device": device, "model.value_path": value_path}
    changes |= {"compute.policy_precision": precision, "compute.aux_precision": precision}
    # Convolutions sum in another order, and fewer numbers are rounded to bf16; Adam makes whole
    # steps of the difference: 4e-4 in fp32, 1.2e-3 in bf16 on an H200.
    both(images(tmp_path, **changes), Image, tolerance=20 if precision == "fp32" else 100)


@pytest.mark.parametrize("values", [
    torch.ones(2, 3), torch.arange(6.0).reshape(2, 3).T, torch.tensor([True, False]),
    torch.full((2, 4, 4, 3), 200, dtype=torch.uint8)],
    ids=["rows", "transposed", "flags", "bytes",
])  # fmt: skip
def test_what_is_uploaded_arrives_in_any_layout_and_kind(device: str, values: torch.Tensor) -> None:
    found = Executor(Plan(device=device)).upload(values)
    assert found.device.type == device and found.tolist() == values.tolist()


@pytest.mark.parametrize("device", [GPU])
def test_an_upload_may_be_overwritten_at_once(device: str) -> None:
    """Write to the memory again while the GPU is still busy with something else."""
    executor, matrix = Executor(Plan(device=device)), torch.randn(4096, 4096, device=device)
    values, found = torch.zeros(1_000_000), []
    for number in range(20):
        matrix = matrix @ matrix / 64
        values[:] = number
        found.append(executor.upload(values))
    ends = [(float(one.min()), float(one.max())) for one in found]
    assert ends == [(number, number) for number in range(20)]


def test_the_phase_buffer_lies_on_the_device_as_bytes(device: str, tmp_path: Path) -> None:
    with start_run(images(tmp_path, **{"compute.device": device}), make_env=Image) as run:
        tensors = run.buffer.rollouts.tensors()
        assert {tensor.device.type for tensor in tensors.values()} == {device}
        assert tensors["obs"].dtype == torch.uint8
        assert {parameter.device.type for parameter in run.agent.parameters()} == {device}


def stopped_in_a_phase(folder: Path, device: str) -> Run:
    """Train for three iterations, and stop within the second phase; return the run."""
    config = setting(folder, **{"compute.device": device})
    return train(config, make_env=corridor, callbacks=stop_at(3))


def test_a_run_is_resumed_where_there_is_another_device(device: str, tmp_path: Path) -> None:
    first, other = stopped_in_a_phase(tmp_path, device), OTHER[device]
    first.files.write_config(first.config.with_updates({"compute.device": other}))
    seen: list[bool] = []

    def look(run: Run, _: dict[str, float]) -> None:
        if not seen:
            states = (each.state.values() for each in run.learner.optimizers.values())
            moments = [value for state in chain(*states) for value in state.values()]
            seen.append({value.device.type for value in moments} == {other})

    second = resume(first.directory, make_env=corridor, callbacks=look)
    assert seen == [True] and second.env_steps == second.config.budget
    assert [row["iteration"] for row in RunDirectory(first.directory).metrics()] == [1, 2, 3, 4, 5]


def test_a_checkpoint_is_loaded_without_its_device(device: str, tmp_path: Path) -> None:
    run = stopped_in_a_phase(tmp_path, device)
    (state, chunks), _ = load_checkpoint(run.directory / "checkpoints")
    tensors = chain(state["learner"]["agent"].values(), *(x.values() for x in chunks.values()))
    assert len(chunks) == 1 and {tensor.device.type for tensor in tensors} == {"cpu"}
    for name, tensor in run.agent.state_dict().items():
        assert torch.equal(state["learner"]["agent"][name], tensor.cpu()), name
    for result in evaluate(run.directory, episodes=4, make_env=corridor):
        assert len(result.returns) == 4


def test_the_parts_of_an_iterations_time_fit_into_it(device: str, tmp_path: Path) -> None:
    """On a GPU a clock that does not wait measures how long the request took."""
    config = setting(tmp_path, **{"compute.device": device, "ppo.value_epochs": 2})
    names = [f"time/{part}" for part in ("rollout", "policy", "value", "auxiliary")]
    for row in RunDirectory(train(config, make_env=corridor).directory).metrics():
        parts = sum(row.get(name, 0.0) for name in names)
        assert row["time/policy"] > 0 and row["time/value"] > 0 and parts < row["time/total"]


@pytest.mark.parametrize("device", [GPU])
def test_a_measurement_has_the_memory_of_the_device(device: str, tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux()).with_updates({"compute.device": device})
    report = measure_speed(config, seconds=0.01, make_env=corridor)
    parts = min(report.get_speed("update"), report.get_speed("rollout"))
    assert report.peak_gpu_memory > 0 and report.get_speed("whole loop") < parts


PRESETS = product(("procgen-ppo", "procgen-ppg", "procgen-ppg-single"), ("fp32", "bf16"))
PROCGEN = [
    *mark_long([("cpu", "procgen-ppg", "bf16")]),
    *(pytest.param("cuda", *choice, marks=GPU.marks) for choice in PRESETS),
]
"""Cases on Procgen; tests/test_procgen.py has more on the CPU."""


@pytest.mark.parametrize(("device", "preset", "precision"), PROCGEN)
def test_a_preset_trains(device: str, preset: str, precision: Precision, tmp_path: Path) -> None:
    skip_without_envpool()
    changes: dict[str, Any] = {
        "compute.device": device, "compute.policy_precision": precision, "total_env_steps": 64,
        "env.num_envs": 4, "ppo.num_steps": 8, "ppo.num_minibatches": 2,
        "compute.compile": "on" if device == "cuda" else "off",
    }  # fmt: skip
    if get_preset(preset).has_auxiliary_phase:
        changes |= {"compute.aux_precision": precision, "aux.num_minibatches": 2}
    run = train(small(preset, tmp_path).with_updates(changes))
    if device == "cuda":
        assert run.executor._compiled_calls and None not in run.executor._compiled_calls.values()
    rows = RunDirectory(run.directory).metrics()
    losses = [x for row in rows for name, x in row.items() if name.startswith("losses/")]
    assert losses and np.isfinite(losses).all()


@pytest.mark.parametrize("device", [GPU])
def test_only_deterministic_kernels_run_on_request(device: str, tmp_path: Path) -> None:
    """Two runs are equal to the bit.

    They are in a new process, because cuBLAS reads its setting when it is loaded.
    """
    program = f"""
import torch
from pathlib import Path
from phasicrl.algorithm import train
from phasicrl.config import RewardNormConfig
from tests.golden import Image
from tests.test_gpu import images
changes = {{"compute.device": "cuda", "compute.deterministic": True}}
changes["reward_norm"] = RewardNormConfig(per="step")
configs = [images(Path({str(tmp_path)!r}) / name, **changes) for name in "ab"]
one, other = (train(config, make_env=Image).agent.state_dict() for config in configs)
assert all(torch.equal(one[name], other[name]) for name in one)
"""
    root, command = Path(__file__).parents[1], [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
