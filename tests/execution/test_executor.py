"""Compiled gradient steps against the same steps run eagerly."""

import itertools
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from phasicrl import phases
from phasicrl.algorithm import learn, train
from phasicrl.config import ActionConfig, Config
from phasicrl.execution import compiled
from phasicrl.execution import executor as executor_module
from phasicrl.execution import step as step_module
from phasicrl.execution.compiled import has_compiler
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.execution.step import AdamSettings
from phasicrl.models.agent import Agent
from phasicrl.training.run import Run
from tests.corridor import Corridor
from tests.golden import Image
from tests.helpers import Levers, NoisyEncoder, assert_same, mark_long, open_run, tiny, tiny_aux

NEEDS_COMPILER = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def as_it_is(function: Callable[..., Any], _: list[Tensor], **options: Any) -> Callable[..., Any]:
    """Stand in for `compile_for_shapes`, and return the function itself."""
    return function


def both(
    config: Config, make_env: Callable[[], gym.Env[Any, Any]], *, tolerance: float = 1.0, **own: Any
) -> None:
    """Train with and without compiled steps and compare weights, moments and metrics."""

    def trained(choice: str) -> tuple[Run, list[dict[str, float]]]:
        records: list[dict[str, float]] = []
        now = config.with_updates({"compute.compile": choice})
        run = train(now, make_env=make_env, callbacks=lambda _, row: records.append(row), **own)
        return run, records

    (eager_run, records), (fused_run, fused_records) = trained("off"), trained("on")
    assert not eager_run.executor._compiled_steps
    executor = fused_run.executor
    assert executor._compiled_calls and None not in executor._compiled_calls.values()
    assert executor.plan.on_gpu or executor._compiled_steps
    assert None not in executor._compiled_steps.values()
    one, other = eager_run.learner.state_dict(), fused_run.learner.state_dict()
    for name, tensor in one["agent"].items():
        torch.testing.assert_close(other["agent"][name], tensor, rtol=2e-3, atol=2e-5 * tolerance)
    for name, optimizer in one["optimizers"].items():
        assert_same(*(
            {key: int(value["step"]) for key, value in each["state"].items()}
            for each in (optimizer, other["optimizers"][name])
        ))  # fmt: skip
    for eager, fused in zip(records, fused_records, strict=True):
        assert eager.keys() == fused.keys()
        for name in (name for name in eager if name.startswith(("losses/", "gradients/"))):
            near = pytest.approx(eager[name], rel=5e-3 * tolerance, abs=5e-5 * tolerance)
            assert fused[name] == near, name


def setting(tmp_path: Path, **changes: Any) -> Config:
    config = tiny(tmp_path, aux=tiny_aux(), total_env_steps=160)
    return config.with_updates({"ppo.max_grad_norm": 0.5, **changes})


CASES: dict[str, tuple[dict[str, Any], Callable[[], gym.Env[Any, Any]]]] = {
    "separate": ({}, Corridor),
    "detached": ({"model.value_path": "detached"}, Corridor),
    "shared-in-aux": ({"model.value_path": "shared_in_aux"}, Corridor),
    "shared": ({"model.value_path": "shared"}, Corridor),
    "epochs-apart": ({"ppo.policy_epochs": 1, "ppo.value_epochs": 2, "aux.optimizer": "own"},
                     Corridor),
    # A stop trains the value function alone, so that numbers of steps differ in one network.
    "early-stop": ({"model.value_path": "detached", "ppo.target_kl": 1e-9, "ppo.policy_epochs": 2,
                    "ppo.value_epochs": 2, "ppo.adam_eps": 1e-5}, Corridor),
    "shuffled": ({"ppo.minibatch_by": "transitions", "ppo.advantage_norm": "minibatch",
                  "ppo.schedule": "linear"}, Corridor),
    "no-clipping": ({"ppo.max_grad_norm": None}, Corridor),
    "one-norm": ({"ppo.grad_norm_of": "agent"}, Corridor),
    "normalized": ({"obs_norm.statistics": "moments", "value_norm.statistics": "moments"},
                   Corridor),
    "penalty": ({"ppo.kl_penalty": 0.7, "ppo.kl_penalty_target": 0.01,
                 "ppo.kl_estimate": "exact"}, Corridor),
    # An auxiliary phase begins where the divergence's gradient is zero but for rounding, which an
    # Adam with a small ε makes a whole step of.
    "eps-hat": ({"ppo.adam_eps_hat": True, "ppo.adam_eps": 1e-5}, Corridor),
    "two-rates": ({"ppo.value_learning_rate": 1e-4}, Corridor),
    "masks-discrete": ({}, lambda: Levers(masked=True)),
    "masks-mixed": (  # likewise
        {"action": ActionConfig(std="softplus", squash="clip"), "ppo.adam_eps": 1e-5},
        lambda: Levers(discrete=False, masked=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", mark_long(
    CASES, "separate", "detached", "shared", "early-stop", "no-clipping", "penalty", "two-rates",
    "masks-mixed",
))  # fmt: skip
def test_steps_written_for_the_compiler_equal_eager_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compile_for_shapes", as_it_is)
    changes, make_env = CASES[name]
    both(setting(tmp_path, **changes), make_env)


def test_a_first_step_that_moves_nothing_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compile_for_shapes", as_it_is)

    class Nothing(Corridor):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, 0.0, *rest

    changes = {
        "ppo.baseline": False, "ppo.estimator": "monte_carlo", "ppo.entropy_coef": 0.0,
        "aux.epochs": 0, "compute.compile": "on", "ppo.objective": "log_prob", "ppo.clip": None,
    }  # fmt: skip
    run = train(setting(tmp_path, **changes), make_env=Nothing)
    assert None not in run.executor._compiled_steps.values()


class Mixed(torch.nn.Module):
    """Encoder with a frozen layer, and one in double precision whose weight is a slice."""

    num_features = 8

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(space.shape[0], 8).requires_grad_(False)
        self.wide = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.wide.weight = torch.nn.Parameter((torch.randn(8, 16).double() / 8)[:, ::2])

    def forward(self, obs: Tensor) -> Tensor:
        return self.wide(self.frozen(obs).double()).tanh().float()


@pytest.mark.parametrize("encoder", [Mixed, NoisyEncoder])
def test_networks_of_many_kinds_are_compiled(
    encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing with eager steps changes neither their statistics nor their random numbers."""
    monkeypatch.setattr(compiled, "compile_for_shapes", as_it_is)
    changes = {"ppo.adam_eps": 1e-3}  # of a bias before batch normalization, rounding is all
    both(setting(tmp_path, **changes), Corridor, make_encoder=encoder)


def test_parameters_of_any_layout_become_views_that_do_not_overlap() -> None:
    image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    values = [torch.arange(40.0).view(4, 10), image, torch.randn(5, 3).t(), torch.ones(1)]
    parameters = [torch.nn.Parameter(x) for x in values]
    flat = step_module._FlatParameters(parameters, torch.optim.Adam(parameters))
    assert flat.bind() and all(map(torch.equal, parameters, values))
    assert torch.equal(flat.join(values), flat.vectors[0]), "gradients have their places"
    assert all(x.data_ptr() % 64 == flat.vectors[0].data_ptr() % 64 for x in parameters)


WAITS = (
    "item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "repeat_interleave",
)  # fmt: skip


class Looks(TorchDispatchMode):
    """Record of the operations that need a tensor's values: each of them waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = (args[1] or ()) if name.startswith("index") else ()
        by_mask = any(getattr(index, "dtype", None) is torch.bool for index in indices)
        if by_mask or name in WAITS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def looks(config: Config) -> list[str]:
    """Return the operations of two iterations, with an auxiliary phase, that wait for values."""
    run = open_run(config)
    with Looks() as seen:
        learn(run)
    return sorted(seen.names)


@pytest.mark.parametrize("value_path", ["separate", "detached", "shared"])
def test_neither_a_step_nor_a_minibatch_reads_values(value_path: str, tmp_path: Path) -> None:
    few = {
        "model.value_path": value_path, "aux.every": 1, "ppo.num_steps": 12, "total_env_steps": 96,
        "ppo.num_minibatches": 1, "aux.num_minibatches": 1,
    }  # fmt: skip
    once = looks(setting(tmp_path / "few", **few))
    assert "_local_scalar_dense" in once, "reading the metrics is seen"
    more = few | {
        "ppo.num_steps": 24, "total_env_steps": 192, "ppo.num_minibatches": 4,
        "aux.num_minibatches": 4, "ppo.policy_epochs": 3, "ppo.value_epochs": 3,
    }  # fmt: skip
    assert looks(setting(tmp_path / "more", **more)) == once


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")  # PyTorch's about itself
@pytest.mark.parametrize("name", ["shared-in-aux", "epochs-apart", "masks-mixed"])
def test_steps_compiled_for_a_gpu_equal_eager_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by the same call on a CPU, where PyTorch records no CUDA graphs."""
    monkeypatch.setattr(Plan, "on_gpu", True)
    counters.clear()
    changes, make_env = CASES[name]
    both(setting(tmp_path, **changes), make_env)
    assert not counters["graph_break"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.filterwarnings("ignore")  # PyTorch's about itself
@pytest.mark.parametrize("name", CASES)
def test_steps_on_a_gpu_equal_eager_ones(name: str, tmp_path: Path) -> None:
    changes, make_env = CASES[name]
    both(setting(tmp_path, **changes).with_updates({"compute.device": "cuda"}), make_env)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_waited_for_once_a_step(tmp_path: Path) -> None:
    def waits(num_steps: int) -> int:
        changes = {"compute.device": "cuda", "ppo.num_steps": num_steps}
        run = open_run(setting(tmp_path / str(num_steps), **changes))
        for _ in range(2):  # in the first one graphs are recorded
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    run.collect(run.buffer.next_rollout())
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in seen)

    assert waits(24) - waits(12) == 12


LONG = ("masks-mixed", "normalized", "shared", "shuffled")
"""Cases of `make test-long`; `make test-slow` compiles the others."""


@NEEDS_COMPILER
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
    for name in CASES
])  # fmt: skip
def test_compiled_steps_equal_eager_ones(name: str, tmp_path: Path) -> None:
    changes, make_env = CASES[name]
    both(setting(tmp_path, **changes), make_env)


class Assigning(torch.nn.BatchNorm1d):
    """Encoder with a buffer that each call puts another in the place of."""

    def __init__(self, space: Any) -> None:
        super().__init__(space.shape[0])

    def forward(self, obs: Tensor) -> Tensor:
        self.running_mean = torch.zeros(obs.shape[1])
        return super().forward(obs)


@pytest.mark.parametrize(("memory", "own"), [("lstm", {}), ("none", {"make_encoder": Assigning})])
def test_what_cannot_be_traced_runs_eagerly(tmp_path: Path, memory: str, own: Any) -> None:
    config = setting(tmp_path, **{"model.memory": memory, "compute.compile": "on"})
    run = train(config, make_env=Corridor, **own)
    assert set(run.executor._compiled_steps.values()) == {None}
    assert memory == "lstm" or set(run.executor._compiled_calls.values()) == {None}


def test_compiled_code_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(function: Callable[..., Any], _: list[Tensor], **options: Any) -> Callable[..., Any]:
        def call(*inputs: Tensor) -> Any:
            result = function(*inputs)
            if isinstance(result, tuple):  # acting
                return tuple(part + 1 for part in result)
            inputs[0].add_(0.01)
            return result

        return call

    reference = train(setting(tmp_path, **{"compute.compile": "off"}), make_env=Corridor)
    monkeypatch.setattr(compiled, "compile_for_shapes", wrong)
    run = train(setting(tmp_path, **{"compute.compile": "on"}), make_env=Corridor)
    assert set(run.executor._compiled_steps.values()) == {None}
    assert set(run.executor._compiled_calls.values()) == {None}
    assert_same(run.agent.state_dict(), reference.agent.state_dict())


CPU_OOM = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
PICTURES = {
    "model.encoder": "impala", "model.channels": (2,), "model.blocks": 1,
    "model.activation": "relu", "compute.micro_batch": 4,
}  # fmt: skip


def test_steps_in_micro_batches_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled step takes the memory of a whole minibatch."""
    monkeypatch.setattr(compiled, "compile_for_shapes", as_it_is)
    config = setting(tmp_path, **PICTURES, **{"compute.compile": "on", "total_env_steps": 96})
    executor = train(config, make_env=Image).executor
    assert executor.plan.compiled and not executor._compiled_steps
    config = config.with_updates({"compute.micro_batch": None})
    assert train(config, make_env=Image).executor._compiled_steps


@pytest.mark.parametrize(("name", "error", "remedy", "changes", "make_env"), [
    ("policy", RuntimeError(CPU_OOM), "ppo.num_minibatches", {}, Corridor),
    ("aux", torch.OutOfMemoryError("CUDA out of memory"), "aux.num_minibatches", {}, Corridor),
    ("policy", RuntimeError(CPU_OOM), "compute.micro_batch", PICTURES, Image),
    ("policy", RuntimeError("something else"), None, {}, Corridor),
])  # fmt: skip
def test_a_step_that_does_not_fit_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception,
    remedy: str | None, changes: dict[str, Any], make_env: Callable[[], gym.Env[Any, Any]],
) -> None:  # fmt: skip
    plain = executor_module.clip_and_step_

    def full(settings: AdamSettings) -> Any:
        if settings.phase == name:
            raise error
        return plain(settings)

    monkeypatch.setattr(executor_module, "clip_and_step_", full)
    with pytest.raises(MemoryError if remedy else RuntimeError, match=remedy or "something else"):
        train(setting(tmp_path, **changes), make_env=make_env)


@pytest.mark.parametrize(
    ("path", "method"), [("separate", "policy"), ("separate", "value"), ("shared", "value")]
)
def test_a_rollout_that_does_not_fit_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, method: str
) -> None:
    """In acting, in valuing the rollout, and in valuing the observations after it."""

    def full(self: Agent, *args: Any, **options: Any) -> Any:
        raise RuntimeError(CPU_OOM)

    monkeypatch.setattr(Agent, method, full)
    with pytest.raises(MemoryError, match=r"try fewer env\.num_envs"):
        train(setting(tmp_path, **{"model.value_path": path}), make_env=Corridor)


@pytest.mark.long
def test_only_deterministic_kernels_run_where_that_is_asked_for(tmp_path: Path) -> None:
    """PyTorch knows no deterministic `put_`: it must be refused, and nothing that training needs.

    After the run it works again.
    """

    def put(*_: object) -> Tensor:
        return torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))

    def refused(*_: object) -> None:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="deterministic"):
            put()

    trained = []
    for deterministic, look in ((False, lambda *_: None), (True, refused)):
        changes = {"model.memory": "lstm", "compute.deterministic": deterministic}
        config = setting(tmp_path, **changes)
        run = train(config, make_env=lambda: Levers(discrete=False, masked=True), callbacks=look)
        trained.append(run.agent.state_dict())
        assert put().tolist() == [0, 2, 0] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert_same(*trained)


def test_a_gpu_is_waited_for_before_a_clock_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait `time/policy` would be the time to launch the steps."""
    run, calls = open_run(setting(tmp_path, **{"ppo.value_epochs": 2})), list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(str(device)))
    monkeypatch.setattr(phases, "perf_counter", lambda: calls.append("clock") or 0.0)
    run.executor.synchronize()
    assert calls == [], "there is nothing to wait for on a CPU"
    monkeypatch.setattr(run.executor, "synchronize", lambda: calls.append("wait"))
    rollout = run.collect(run.buffer.next_rollout())
    calls.clear()
    phases.policy_phase(run.learner, rollout)
    assert calls == ["clock", "wait", "clock"] * len(run.config.ppo.epoch_kinds)
    executor = Executor(Plan())
    executor.device = torch.device("cuda:1")
    calls.clear()
    executor.synchronize()
    assert calls == ["cuda:1"]


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or platform.libc_ver()[0] != "glibc",
    reason="only glibc is asked",
)
def test_freed_memory_is_kept_for_the_next_layer() -> None:
    """Otherwise every activation would be mapped, faulted in and unmapped again.

    The program runs in a new process, whose allocator has its defaults.
    """
    program = """
import torch
from phasicrl.execution.device import keep_freed_memory
def after_a_large_tensor() -> int:
    torch.ones(50_000_000)
    return int(open("/proc/self/statm").read().split()[1]) * 4096
given_back = after_a_large_tensor()
keep_freed_memory()
print(after_a_large_tensor() - given_back)
"""
    assert 180e6 < int(subprocess.check_output([sys.executable, "-c", program])) < 220e6


@pytest.mark.parametrize(
    "compile_for_shapes", [as_it_is, pytest.param(None, marks=[pytest.mark.long, NEEDS_COMPILER])]
)
def test_between_gradients_and_clipping_is_a_place_for_the_mean_over_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_for_shapes: Callable[..., Any] | None
) -> None:
    """Here the others' gradients are zero: the mean of two is half.

    Eagerly, and in two compiled calls with the mean between them, the first for each piece of the
    minibatch.
    """
    if compile_for_shapes is not None:
        monkeypatch.setattr(compiled, "compile_for_shapes", compile_for_shapes)

    def mean(gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(0.5)

    found: dict[tuple[str, bool, int], tuple[list[Tensor], Tensor]] = {}
    for choice, average, size in itertools.product(("off", "on"), (None, mean), (8192, 4)):
        monkeypatch.setattr(step_module, "_PIECE_STEPS", size)
        changes = {"compute.compile": choice, "ppo.max_grad_norm": None, "aux.epochs": 0}
        run = open_run(setting(tmp_path, **changes))
        rollout = run.collect(run.buffer.next_rollout())
        samples, _ = phases.compute_targets(rollout, rollout.reward, run.config.ppo)
        settings = replace(run.learner.make_adam_settings("policy"), average_gradients=average)
        run.learner.start_iteration()
        loss = phases.PolicyPhaseLoss(run.agent, run.config.ppo, True, True)
        step = run.executor.make_gradient_step(loss, settings)
        order = torch.arange(len(samples))
        for minibatch in samples.minibatches(2, order, unit="segments"):
            names, values, _ = step(minibatch, *run.learner.policy_loss_coefficients())
        assert names[-1] == "gradients/policy_norm"
        steps = run.executor._compiled_steps
        assert None not in steps.values() and bool(steps) == (choice == "on")
        weights = [parameter.detach().clone() for parameter in run.agent.parameters()]
        found[choice, average is not None, size] = weights, values
    for key in itertools.product((False, True), (8192, 4)):
        torch.testing.assert_close(found["on", *key], found["off", *key], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found["off", True, 4][1], found["off", False, 4][1])


@pytest.mark.parametrize("size", [8, 16, 24])
def test_inference_in_several_batches_is_that_in_one(size: int, tmp_path: Path) -> None:
    """Four segments of eight steps, in batches of one, two and three segments."""
    run = open_run(tiny(tmp_path), Corridor)
    samples = run.collect(run.buffer.next_rollout()).policy_samples(torch.zeros(4, 8))
    samples.obs.normal_()
    whole = phases.compute_dist_params(run.agent, samples, executor=run.executor)
    batched = Executor(replace(run.executor.plan, inference_batch_size=size))
    found = phases.compute_dist_params(run.agent, samples, executor=batched)
    torch.testing.assert_close(found, whole)
