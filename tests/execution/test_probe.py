"""The probe of precision and micro-batches, and what is done with its findings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from phasicrl import optimize, phases
from phasicrl.algorithm import learn, train
from phasicrl.config import ComputeConfig, Config, ModelConfig
from phasicrl.execution import plan as plan_module
from phasicrl.execution import probe as probe_module
from phasicrl.execution.plan import Findings, Machine, Plan, Workload
from phasicrl.execution.probe import probe, probe_once, probed_plan
from phasicrl.execution.step import StepSettings
from phasicrl.models.encoders import ImpalaCNN
from phasicrl.phases import auxiliary_phase, policy_phase
from phasicrl.rollout import AuxiliarySamples, Minibatch
from phasicrl.session.build import resume_run, start_run
from phasicrl.session.run import Run
from tests.golden import Image
from tests.helpers import tiny, tiny_aux

OBS = torch.randint(256, (64, 16, 16, 3), dtype=torch.uint8, generator=Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_network() -> ImpalaCNN:
    config = ModelConfig(channels=(4, 8), blocks=1, hidden_sizes=(16,))
    return ImpalaCNN((16, 16, 3), config, generator=Generator().manual_seed(1))


class Brittle(nn.Module):
    """A network whose bf16 goes wrong, or does not exist."""

    def __init__(self, *, wrong: float = 0.0, missing: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16 * 16 * 3, 4))
        self.wrong, self.missing, self.calls = wrong, missing, 0

    def forward(self, obs: Tensor) -> Tensor:
        self.calls += 1
        low = torch.is_autocast_enabled("cpu")
        if low and self.missing:
            raise RuntimeError("no such kernel")
        features = obs.flatten(1).float() @ self.weight.float()
        return features * (1 + self.wrong if low else 1.0)


def test_bf16_of_a_sound_network_is_right_and_every_rate_is_measured() -> None:
    network = small_network()
    found = probe(network, list(network.parameters()), OBS, seconds=0.02)
    # bf16 rounds: an error of zero would mean that it was not used.
    assert found.bf16_is_right and 0.5 < found.error < 1.5
    assert set(found.micro_batch.values()) <= {32, 64} and min(found.rate.values()) > 0
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("side", "channels", "hidden", "init"),
    [
        (64, (16, 32, 32), 256, "orthogonal"),
        (16, (4, 8), 16, "torch"),
        (16, (2, 2), 4, "orthogonal"),
    ],
)
def test_what_rounding_makes_explains_bf16_whatever_the_width(
    side: int, channels: tuple[int, ...], hidden: int, init: str
) -> None:
    """Relative to fp32 the gradients of the narrowest are off by a twentieth, those of the standard
    network by a hundredth.
    """
    obs = torch.randint(
        256, (16, side, side, 3), dtype=torch.uint8, generator=Generator().manual_seed(0)
    )
    for seed in range(2):
        sizes = {"channels": channels, "blocks": 1, "hidden_sizes": (hidden,)}
        config = ModelConfig(**sizes, init=init)  # type: ignore[arg-type]
        network = ImpalaCNN((side, side, 3), config, generator=Generator().manual_seed(seed))
        assert probe_module.bf16_error(network, list(network.parameters()), obs) == pytest.approx(
            1.0, abs=0.3
        )


def test_a_network_whose_gradients_are_all_zero_is_right() -> None:
    """Dead units: nothing over nothing is no error."""
    network = small_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert probe_module.bf16_error(network, list(network.parameters()), OBS) == 0.0


def test_gradients_that_are_no_numbers_are_wrong_however_right_the_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's `max(0.01, nan)` is 0.01."""
    plain = probe_module.forward_backward

    def broken(
        network: ImpalaCNN, parameters: list[nn.Parameter], obs: Tensor, precision: str
    ) -> list[Tensor]:
        features, *gradients = plain(network, parameters, obs, precision)  # type: ignore[arg-type]
        return [
            features,
            *(
                gradient * float("nan") if precision == "bf16" else gradient
                for gradient in gradients
            ),
        ]

    monkeypatch.setattr(probe_module, "forward_backward", broken)
    network = small_network()
    found = probe(network, list(network.parameters()), OBS, seconds=0.01)
    assert not found.bf16_is_right and not found.bf16_pays
    assert "wrong here" in str(found)


@pytest.mark.parametrize(
    ("network", "error"), [(Brittle(wrong=0.05), 0.05 * 256), (Brittle(missing=True), float("nan"))]
)
def test_bf16_that_is_wrong_or_missing_is_left_out(network: Brittle, error: float) -> None:
    found = probe(network, list(network.parameters()), OBS, seconds=0.01)
    assert found.error == pytest.approx(error, rel=0.1, nan_ok=True)
    assert not found.bf16_is_right and not found.bf16_pays
    assert "wrong here" in str(found)


def test_one_small_layer_whose_gradient_is_wrong_does_not_hide_among_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = probe_module.forward_backward
    network = small_network()
    sizes = [
        float(gradient.norm())
        for gradient in plain(network, list(network.parameters()), OBS, "fp32")[1:]
    ]
    smallest = min(
        (size, place)
        for place, size in enumerate(sizes)
        if size > 0.01 * sum(size**2 for size in sizes) ** 0.5
    )[1]

    def broken(
        network: ImpalaCNN, parameters: list[nn.Parameter], obs: Tensor, precision: str
    ) -> list[Tensor]:
        features, *gradients = plain(network, parameters, obs, precision)  # type: ignore[arg-type]
        gradients[smallest] = gradients[smallest] * (0.5 if precision == "bf16" else 1)
        return [features, *gradients]

    whole = sum(size**2 for size in sizes) ** 0.5
    assert 0.5 * sizes[smallest] < 0.03 * whole, "the error of all gradients together would show it"
    assert probe_module.bf16_error(network, list(network.parameters()), OBS) < 1.5
    monkeypatch.setattr(probe_module, "forward_backward", broken)
    # Of a least rounding of 0.1.
    assert probe_module.bf16_error(network, list(network.parameters()), OBS) == pytest.approx(
        5, abs=1
    )


FULL = (
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 9 bytes"
)


@pytest.mark.parametrize("message", [FULL, "an illegal instruction"])
def test_pieces_that_do_not_run_are_left_out_and_those_that_do_are_kept(message: str) -> None:
    class Limited(Brittle):
        def forward(self, obs: Tensor) -> Tensor:
            if len(obs) > 32:
                raise RuntimeError(message)
            return super().forward(obs)

    network = Limited()
    found = probe(network, list(network.parameters()), OBS.repeat(2, 1, 1, 1), seconds=0.01)
    assert found.micro_batch == {"fp32": 32, "bf16": 32} and found.rate["fp32"] > 0
    # Memory says nothing about a precision; a kernel that fails for one size is not to be trusted
    # with the others.
    assert (found.rate["bf16"] > 0) == found.bf16_is_right == (message == FULL)


def test_a_network_that_does_not_fit_at_all_names_the_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise RuntimeError(FULL)

    monkeypatch.setattr(plan_module, "WORTH_PROBING", 1)
    monkeypatch.setattr(probe_module, "forward_backward", full)
    with pytest.raises(
        MemoryError,
        match=r"trying the networks does not fit .*a small number for compute.micro_batch",
    ):
        train(images(tmp_path), make_env=Image)


@pytest.mark.parametrize(("bf16", "pays"), [(100.0, False), (109.0, False), (111.0, True)])
def test_bf16_must_be_faster_by_a_tenth(bf16: float, pays: bool) -> None:
    assert Findings({"fp32": 64, "bf16": 64}, {"fp32": 100.0, "bf16": bf16}, 1.0).bf16_pays is pays


def test_what_was_found_is_kept_for_the_same_network_and_threads_only(tmp_path: Path) -> None:
    network, path = Brittle(), tmp_path / "kept" / "probe.json"

    def ask(num_threads: int = 1) -> Findings:
        return probe_once(
            network, list(network.parameters()), OBS, num_threads=num_threads, cache=path
        )

    first = ask()
    calls = network.calls
    assert ask() == first and network.calls == calls
    ask(num_threads=2)
    assert network.calls > calls and len(json.loads(path.read_text())) == 2
    for damage in (
        "{ not JSON",
        "[1, 2]",
        json.dumps({key: {"rate": 3} for key in json.loads(path.read_text())}),
    ):
        path.write_text(damage)
        calls = network.calls
        ask()
        assert network.calls > calls
        calls = network.calls
        ask()
        assert network.calls == calls, "the file was not mended"


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    network = Brittle()
    assert (
        probe_once(
            network,
            list(network.parameters()),
            OBS,
            num_threads=1,
            cache=tmp_path / "file" / "probe.json",
        ).rate["fp32"]
        > 0
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        Path,
        "home",
        lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")),
    )
    assert probe_once(network, list(network.parameters()), OBS, num_threads=1).rate["fp32"] > 0


def test_large_images_are_not_tried_in_large_pieces() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, obs: Tensor) -> Tensor:
            sizes.add(len(obs))
            return obs.flatten(1).float().mean(1, keepdim=True) * self.scale

    network = Mean()
    for side, expected in ((64, {32, 64, 128}), (128, {32, 64}), (512, {32})):
        sizes: set[int] = set()
        probe(
            network,
            list(network.parameters()),
            torch.zeros(256, 1, 1, 1, dtype=torch.uint8).expand(256, side, side, 3),
            seconds=0.0,
        )
        assert sizes == expected


@pytest.mark.parametrize(
    ("rates", "size"),
    [((100.0, 98.0, 90.0), 64), ((100.0, 96.0, 96.0), 32), ((95.0, 98.0, 100.0), 128)],
)
def test_of_sizes_that_are_as_fast_the_largest_is_taken(
    monkeypatch: pytest.MonkeyPatch, rates: tuple[float, ...], size: int
) -> None:
    found: dict[int, float] = dict(zip((32, 64, 128), rates, strict=True))
    monkeypatch.setattr(
        probe_module, "_rate", lambda network, parameters, obs, precision, seconds: found[len(obs)]
    )
    network = Brittle()
    assert (
        probe(network, list(network.parameters()), OBS.repeat(2, 1, 1, 1)).micro_batch["fp32"]
        == size
    )


def test_a_moment_in_which_others_use_the_machine_chooses_no_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lasts for the first three tries, which all sizes have a share in."""
    tried: list[int] = []

    def rate(network: Any, parameters: Any, obs: Tensor, precision: str, seconds: float) -> float:
        tried.append(len(obs))
        return {32: 70.0, 64: 90.0, 128: 100.0}[len(obs)] * (0.5 if len(tried) <= 3 else 1.0)

    monkeypatch.setattr(probe_module, "_rate", rate)
    network = Brittle()
    obs = OBS.repeat(2, 1, 1, 1)
    rates = probe_module._rates(
        network, list(network.parameters()), obs, "fp32", sizes=[32, 64, 128], seconds=0.25
    )
    assert rates == {32: 70.0, 64: 90.0, 128: 100.0}
    assert tried == [32, 64, 128] * 3


FOUND = Findings({"fp32": 128, "bf16": 256}, {"fp32": 100.0, "bf16": 200.0}, 1.0)
WRONG = replace(FOUND, error=20.0)
LEFT_OPEN = {"aux_precision": "auto"}


CPU = Machine(device="cpu", num_cores=2, has_compiler=True)


def plan_after(network: nn.Module, wishes: dict[str, Any], **workload: Any) -> Plan:
    """The plan of a run on images; a long one, unless it is said how long."""
    asked = Workload(**{"has_images": True, "can_be_probed": True, "num_passes": 10**6, **workload})
    return probed_plan(
        ComputeConfig(device="cpu", **wishes),
        CPU,
        asked,
        network,
        list(network.parameters()),
        (16, 16, 3),
    )


@pytest.mark.parametrize(
    ("found", "wishes", "has_aux", "expected"),
    [
        (FOUND, LEFT_OPEN, True, (128, 256, "bf16")),
        (WRONG, LEFT_OPEN, True, (128, 128, "fp32")),
        (FOUND, LEFT_OPEN | {"micro_batch": 32}, True, (32, 32, "bf16")),
        (FOUND, LEFT_OPEN | {"aux_micro_batch": 32}, True, (128, 32, "bf16")),
        (FOUND, LEFT_OPEN | {"micro_batch": 32, "aux_micro_batch": 16}, True, (32, 16, "bf16")),
        (FOUND, LEFT_OPEN | {"micro_batch": None}, True, (None, None, "bf16")),
        (FOUND, {}, True, (128, 128, "fp32")),
        (FOUND, {"policy_precision": "bf16"}, False, (256, 128, "fp32")),
        (FOUND, {"compile": "on"}, False, (None, None, "fp32")),
    ],
)
def test_what_is_chosen_from_the_findings(
    monkeypatch: pytest.MonkeyPatch,
    found: Findings,
    wishes: dict[str, Any],
    has_aux: bool,
    expected: tuple[int | None, int | None, str],
) -> None:
    monkeypatch.setattr(probe_module, "probe_once", lambda *args, **options: found)
    plan = plan_after(small_network(), wishes, has_aux=has_aux)
    assert (plan.micro_batch["policy"], plan.micro_batch["aux"], plan.precision["aux"]) == expected
    assert plan.micro_batch["value"] == plan.micro_batch["policy"]


def test_a_given_size_is_the_largest_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        probe_module,
        "probe_once",
        lambda network, parameters, obs, **options: sizes.append(len(obs)) or FOUND,
    )
    for given, minibatch_size in ((16, 0), ("auto", 0), ("auto", 24)):
        plan_after(
            small_network(),
            {"micro_batch": given, **LEFT_OPEN},
            has_aux=True,
            minibatch_size=minibatch_size,
        )
    assert sizes == [16, 128, 24]


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "wishes", "has_aux", "said"),
    [
        (0.2, {"policy_precision": "bf16"}, False, ["compute.policy_precision"]),
        (
            0.2,
            {"policy_precision": "bf16", "aux_precision": "bf16"},
            True,
            ["compute.policy_precision and compute.aux_precision"],
        ),
        (0.2, {"aux_precision": "bf16"}, True, ["compute.aux_precision"]),
        (0.2, {"aux_precision": "bf16"}, False, []),
        (0.2, LEFT_OPEN, True, []),
        (0.0, {"policy_precision": "bf16"}, True, []),
    ],
)
@pytest.mark.parametrize("num_passes", [1, 10**6])
def test_bf16_that_is_wrong_and_used_because_someone_said_so_is_told(
    wrong: float, wishes: dict[str, Any], has_aux: bool, said: list[str], num_passes: int
) -> None:
    plan = plan_after(Brittle(wrong=wrong), wishes, has_aux=has_aux, num_passes=num_passes)
    warnings = [remark for remark in plan.remarks if "and used because" in remark]
    assert len(warnings) == len(said)
    for line, name in zip(warnings, said, strict=True):
        assert re.fullmatch(
            r"bf16 is wrong on this machine \(off by 5\d times what rounding makes\), "
            f"and used because of {name}",
            line,
        )


def test_short_runs_are_not_probed_and_a_resumed_run_follows_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        probe_module, "probe_once", lambda *args, **options: asked.append(1) or FOUND
    )
    config = images(tmp_path, aux_precision="auto")
    with start_run(config, make_env=Image) as run:
        assert not asked and (
            run.compute.plan.micro_batch["policy"],
            run.compute.plan.precision["aux"],
        ) == (64, "fp32")
    monkeypatch.setattr(plan_module, "WORTH_PROBING", 1)
    with start_run(config, make_env=Image) as run:
        run.save()
    assert Config.from_json((run.directory / "config.json").read_text()) == config, (
        "what was asked for stays what it was"
    )
    card = json.loads((run.directory / "card.json").read_text())
    assert len(asked) == 1 and Plan.from_dict(card["plan"]) == run.compute.plan
    with resume_run(
        run.directory, make_env=Image
    ) as again:  # what this machine finds now does not matter
        assert len(asked) == 1 and again.compute.plan == run.compute.plan
        assert (again.compute.plan.micro_batch["aux"], again.compute.plan.precision["aux"]) == (
            256,
            "bf16",
        )


def images(tmp_path: Path, **compute: str) -> Config:
    """PPG with two networks of images."""
    model = ModelConfig(channels=(4, 8), blocks=1, hidden_sizes=(16,))
    on_cpu = replace(ComputeConfig(device="cpu"), **compute)
    return replace(tiny(tmp_path, aux=tiny_aux()), model=model, compute=on_cpu)


def seen_precisions(run: Run) -> dict[str, set[bool]]:
    """Train, and note for each stage whether the encoders ran under autocast; heads never may."""
    seen: dict[str, set[bool]] = {}
    stage = [""]

    def encoder(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.setdefault(stage[0].split()[0], set()).add(output.dtype == torch.bfloat16)

    def head(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert inputs[0].dtype == output.dtype == torch.float32

    assert run.agent.value_encoder is not None
    for module in (run.agent.encoder, run.agent.value_encoder):
        module.register_forward_hook(encoder)
    for module in (run.agent.value_head, run.agent.aux_value_head, run.agent.policy_head.linear):
        assert module is not None
        module.register_forward_hook(head)
    run.stage = lambda name: stage.__setitem__(0, name)  # type: ignore[method-assign]
    learn(run)
    return seen


@pytest.mark.parametrize(
    ("policy", "aux"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")]
)
def test_each_phase_runs_in_its_precision_and_the_rollout_in_that_of_the_policy_phase(
    tmp_path: Path, policy: str, aux: str
) -> None:
    with start_run(
        images(tmp_path, policy_precision=policy, aux_precision=aux), make_env=Image
    ) as run:
        seen = seen_precisions(run)
    assert seen["rollout"] == seen["policy"] == {policy == "bf16"}
    assert seen["auxiliary"] == {aux == "bf16"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_policy_that_is_updated_is_the_one_that_acted(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another precision the ratios of the first minibatch would not be one, and the surrogate
    would see a policy that never acted.
    """
    config = images(tmp_path, policy_precision=precision).changed({"ppo.num_minibatches": 1})
    # So that rounding is seen in the probabilities.
    config = config.changed({"model.policy_head_scale": 3.0})
    with start_run(config, make_env=Image) as run:
        rollout = run.buffer.next_rollout()
        run.collect(rollout)

        def divergence() -> float:
            return policy_phase(run.learner, rollout)["losses/approx_kl"]

        monkeypatch.setattr(optimize, "step_", lambda *args, **options: None)  # nothing moves
        same = divergence()
        other_one = "bf16" if precision == "fp32" else "fp32"
        run.compute.plan = replace(
            run.compute.plan, precision={**run.compute.plan.precision, "policy": other_one}
        )
        other = divergence()
    assert abs(same) < 1e-7 and abs(other) > 20 * abs(same)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_policy_that_is_distilled_is_the_old_one_in_the_same_precision(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another precision the divergence of the first minibatch would not be zero, and its
    gradient would make up for rounding.
    """
    config = images(
        tmp_path,
        aux_precision=precision,
        policy_precision="bf16" if precision == "fp32" else "fp32",
    )
    with start_run(config.changed({"model.policy_head_scale": 3.0}), make_env=Image) as run:
        while not run.buffer.is_full:
            run.collect(run.buffer.next_rollout())

        def divergence() -> float:
            return auxiliary_phase(run.learner, run.buffer)["losses/aux/kl_loss"]

        monkeypatch.setattr(optimize, "step_", lambda *args, **options: None)  # nothing moves
        same = divergence()
        # In the policy phase's precision.
        old = phases.dist_params(run.agent, run.buffer.segments(), compute=run.compute)
        monkeypatch.setattr(phases, "dist_params", lambda *args, **options: old)
        other = divergence()
    assert abs(same) < 1e-7 and other > 20 * abs(same)


def test_heads_and_their_gradients_are_computed_in_fp32(tmp_path: Path) -> None:
    with start_run(images(tmp_path), make_env=Image) as run:
        rollout = run.buffer.next_rollout()
        run.collect(rollout)
        features: list[Tensor] = []
        head = run.agent.value_head
        head.register_forward_hook(lambda module, inputs, output: features.append(inputs[0]))
        loss = phases.AuxiliaryLoss(run.agent, tiny_aux(), "bf16")
        samples = AuxiliarySamples(
            rollout.obs,
            rollout.first,
            rollout.state,
            None,
            torch.ones_like(rollout.value),
            torch.zeros(4, 8, 3).log_softmax(-1),
        )
        settings = StepSettings(
            "aux", run.agent.networks(), torch.optim.Adam(run.agent.parameters(), lr=0.0), None
        )
        run.compute.gradient_step(loss, settings)(Minibatch(samples, torch.arange(4), split=True))
        (seen,) = features
        error = (seen.double() @ head.weight.double().T + head.bias.double()).squeeze(-1) - 1
        expected = (error.flatten() @ seen.flatten(0, 1).double()) / error.numel()
        assert head.weight.grad is not None
        torch.testing.assert_close(
            head.weight.grad[0].double(), expected.detach(), rtol=1e-5, atol=1e-7
        )


@pytest.mark.long
def test_bf16_in_the_auxiliary_phase_stays_near_fp32(tmp_path: Path) -> None:
    low, exact = (
        train(images(tmp_path, aux_precision=name), make_env=Image) for name in ("bf16", "fp32")
    )
    distance = (
        sum(
            float((a - b).detach().square().sum())
            for a, b in zip(low.agent.parameters(), exact.agent.parameters(), strict=True)
        )
        ** 0.5
    )
    size = sum(float(b.detach().square().sum()) for b in exact.agent.parameters()) ** 0.5
    assert 0 < distance < 0.02 * size
