"""The learner: rewards, what is adapted to the KL, and measurements of its network."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from phasicrl.algorithm import train
from phasicrl.config import ObsNormConfig
from phasicrl.models.agent import dormant_fraction
from tests.helpers import NoisyEncoder, assert_same, corridor, open_run, tiny, tiny_aux


@pytest.mark.parametrize("optimizer", ["own", "shared"])
def test_the_learning_rate_follows_the_kl_in_the_policy_phase(
    tmp_path: Path, optimizer: Literal["own", "shared"]
) -> None:
    """An auxiliary optimizer of its own keeps its rate."""
    changes = {
        "ppo.schedule": "adaptive_kl", "ppo.schedule_kl": 0.01, "ppo.learning_rate": 2e-3,
        "ppo.value_learning_rate": 4e-3, "ppo.policy_epochs": 2, "ppo.value_epochs": 1,
    }  # fmt: skip
    aux = tiny_aux(optimizer=optimizer, learning_rate=1e-3)
    learner = open_run(tiny(tmp_path, aux=aux).with_updates(changes)).learner
    learner.start_iteration()
    for kl, factor in ((1.0, 1 / 1.5), (0.01, 1 / 1.5), (1.0, 1 / 1.5**2), (1e-3, 1 / 1.5)):
        learner.adapt_learning_rate(kl)
        adams = learner.optimizers.items()
        rates = {name: [group["lr"] for group in adam.param_groups] for name, adam in adams}
        assert rates["policy"] == rates["value"] == pytest.approx([2e-3 * factor, 4e-3 * factor])
        assert rates["aux"] == ([1e-3, 1e-3] if optimizer == "own" else rates["policy"])
    assert learner.start_iteration()["charts/learning_rate"] == pytest.approx(2e-3 / 1.5)


def test_the_policy_keeps_its_moments_where_the_auxiliary_phase_begins_to_share_them(
    tmp_path: Path,
) -> None:
    own, shared = (tiny(tmp_path, aux=tiny_aux(optimizer=x)) for x in ("own", "shared"))
    state, learner = train(own, make_env=corridor).learner.state_dict(), open_run(shared).learner
    learner.load_state_dict(state)
    one, other = (each["optimizers"]["policy"]["state"] for each in (learner.state_dict(), state))
    assert_same(one, other)


def test_options_that_were_changed_hold_after_a_resume(tmp_path: Path) -> None:
    """A phase that was interrupted, too, ends with the new learning rate."""
    state = open_run(tiny(tmp_path).with_updates({"ppo.learning_rate": 7e-4})).learner.state_dict()
    options = {"betas": (0.5, 0.6), "eps": 0.1, "eps_hat": True}
    changes = {"ppo.kl_penalty": 2.0} | {f"ppo.adam_{key}": options[key] for key in options}
    learner = open_run(tiny(tmp_path).with_updates(changes)).learner
    learner.load_state_dict(state | {"lr_multiplier": 0.5})  # as if `adaptive_kl` was on before
    group = learner.optimizers["policy"].param_groups[-1]
    assert (learner.kl_coef, learner.lr_multiplier) == (2, 1)
    assert group.items() >= (options | {"lr": learner.config.ppo.learning_rate}).items()


def test_one_network_has_one_learning_rate(tmp_path: Path) -> None:
    """The option of a separate value network has no effect, as the run warns."""
    changes = {"model.value_path": "shared", "ppo.value_learning_rate": 1e-3}
    learner = open_run(tiny(tmp_path).with_updates(changes)).learner
    assert learner.start_iteration() == {"charts/learning_rate": learner.config.ppo.learning_rate}


def test_dormant_units_by_hand() -> None:
    """Mean 1, so that 0.025 is the bound; and where nothing moves, all are dormant."""
    assert dormant_fraction(torch.tensor([3.95, 0.0, 0.025, 0.025])) == pytest.approx(3 / 4)
    assert dormant_fraction(torch.tensor([3.9, 0.0, 0.026, 0.074])) == 1 / 4
    assert dormant_fraction(torch.zeros(3)) == 1 and dormant_fraction(torch.ones(3)) == 0


def test_dormant_features_are_counted(tmp_path: Path) -> None:
    run = open_run(tiny(tmp_path))
    last = [each for each in run.agent.encoder.modules() if isinstance(each, nn.Linear)][-1]
    with torch.no_grad():
        last.weight[:3], last.bias[:3] = 0, 0
    rollout = run.collect(run.buffer.next_rollout())
    run.learner.start_iteration()
    found = run.learner.diagnose_networks(rollout)
    assert found == {"network/dormant_fraction": pytest.approx(3 / len(last.weight))}


def test_a_diagnosis_leaves_networks_as_they_are(tmp_path: Path) -> None:
    run = open_run(tiny(tmp_path), make_encoder=NoisyEncoder)
    rollout = run.collect(run.buffer.next_rollout())
    run.learner.start_iteration()
    run.agent.encoder.normalizer[1].eval()  # type: ignore[index, operator, union-attr]
    before = {name: each.clone() for name, each in run.agent.state_dict().items()}
    generator = torch.get_rng_state()
    assert run.learner.diagnose_networks(rollout)
    assert_same(run.agent.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [x.training for x in run.agent.encoder.modules()] == [True, True, True, False, True]


def test_clipped_observations_are_counted(tmp_path: Path) -> None:
    """No observation is clipped before there are statistics."""
    norm = ObsNormConfig(statistics="moments", clip=0.5, from_first_rollout=False)
    run = open_run(tiny(tmp_path, obs_norm=norm))
    rollout = run.collect(run.buffer.next_rollout())
    run.learner.start_iteration()
    normalizer, name = run.agent.reader.normalizer, "observations/clipped_fraction"
    assert rollout.obs.abs().max() > 0.5 and normalizer is not None
    assert run.learner.diagnose_networks(rollout)[name] == 0
    run.learner.update_observation_statistics(rollout)
    cut = ((rollout.obs.flatten(0, 1).float() - normalizer.shift) / normalizer.scale).abs() >= 0.5
    found = run.learner.diagnose_networks(rollout)[name]
    assert 0 < found < 1 and found == pytest.approx(float(cut.float().mean()))


def test_a_long_run_is_measured_thirty_times(tmp_path: Path) -> None:
    run, found = open_run(tiny(tmp_path, total_env_steps=90 * 32)), []
    rollout = run.collect(run.buffer.next_rollout())
    for _ in range(90):
        run.learner.start_iteration()
        found.append(bool(run.learner.diagnose_networks(rollout)))
    assert found == [True, False, False] * 30
