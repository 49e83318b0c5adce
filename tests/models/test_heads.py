"""What heads make of spaces, masks and settings; what masks and equal policies promise exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from phasicrl.config import ActionConfig, ModelConfig
from phasicrl.models.heads import Normal, PolicyHead, TanhNormal
from phasicrl.spaces import choices
from tests.models.test_distributions import log_slope, normal

S, L, A, D = 3, 4, 5, 6
MASK = torch.tensor([True, False, True, True, False])

BOX = gym.spaces.Box(np.array([-2, 0], np.float32), np.array([4, 1], np.float32))
# Components: 4 options, two continuous, 2 options, 4 options, one continuous.
MIXED = gym.spaces.Dict(
    a=gym.spaces.Discrete(4),
    b=gym.spaces.Box(-2, 4, (2, 1)),
    c=gym.spaces.Tuple((gym.spaces.MultiDiscrete([2, 4]), gym.spaces.Box(0, 1, ()))),
)
CASES: dict[str, tuple[gym.Space[Any], ActionConfig]] = {
    "discrete": (gym.spaces.Discrete(A), ActionConfig()),
    "multi-discrete": (gym.spaces.MultiDiscrete([3, 2, 3]), ActionConfig()),
    "multi-binary": (gym.spaces.MultiBinary(3), ActionConfig()),
    "box": (BOX, ActionConfig()),
    "box-softplus": (
        BOX,
        ActionConfig(std="softplus", mean="tanh", std_value=0.3, min_std=1e-3, squash="clip"),
    ),
    "box-exp-tanh": (BOX, ActionConfig(std="exp", std_value=0.5, squash="tanh")),
    "box-fixed": (BOX, ActionConfig(std="fixed", std_value=0.7)),
    "mixed": (MIXED, ActionConfig()),
    "mixed-tanh": (MIXED, ActionConfig(std="softplus", squash="tanh")),
}
every_case = pytest.mark.parametrize("case", CASES)


def make_head(
    space: gym.Space[Any] | None = None, action: ActionConfig | None = None, scale: float = 2.0
) -> PolicyHead:
    model = ModelConfig(policy_head_scale=scale)
    space = gym.spaces.Discrete(A) if space is None else space  # an empty Dict is false
    return PolicyHead(space, D, model, action or ActionConfig(), Generator().manual_seed(0))


def set_outputs(head: PolicyHead, outputs: list[float]) -> None:
    """Make the linear layer give these numbers, whatever the features."""
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(torch.tensor(outputs))


def random_mask(head: PolicyHead, space: gym.Space[Any], *shape: int, seed: int = 0) -> Tensor:
    """A mask that allows at least the first option of every component."""
    mask = torch.rand(*shape, head.mask_size, generator=Generator().manual_seed(seed)) < 0.5
    first = np.cumsum([0, *choices(space)])[:-1].tolist()
    mask[..., first] = True
    return mask


def features(seed: int = 0) -> Tensor:
    return torch.randn(S, L, D, generator=Generator().manual_seed(seed))


@every_case
def test_equal_policies_have_exactly_no_divergence_and_no_gradient(case: str) -> None:
    head = make_head(*CASES[case])
    policy = head(features())
    old = head.distribution(policy.dist_params.detach().clone())
    divergence = policy.kl_from(old)
    assert divergence.tolist() == [[0.0] * L] * S
    divergence.mean().backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_masked_actions_have_no_probability_and_are_never_drawn() -> None:
    policy = make_head()(features(), MASK.expand(S, L, A))
    assert not policy.log_probs.exp()[..., ~MASK].any()
    torch.testing.assert_close(policy.log_probs.exp()[..., MASK].sum(-1), torch.ones(S, L))
    generator = Generator().manual_seed(0)
    drawn = torch.stack([policy.sample(generator) for _ in range(500)])
    assert set(drawn.unique().tolist()) == {0, 2, 3}
    assert MASK[policy.mode()].all()


def test_a_mask_leaves_the_distribution_over_what_is_allowed() -> None:
    head = make_head()
    masked, free = head(features(), MASK.expand(S, L, A)), head(features())
    old = head(features(1), MASK.expand(S, L, A))
    p, q = (policy.log_probs.detach().double().exp()[..., MASK].numpy() for policy in (old, masked))
    torch.testing.assert_close(
        masked.log_probs[..., MASK], free.log_probs[..., MASK].log_softmax(-1)
    )
    np.testing.assert_allclose(
        masked.entropy().detach().numpy(), scipy.stats.entropy(q, axis=-1), rtol=1e-4
    )
    np.testing.assert_allclose(
        masked.kl_from(old).detach().numpy(),
        scipy.stats.entropy(p, q, axis=-1),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("of", ["log_prob", "entropy", "kl_from"])
def test_masked_actions_get_no_gradient(of: str) -> None:
    head = make_head()
    mask = MASK.expand(S, L, A)
    policy = head(features(), mask)
    if of == "log_prob":
        loss = policy.log_prob(torch.full((S, L), 2))
    elif of == "entropy":
        loss = policy.entropy()
    else:
        loss = policy.kl_from(head.distribution(head(features(1), mask).dist_params.detach()))
    loss.sum().backward()
    for gradient in (head.linear.weight.grad, head.linear.bias.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert not gradient[~MASK].any()
        assert (gradient[MASK] != 0).all()


def test_masks_hold_for_their_own_step_only() -> None:
    mask = torch.ones(S, L, A, dtype=torch.bool)
    mask[1, 2] = torch.tensor([False, False, False, True, False])
    head = make_head()
    policy, free = head(features(), mask), head(features())
    assert policy.log_prob(torch.full((S, L), 3))[1, 2] == 0  # a single allowed action is certain
    assert policy.entropy()[1, 2] == 0
    others = mask.all(-1)
    assert torch.equal(policy.log_probs[others], free.log_probs[others])


@every_case
def test_a_policy_is_made_again_exactly_from_its_parameters(case: str) -> None:
    space, action_config = CASES[case]
    head = make_head(space, action_config)
    for mask in (None, random_mask(head, space, S, L)):
        policy = head(features(), mask)
        again = head.distribution(policy.dist_params.clone())
        action = policy.sample(Generator().manual_seed(1))
        assert torch.equal(again.log_prob(action), policy.log_prob(action))
        assert torch.equal(again.entropy(), policy.entropy())
        assert torch.equal(again.mode(), policy.mode())
        assert torch.equal(again.sample(Generator().manual_seed(1)), action)
        assert policy.dist_params.shape == (S, L, head.num_dist_params)


@every_case
def test_the_head_follows_the_action_space(case: str) -> None:
    space, action_config = CASES[case]
    head, length = (
        make_head(space, action_config),
        {"d": 0, "m": 3, "b": 2}[case[0]] if not case.startswith("mixed") else 6,
    )
    assert head.action_shape == ((length,) if length else ())
    assert head.action_dtype == (
        torch.int64 if case in ("discrete", "multi-discrete", "multi-binary") else torch.float32
    )
    assert head.mask_size == sum(choices(space))
    policy = head(features())
    for action in (
        policy.sample(Generator().manual_seed(0)),
        policy.mode(),
        head.env_action(policy.mode()),
    ):
        assert action.shape == (S, L, *head.action_shape)
        assert action.dtype == head.action_dtype
    for numbers in (policy.log_prob(policy.mode()), policy.entropy(), policy.kl_from(policy)):
        assert numbers.shape == (S, L)


def test_a_tree_of_one_discrete_space_acts_in_vectors() -> None:
    tree, plain = make_head(gym.spaces.Tuple((gym.spaces.Discrete(A),))), make_head()
    assert tree.action_shape == (1,)
    action = plain(features()).sample(Generator().manual_seed(0))
    assert torch.equal(
        tree(features()).log_prob(action.unsqueeze(-1)), plain(features()).log_prob(action)
    )


def test_weights_are_saved_under_names_that_last_and_nothing_else_is() -> None:
    assert set(make_head().state_dict()) == {"linear.weight", "linear.bias"}
    assert set(make_head(MIXED).state_dict()) == {"linear.weight", "linear.bias", "log_std"}
    assert set(make_head(BOX, ActionConfig(std="fixed")).state_dict()) == {
        "linear.weight",
        "linear.bias",
    }


# Products of independent components


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 1000), st.booleans())
def test_a_joint_policy_is_a_distribution_over_all_combinations_that_masks_allow(
    nvec: list[int], seed: int, masked: bool
) -> None:
    space = gym.spaces.MultiDiscrete(nvec)
    head = make_head(space)
    mask = (
        random_mask(head, space, 1, seed=seed)
        if masked
        else torch.ones(1, sum(nvec), dtype=torch.bool)
    )
    combinations = torch.tensor(list(itertools.product(*map(range, nvec))))
    number = len(combinations)
    inputs = [
        torch.randn(D, generator=Generator().manual_seed(seed + i)).expand(number, D)
        for i in range(2)
    ]
    new, old = (head(one, mask.expand(number, -1)) for one in inputs)
    first = np.cumsum([0, *nvec])[:-1]
    allowed = mask[0][combinations + torch.from_numpy(first)].all(-1).numpy()
    p, q = (policy.log_prob(combinations).detach().double().exp().numpy() for policy in (old, new))
    assert q[allowed].min() > 0
    assert not q[~allowed].any()
    assert q.sum() == pytest.approx(1, abs=1e-5)
    assert new.entropy().tolist() == pytest.approx([scipy.stats.entropy(q)] * number, abs=1e-5)
    assert new.kl_from(old).tolist() == pytest.approx(
        [scipy.stats.entropy(p[allowed], q[allowed])] * number, abs=1e-5
    )
    assert new.log_prob(new.mode())[0].exp().item() == pytest.approx(q.max())
    assert mask[0][new.sample(Generator().manual_seed(seed)) + torch.from_numpy(first)].all()


def test_combinations_are_drawn_by_their_probabilities() -> None:
    head = make_head(gym.spaces.MultiDiscrete([3, 2, 3]), scale=0.5)
    policy, number = head(features()[:1, :1].expand(20_000, 1, D)), 20_000
    counts = torch.bincount(
        policy.sample(Generator().manual_seed(0))[:, 0] @ torch.tensor([6, 3, 1]), minlength=18
    )
    combinations = torch.tensor(list(itertools.product(range(3), range(2), range(3))))
    expected = (
        head(features()[:1, :1].expand(18, 1, D))
        .log_prob(combinations.unsqueeze(1))
        .detach()
        .double()[:, 0]
        .softmax(0)
    )
    assert scipy.stats.chisquare(counts.numpy(), number * expected.numpy()).pvalue > 0.01


def mixed_head(
    **action: Any,
) -> tuple[PolicyHead, Tensor, list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A head with chosen outputs, its mask, each discrete component's probabilities, and means and
    deviations.
    """
    head = make_head(MIXED, ActionConfig(**action))
    # Two options; four of the first and of the last discrete component; three means.
    set_outputs(
        head, [0.3, -0.4, *(1.0, 0.5, 0.0, -1.0), *(-0.2, 0.1, 0.9, 2.0), *(0.5, -0.7, 1.5)]
    )
    with torch.no_grad():
        assert head.log_std is not None
        head.log_std.copy_(torch.tensor([0.4, 0.8, 1.2]).log())
    # By component: the first may not take its options 0 and 2, the last not its option 3.
    mask = torch.tensor([False, True, False, True, True, True, True, True, True, False])
    weights = [
        np.exp([-np.inf, 0.5, -np.inf, -1]),
        np.exp([0.3, -0.4]),
        np.exp([-0.2, 0.1, 0.9, -np.inf]),
    ]
    return (
        head,
        mask,
        [w / w.sum() for w in weights],
        (np.array([0.5, -0.7, 1.5]), np.array([0.4, 0.8, 1.2])),
    )


def test_a_mixed_action_is_the_product_of_its_parts() -> None:
    head, mask, probabilities, (mean, std) = mixed_head()
    policy = head(torch.zeros(1, D), mask.unsqueeze(0))
    action = torch.tensor([[3.0, 0.1, -0.9, 1.0, 2.0, 3.0]])
    log_prob = (
        math.log(probabilities[0][3] * probabilities[1][1] * probabilities[2][2])
        + normal(mean, std).logpdf([0.1, -0.9, 3.0]).sum()
    )
    assert policy.log_prob(action).item() == pytest.approx(log_prob, rel=1e-5)
    entropy = sum(scipy.stats.entropy(p) for p in probabilities) + np.sum(
        normal(mean, std).entropy()
    )
    assert policy.entropy().item() == pytest.approx(entropy, rel=1e-5)
    assert policy.mode()[0].tolist() == pytest.approx([1, 0.5, -0.7, 0, 2, 1.5])
    assert policy.stds.mean().item() == pytest.approx(0.8)
    drawn = torch.cat([policy.sample(Generator().manual_seed(seed)) for seed in range(200)])
    assert [set(drawn[:, place].tolist()) for place in (0, 3, 4)] == [{1, 3}, {0, 1}, {0, 1, 2}]
    assert np.abs((drawn[:, [1, 2, 5]].numpy() - mean) / std).max() < 4.5
    with torch.no_grad():
        head.linear.bias.add_(torch.linspace(-1, 1, 13))
    changed = head(torch.zeros(1, D), mask.unsqueeze(0))
    shift = np.linspace(-1, 1, 13)
    raised = [
        probabilities[i] * np.exp(part)
        for i, part in enumerate((shift[2:6], shift[:2], shift[6:10]))
    ]
    divergence = sum(
        scipy.stats.entropy(p[p > 0], q[p > 0]) for p, q in zip(probabilities, raised, strict=True)
    )
    divergence += (0.5 * (shift[10:] / std) ** 2).sum()
    assert changed.kl_from(policy).item() == pytest.approx(divergence, rel=1e-5)


def test_only_continuous_components_have_a_deviation() -> None:
    for case, (space, action) in CASES.items():
        assert (make_head(space, action)(features()).stds is None) == (
            case in ("discrete", "multi-discrete", "multi-binary")
        )


@every_case
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    space, action_config = CASES[case]
    head = make_head(space, action_config).double()
    mask = random_mask(head, space, 2)
    old = head(torch.randn(2, D, dtype=torch.float64, generator=Generator().manual_seed(5)), mask)
    old, action = (
        head.distribution(old.dist_params.detach()),
        old.sample(Generator().manual_seed(1)),
    )
    names, values = zip(*head.named_parameters(), strict=True)

    def numbers(inputs: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        policy = torch.func.functional_call(
            head, dict(zip(names, weights, strict=True)), (inputs, mask)
        )
        return policy.log_prob(action), policy.entropy(), policy.kl_from(old)

    inputs = torch.randn(
        2, D, dtype=torch.float64, generator=Generator().manual_seed(6), requires_grad=True
    )
    assert torch.autograd.gradcheck(numbers, (inputs, *values), atol=1e-6, fast_mode=True)


# Normal distributions


@every_case
def test_no_gradient_goes_through_a_draw(case: str) -> None:
    assert not make_head(*CASES[case])(features()).sample(Generator().manual_seed(0)).requires_grad


# Squashing


@pytest.mark.parametrize("case", ["box-exp-tanh", "mixed-tanh"])
def test_heads_that_squash_ask_the_squashed_distribution(case: str) -> None:
    space, action_config = CASES[case]
    squashing, plain = (
        make_head(space, action_config),
        make_head(space, replace(action_config, squash="none")),
    )
    policy, other = squashing(features()), plain(features())
    action = policy.sample(Generator().manual_seed(0))
    # What is stored is before the tanh.
    assert torch.equal(action, other.sample(Generator().manual_seed(0)))
    continuous = [1, 2, 5] if case == "mixed-tanh" else [0, 1]
    correction = torch.from_numpy(log_slope(action[..., continuous].double().numpy())).sum(-1)
    torch.testing.assert_close(
        (other.log_prob(action) - policy.log_prob(action)).double(),
        correction,
        rtol=1e-4,
        atol=1e-4,
    )
    mean, std = policy.dist_params[..., squashing.mask_size :].chunk(2, -1)
    difference = TanhNormal(mean, std).entropy().sum(-1) - Normal(mean, std).entropy().sum(-1)
    torch.testing.assert_close(policy.entropy() - other.entropy(), difference)


SQUASHED = {
    ("none", False): [[-9.0, 0.0], [1.0, 0.5], [9.0, 9.0]],
    ("none", True): [[-26.0, 0.5], [4.0, 0.75], [28.0, 5.0]],
    ("clip", False): [[-2.0, 0.0], [1.0, 0.5], [4.0, 1.0]],
    ("clip", True): [[-2.0, 0.5], [4.0, 0.75], [4.0, 1.0]],
    ("tanh", False): [
        [-2 + 6 * (1 + math.tanh(-9)) / 2, 0.5],
        [1 + 3 * math.tanh(1), (1 + math.tanh(0.5)) / 2],
        [4.0, 1.0],
    ],
}


@pytest.mark.parametrize(("squash", "rescale"), SQUASHED)
def test_the_environment_gets_what_the_squash_says(squash: Any, rescale: bool) -> None:
    action = torch.tensor([[-9.0, 0.0], [1.0, 0.5], [9.0, 9.0]])
    head = make_head(BOX, ActionConfig(squash=squash, rescale=rescale))
    torch.testing.assert_close(head.env_action(action), torch.tensor(SQUASHED[squash, rescale]))
    torch.testing.assert_close(
        head.env_action(action.expand(2, 3, 2)),
        torch.tensor(SQUASHED[squash, rescale]).expand(2, 3, 2),
    )


def test_only_continuous_components_are_squashed() -> None:
    action = torch.tensor([[3.0, 9.0, 0.0, 1.0, 2.0, 9.0]])
    head = make_head(MIXED, ActionConfig(squash="tanh"))
    assert head.env_action(action)[0].tolist() == pytest.approx([3, 4, 1, 1, 2, 1])
    assert action[0, 1] == 9  # the stored action stays as it is
    for case in ("discrete", "multi-discrete"):
        drawn = make_head(*CASES[case])(features()).sample(Generator().manual_seed(0))
        assert torch.equal(make_head(*CASES[case]).env_action(drawn), drawn)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2, unique=True),
    st.sampled_from(["clip", "tanh"]),
)
@example([-0.1, 0.2], "clip")  # −0.1 + (0.2 + 0.1) is 0.20000002 in single precision
def test_no_rounding_leads_out_of_the_bounds(bounds: list[float], squash: Any) -> None:
    space = gym.spaces.Box(min(bounds), max(bounds), (1,))
    head = make_head(space, ActionConfig(squash=squash, rescale=True))
    given_action = head.env_action(torch.linspace(-12, 12, 997).unsqueeze(-1)).numpy()
    assert given_action[0] == space.low
    assert given_action[-1] == space.high
    assert ((given_action >= space.low) & (given_action <= space.high)).all()


def test_the_distribution_does_not_know_of_clipping_and_stretching() -> None:
    plain, clipped = (
        make_head(BOX, ActionConfig(squash=squash, rescale=squash == "clip"))(features())
        for squash in ("none", "clip")
    )
    action = plain.sample(Generator().manual_seed(0))
    assert torch.equal(plain.log_prob(action), clipped.log_prob(action))
    assert torch.equal(plain.entropy(), clipped.entropy())


# Means and deviations


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


DEVIATIONS: list[tuple[dict[str, Any], list[float]]] = [
    ({"std": "parameter"}, [0.3, 0.3]),
    ({"std": "fixed"}, [0.3, 0.3]),
    ({"std": "range"}, [0.3 * 6, 0.3]),
    ({"std": "range", "rescale": True}, [0.6, 0.6]),
    ({"std": "range", "squash": "tanh"}, [0.6, 0.6]),
    (
        {"std": "softplus", "min_std": 0.01},
        [0.3 * softplus(0.5) / math.log(2) + 0.01, 0.3 * softplus(-2) / math.log(2) + 0.01],
    ),
    (
        {"std": "softplus_tanh", "min_std": 0.01},
        [0.3 * softplus(math.tanh(x)) / math.log(2) + 0.01 for x in (0.5, -2)],
    ),
    ({"std": "exp", "min_std": 0.01}, [0.3 * math.exp(0.5) + 0.01, 0.3 * math.exp(-2) + 0.01]),
]


@pytest.mark.parametrize(
    ("mean", "action", "expected"),
    [
        (mean, action, expected)
        for mean in ("raw", "tanh")
        for action, expected in DEVIATIONS
        if (mean, action.get("squash")) != ("tanh", "tanh")
    ],
)
def test_means_and_deviations_are_made_as_configured(
    mean: Any, action: dict[str, Any], expected: list[float]
) -> None:
    head = make_head(BOX, ActionConfig(mean=mean, std_value=0.3, **action))
    set_outputs(head, [1.5, -0.2, 0.5, -2.0][: head.linear.out_features])
    means = [math.tanh(1.5), math.tanh(-0.2)] if mean == "tanh" else [1.5, -0.2]
    policy = head(features())
    torch.testing.assert_close(
        policy.dist_params, torch.tensor([*means, *expected]).expand(S, L, 4)
    )
    torch.testing.assert_close(policy.stds, torch.tensor(expected).expand(S, L, 2))
    torch.testing.assert_close(policy.mode(), torch.tensor(means).expand(S, L, 2))


@pytest.mark.parametrize("std", ["softplus", "softplus_tanh", "exp"])
def test_deviations_of_the_features_start_at_the_value_given(std: Any) -> None:
    head = make_head(BOX, ActionConfig(std=std, std_value=0.3), scale=1e-4)
    torch.testing.assert_close(
        head(features()).dist_params[..., 2:], torch.full((S, L, 2), 0.3), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("std", ["parameter", "softplus", "softplus_tanh", "exp", "fixed", "range"])
def test_deviations_are_trained_unless_they_are_fixed(std: Any) -> None:
    head = make_head(BOX, ActionConfig(std=std))
    head(features()).entropy().sum().backward()
    assert head.linear.bias.grad is not None
    if head.log_std is not None:
        assert std == "parameter"
        assert head.log_std.grad is not None
        assert head.log_std.grad.tolist() == pytest.approx([S * L] * 2)  # ∂ entropy / ∂ log std = 1
    assert head.linear.bias.grad.any() == (std in ("softplus", "softplus_tanh", "exp"))
    assert not head.linear.bias.grad[:2].any()


# What is refused


INTEGERS = gym.spaces.Box(0, 3, (2,), np.int64)


@pytest.mark.parametrize(
    "space",
    [gym.spaces.Text(3), gym.spaces.Dict(), INTEGERS, gym.spaces.Tuple((BOX, gym.spaces.Text(2)))],
)
def test_other_action_spaces_are_refused_with_what_is_supported(space: gym.Space[Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"(Text|Dict|Box)\(.*\) are not supported; supported: Discrete, MultiDiscrete, "
        "MultiBinary, Box",
    ):
        make_head(space)


@pytest.mark.parametrize(
    ("needs", "action"),
    [
        (r"action\.std range", {"std": "range"}),
        (r"action\.squash clip", {"squash": "clip"}),
        (r"action\.squash tanh", {"squash": "tanh"}),
        (r"action\.rescale", {"rescale": True}),
        (r"action\.squash clip and action\.rescale", {"squash": "clip", "rescale": True}),
    ],
)
@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (0.0, math.inf), (-3e38, 3e38)])
def test_bounds_are_asked_for_where_they_are_needed(
    needs: str, action: dict[str, Any], bounds: tuple[float, float]
) -> None:
    space = gym.spaces.Dict(a=BOX, b=gym.spaces.Box(*bounds, (2,)))
    with pytest.raises(
        ValueError,
        match=rf"Box\(.*\) have no bounds that are finite and apart, which {needs} cannot.*; "
        r"take action\.std parameter",
    ):
        make_head(space, ActionConfig(**action))
    make_head(BOX, ActionConfig(**action))
    head = make_head(space, ActionConfig())
    action_stored = head(features()).sample(Generator().manual_seed(0))
    assert torch.equal(head.env_action(action_stored), action_stored)


def test_a_component_that_cannot_move_has_no_fraction_of_its_range() -> None:
    space = gym.spaces.Box(np.zeros(2, np.float32), np.array([1, 0], np.float32))
    with pytest.raises(ValueError, match=r"action\.std range cannot"):
        make_head(space, ActionConfig(std="range"))
    assert make_head(space, ActionConfig(squash="tanh")).env_action(torch.ones(1, 2))[0, 1] == 0
