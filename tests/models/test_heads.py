"""Policy heads: spaces, masks and options; what masks and equal policies promise exactly."""

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from phasicrl.config import ActionConfig
from phasicrl.models.heads import Normal, PolicyHead, TanhNormal
from phasicrl.models.init import Initializer
from phasicrl.spaces import ActionLayout, get_nvec
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
SOFTPLUS = ActionConfig(std="softplus", mean="tanh", std_value=0.3, min_std=1e-3, squash="clip")
CASES: dict[str, tuple[gym.Space[Any], ActionConfig]] = {
    "discrete": (gym.spaces.Discrete(A), ActionConfig()),
    "multi-discrete": (gym.spaces.MultiDiscrete([3, 2, 3]), ActionConfig()),
    "multi-binary": (gym.spaces.MultiBinary(3), ActionConfig()),
    "box": (BOX, ActionConfig()),
    "box-softplus": (BOX, SOFTPLUS),
    "box-exp-tanh": (BOX, ActionConfig(std="exp", std_value=0.5, squash="tanh")),
    "mixed": (MIXED, ActionConfig()),
    "mixed-tanh": (MIXED, ActionConfig(std="softplus", squash="tanh")),
}
LENGTHS = {"multi-discrete": 3, "multi-binary": 3, "mixed": 6, "mixed-tanh": 6}
every_case = pytest.mark.parametrize("case", CASES)


def make_head(
    space: gym.Space[Any] | None = None, action: ActionConfig | None = None, scale: float = 2.0
) -> PolicyHead:
    init = Initializer("normalized", Generator().manual_seed(0))
    space = gym.spaces.Discrete(A) if space is None else space  # an empty Dict is false
    return PolicyHead(space, action or ActionConfig(), lambda n: init(nn.Linear(D, n), scale))


def set_outputs(head: PolicyHead, outputs: list[float]) -> None:
    """Make the linear layer give these numbers, whatever the features."""
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(torch.tensor(outputs))


def random_mask(head: PolicyHead, space: gym.Space[Any], *shape: int, seed: int = 0) -> Tensor:
    """Draw a mask that allows at least the first option of every component."""
    mask = torch.rand(*shape, head.mask_size, generator=Generator().manual_seed(seed)) < 0.5
    mask[..., np.cumsum([0, *get_nvec(space)])[:-1].tolist()] = True
    return mask


def features(seed: int = 0) -> Tensor:
    return torch.randn(S, L, D, generator=Generator().manual_seed(seed))


@every_case
def test_equal_policies_have_exactly_no_divergence_and_no_gradient(case: str) -> None:
    head = make_head(*CASES[case])
    policy = head(features())
    divergence = policy.kl_from(head.distribution(policy.dist_params.detach().clone()))
    assert divergence.tolist() == [[0.0] * L] * S
    divergence.mean().backward()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_a_mask_leaves_the_distribution_over_what_is_allowed() -> None:
    head = make_head()
    masked, free = head(features(), MASK.expand(S, L, A)), head(features())
    old = head(features(1), MASK.expand(S, L, A))
    p, q = (policy.log_probs.detach().double().exp()[..., MASK].numpy() for policy in (old, masked))
    expected = free.log_probs[..., MASK].log_softmax(-1)
    assert not masked.log_probs.exp()[..., ~MASK].any() and MASK[masked.mode()].all()
    torch.testing.assert_close(masked.log_probs[..., MASK], expected)
    entropy, divergence = masked.entropy().detach(), masked.kl_from(old).detach()
    np.testing.assert_allclose(entropy, scipy.stats.entropy(q, axis=-1), rtol=1e-4)
    np.testing.assert_allclose(divergence, scipy.stats.entropy(p, q, axis=-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of", ["log_prob", "entropy", "kl_from"])
def test_masked_actions_get_no_gradient(of: str) -> None:
    head, mask = make_head(), MASK.expand(S, L, A)
    old = head.distribution(head(features(1), mask).dist_params.detach())
    arguments = {"log_prob": [torch.full((S, L), 2)], "entropy": [], "kl_from": [old]}
    getattr(head(features(), mask), of)(*arguments[of]).sum().backward()
    for gradient in (head.linear.weight.grad, head.linear.bias.grad):
        assert gradient is not None and gradient.isfinite().all()
        assert not gradient[~MASK].any() and (gradient[MASK] != 0).all()


def test_masks_hold_for_their_own_step_only() -> None:
    mask = torch.ones(S, L, A, dtype=torch.bool)
    mask[1, 2] = torch.arange(A) == 3
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
    head = make_head(space, action_config)
    discrete = case in ("discrete", "multi-discrete", "multi-binary")
    shape = () if case == "discrete" else (LENGTHS.get(case, 2),)
    assert head.action_shape == shape and head.mask_size == sum(get_nvec(space))
    assert head.action_dtype == (torch.int64 if discrete else torch.float32)
    policy = head(features())
    drawn = policy.sample(Generator().manual_seed(0))
    assert not drawn.requires_grad and (policy.stds is None) == discrete
    for action in (drawn, policy.mode(), head.env_action(policy.mode())):
        assert action.shape == (S, L, *head.action_shape) and action.dtype == head.action_dtype
    for numbers in (policy.log_prob(policy.mode()), policy.entropy(), policy.kl_from(policy)):
        assert numbers.shape == (S, L)
    if discrete:
        assert torch.equal(head.env_action(drawn), drawn)


def test_a_tree_of_one_discrete_space_acts_in_vectors() -> None:
    tree, plain = make_head(gym.spaces.Tuple((gym.spaces.Discrete(A),))), make_head()
    action = plain(features()).sample(Generator().manual_seed(0))
    found = tree(features()).log_prob(action.unsqueeze(-1))
    assert tree.action_shape == (1,) and torch.equal(found, plain(features()).log_prob(action))


def test_weights_are_saved_under_names_that_last_and_nothing_else_is() -> None:
    linear = {"linear.weight", "linear.bias"}
    assert set(make_head().state_dict()) == linear
    assert set(make_head(MIXED).state_dict()) == linear | {"log_std"}
    assert set(make_head(BOX, ActionConfig(std="fixed")).state_dict()) == linear


# Products of independent components


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 1000), st.booleans())
def test_a_joint_policy_is_one_over_combinations(nvec: list[int], seed: int, masked: bool) -> None:
    space = gym.spaces.MultiDiscrete(nvec)
    head, first = make_head(space), torch.from_numpy(np.cumsum([0, *nvec])[:-1])
    mask = random_mask(head, space, 1, seed=seed) | (not masked)
    combinations = torch.tensor(list(itertools.product(*map(range, nvec))))
    number = len(combinations)
    new, old = (
        head(features(seed + i)[0, :1].expand(number, D), mask.expand(number, -1)) for i in range(2)
    )
    allowed = mask[0][combinations + first].all(-1).numpy()
    p, q = (policy.log_prob(combinations).detach().double().exp().numpy() for policy in (old, new))
    assert q[allowed].min() > 0 and not q[~allowed].any()
    assert q.sum() == pytest.approx(1, abs=1e-5)
    divergence = scipy.stats.entropy(p[allowed], q[allowed])
    assert new.entropy().tolist() == pytest.approx([scipy.stats.entropy(q)] * number, abs=1e-5)
    assert new.kl_from(old).tolist() == pytest.approx([divergence] * number, abs=1e-5)
    assert new.log_prob(new.mode())[0].exp().item() == pytest.approx(q.max())
    assert mask[0][new.sample(Generator().manual_seed(seed)) + first].all()


def test_combinations_are_drawn_by_their_probabilities() -> None:
    head, number = make_head(gym.spaces.MultiDiscrete([3, 2, 3]), scale=0.5), 20_000
    one = features()[0, :1]
    drawn = head(one.expand(number, D)).sample(Generator().manual_seed(0))
    counts = torch.bincount(drawn @ torch.tensor([6, 3, 1]), minlength=18)
    combinations = torch.tensor(list(itertools.product(range(3), range(2), range(3))))
    expected = head(one.expand(18, D)).log_prob(combinations).detach().double().softmax(0)
    assert scipy.stats.chisquare(counts.numpy(), number * expected.numpy()).pvalue > 0.01


def test_a_mixed_action_is_the_product_of_its_parts() -> None:
    head, mean, std = make_head(MIXED), np.array([0.5, -0.7, 1.5]), np.array([0.4, 0.8, 1.2])
    # Two options; four of the first and of the last discrete component; three means.
    set_outputs(head, [0.3, -0.4, *(1.0, 0.5, 0.0, -1.0), *(-0.2, 0.1, 0.9, 2.0), *mean.tolist()])
    assert head.log_std is not None
    head.log_std.data = torch.from_numpy(std).float().log()
    # By component: the first may not take its options 0 and 2, the last not its option 3.
    mask = torch.tensor([[False, True, False, True, True, True, True, True, True, False]])
    inf = np.inf
    exponents = ([-inf, 0.5, -inf, -1], [0.3, -0.4], [-0.2, 0.1, 0.9, -inf])
    probabilities = [np.exp(x) / np.exp(x).sum() for x in exponents]
    policy = head(torch.zeros(1, D), mask)
    action = torch.tensor([[3.0, 0.1, -0.9, 1.0, 2.0, 3.0]])
    log_prob = math.log(probabilities[0][3] * probabilities[1][1] * probabilities[2][2])
    log_prob += normal(mean, std).logpdf([0.1, -0.9, 3.0]).sum()
    assert policy.log_prob(action).item() == pytest.approx(log_prob, rel=1e-5)
    entropy = sum(map(scipy.stats.entropy, probabilities)) + np.sum(normal(mean, std).entropy())
    assert policy.entropy().item() == pytest.approx(entropy, rel=1e-5)
    assert policy.mode()[0].tolist() == pytest.approx([1, 0.5, -0.7, 0, 2, 1.5])
    assert policy.stds.mean().item() == pytest.approx(0.8)
    drawn = torch.cat([policy.sample(Generator().manual_seed(seed)) for seed in range(200)])
    assert [set(drawn[:, place].tolist()) for place in (0, 3, 4)] == [{1, 3}, {0, 1}, {0, 1, 2}]
    assert np.abs((drawn[:, [1, 2, 5]].numpy() - mean) / std).max() < 4.5
    shift = np.linspace(-1, 1, 13)
    head.linear.bias.data += torch.from_numpy(shift).float()
    raised = map(np.multiply, probabilities, map(np.exp, (shift[2:6], shift[:2], shift[6:10])))
    pairs = zip(probabilities, raised, strict=True)
    divergence = sum(scipy.stats.entropy(p[p > 0], q[p > 0]) for p, q in pairs)
    divergence += (0.5 * (shift[10:] / std) ** 2).sum()
    found = head(torch.zeros(1, D), mask).kl_from(policy).item()
    assert found == pytest.approx(divergence, rel=1e-5)


@every_case
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    space, action_config = CASES[case]
    head = make_head(space, action_config).double()
    mask, inputs = random_mask(head, space, 2), features().double()[0, :2].requires_grad_()
    old = head(features(1).double()[0, :2], mask)
    action = old.sample(Generator().manual_seed(1))
    old = head.distribution(old.dist_params.detach())
    names, values = zip(*head.named_parameters(), strict=True)

    def numbers(inputs: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        replaced = dict(zip(names, weights, strict=True))
        policy = torch.func.functional_call(head, replaced, (inputs, mask))
        return policy.log_prob(action), policy.entropy(), policy.kl_from(old)

    assert torch.autograd.gradcheck(numbers, (inputs, *values), atol=1e-6, fast_mode=True)


# Squashing


@pytest.mark.parametrize(("case", "places"), [("box-exp-tanh", [0, 1]), ("mixed-tanh", [1, 2, 5])])
def test_heads_that_squash_use_the_squashed_distribution(case: str, places: list[int]) -> None:
    space, action_config = CASES[case]
    plain = ActionConfig(std=action_config.std, std_value=action_config.std_value)
    head = make_head(space, action_config)
    policy, other = head(features()), make_head(space, plain)(features())
    action = policy.sample(Generator().manual_seed(0))
    # What is stored is before the tanh.
    assert torch.equal(action, other.sample(Generator().manual_seed(0)))
    correction = torch.from_numpy(log_slope(action[..., places].double().numpy())).sum(-1)
    found = (other.log_prob(action) - policy.log_prob(action)).double()
    torch.testing.assert_close(found, correction, rtol=1e-4, atol=1e-4)
    mean, std = policy.dist_params[..., head.mask_size :].chunk(2, -1)
    difference = TanhNormal(mean, std).entropy().sum(-1) - Normal(mean, std).entropy().sum(-1)
    torch.testing.assert_close(policy.entropy() - other.entropy(), difference)


def squashed(low: float, high: float, x: float) -> float:
    return low + (high - low) * (1 + math.tanh(x)) / 2


SQUASHED = [[squashed(-2, 4, x), squashed(0, 1, y)] for x, y in ((-9, 0), (1, 0.5), (9, 9))]


@pytest.mark.parametrize(("squash", "rescale", "expected"), [
    ("none", False, [[-9.0, 0.0], [1.0, 0.5], [9.0, 9.0]]),
    ("none", True, [[-26.0, 0.5], [4.0, 0.75], [28.0, 5.0]]),
    ("clip", False, [[-2.0, 0.0], [1.0, 0.5], [4.0, 1.0]]),
    ("clip", True, [[-2.0, 0.5], [4.0, 0.75], [4.0, 1.0]]),
    ("tanh", False, SQUASHED),
])  # fmt: skip
def test_environments_get_squashed_actions(squash: Any, rescale: bool, expected: Any) -> None:
    action = torch.tensor([[-9.0, 0.0], [1.0, 0.5], [9.0, 9.0]])
    head = make_head(BOX, ActionConfig(squash=squash, rescale=rescale))
    for found in (head.env_action(action), head.env_action(action.expand(2, 3, 2))[1]):
        torch.testing.assert_close(found, torch.tensor(expected))


def test_only_continuous_components_are_squashed() -> None:
    action = torch.tensor([[3.0, 9.0, 0.0, 1.0, 2.0, 9.0]])
    head = make_head(MIXED, ActionConfig(squash="tanh"))
    assert head.env_action(action)[0].tolist() == pytest.approx([3, 4, 1, 1, 2, 1])
    assert action[0, 1] == 9  # the stored action stays as it is


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-99_999, 99_999), min_size=2, max_size=2, unique=True),
    st.sampled_from(["clip", "tanh"]),
)
@example([-1, 2], "clip")  # −0.1 + (0.2 + 0.1) is 0.20000002 in single precision
def test_no_rounding_leads_out_of_the_bounds(tenths: list[int], squash: Any) -> None:
    low, high = sorted(number / 10 for number in tenths)
    for dtype, rescale in itertools.product((np.float16, np.float32, np.float64), (True, False)):
        space = gym.spaces.Box(dtype(low), dtype(high), (1,), dtype)
        head = make_head(space, ActionConfig(squash=squash, rescale=rescale))
        drawn = torch.linspace(-30, 30, 997).sinh().unsqueeze(-1)
        found = ActionLayout(space).unflatten(head.env_action(drawn).numpy())
        rel = 2e-7 * (dtype is np.float64)  # the others are exact
        assert found[[0, -1], 0] == pytest.approx([*space.low, *space.high], rel=rel, abs=0)
        assert ((found >= space.low) & (found <= space.high)).all() and found.dtype == dtype


# Means and deviations


def softplus(x: float) -> float:
    return math.log1p(math.exp(x)) / math.log(2)


DEVIATIONS: list[tuple[dict[str, Any], list[float]]] = [
    ({"std": "parameter"}, [0.3, 0.3]),
    ({"std": "fixed"}, [0.3, 0.3]),
    ({"std": "range"}, [0.3 * 6, 0.3]),
    ({"std": "range", "rescale": True}, [0.6, 0.6]),
    ({"std": "range", "squash": "tanh"}, [0.6, 0.6]),
    ({"std": "softplus", "min_std": 0.01}, [0.3 * softplus(x) + 0.01 for x in (0.5, -2)]),
    ({"std": "softplus_tanh", "min_std": 0.01},
     [0.3 * softplus(math.tanh(x)) + 0.01 for x in (0.5, -2)]),
    ({"std": "exp", "min_std": 0.01}, [0.3 * math.exp(x) + 0.01 for x in (0.5, -2)]),
]  # fmt: skip


@pytest.mark.parametrize("mean", ["raw", "tanh"])
@pytest.mark.parametrize(("action", "expected"), DEVIATIONS)
def test_means_and_deviations(mean: Any, action: dict[str, Any], expected: list[float]) -> None:
    if mean == "tanh" and "squash" in action:
        mean = "raw"
    head = make_head(BOX, ActionConfig(mean=mean, std_value=0.3, **action))
    set_outputs(head, [1.5, -0.2, 0.5, -2.0][: head.linear.out_features])
    means = [math.tanh(1.5), math.tanh(-0.2)] if mean == "tanh" else [1.5, -0.2]
    policy = head(features())
    wanted = torch.tensor([*means, *expected]).expand(S, L, 4)
    torch.testing.assert_close(policy.dist_params, wanted)
    torch.testing.assert_close(policy.stds, wanted[..., 2:])
    torch.testing.assert_close(policy.mode(), wanted[..., :2])


@pytest.mark.parametrize("std", ["parameter", "softplus", "softplus_tanh", "exp", "fixed", "range"])
def test_deviations_are_trained_unless_they_are_fixed(std: Any) -> None:
    """Deviations of the features start at the given value."""
    head = make_head(BOX, ActionConfig(std=std, std_value=0.3), scale=1e-4)
    policy, of_features = head(features()), std in ("softplus", "softplus_tanh", "exp")
    if of_features:
        torch.testing.assert_close(policy.stds, torch.full((S, L, 2), 0.3), rtol=1e-3, atol=0)
    policy.entropy().sum().backward()
    gradient = head.linear.bias.grad
    assert gradient is not None and gradient.any() == of_features and not gradient[:2].any()
    if std == "parameter":
        assert head.log_std is not None and head.log_std.grad is not None
        assert head.log_std.grad.tolist() == pytest.approx([S * L] * 2)  # ∂ entropy / ∂ log std = 1


@pytest.mark.parametrize("std", ["parameter", "softplus", "softplus_tanh", "exp"])
@pytest.mark.parametrize(("raw", "low", "high"), [(-3, 0.25, 0.5), (3, 0.1, 0.5), (200, 0.1, 0.5)])
def test_trained_deviations_stop_at_their_bounds(
    std: Any, raw: float, low: float, high: float
) -> None:
    """Deviations end at their bounds, from which their gradient leads them back."""
    head = make_head(BOX, ActionConfig(std=std, std_value=0.3, min_std=low, max_std=high))
    set_outputs(head, [0.0, 0.0] if std == "parameter" else [0.0, 0.0, raw, math.log(4 / 3)])
    if head.log_std is not None:
        with torch.no_grad():
            head.log_std.copy_(torch.tensor([raw, math.log(0.4)]))
    stds = head(features()).stds
    stds[..., 0].sum().backward()
    trained = head.linear.bias if head.log_std is None else head.log_std
    assert trained.grad is not None
    if raw > 0 or std == "parameter":
        assert (stds[..., 0] == (high if raw > 0 else low)).all()
    else:  # network outputs approach the least deviation
        assert (stds[..., 0] > low).all()
    assert trained.grad[-2] > 0 or raw == 200  # an infinite exponential has no gradient
    assert ((low < stds[..., 1]) & (stds[..., 1] <= high)).all()


# What is refused


@pytest.mark.parametrize(
    "action", [{"std": "range"}, {"squash": "clip"}, {"squash": "tanh"}, {"rescale": True}]
)
@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (0.0, math.inf), (-3e38, 3e38)])
def test_bounds_that_are_used_are_finite(action: dict[str, Any], bounds: Any) -> None:
    space = gym.spaces.Dict(a=BOX, b=gym.spaces.Box(bounds[0], bounds[1], (2,)))
    (name,) = action
    if action == {"squash": "clip"} and np.isfinite(bounds).any():
        return  # clips on one side
    with pytest.raises(ValueError, match=rf"action\.{name}"):
        make_head(space, ActionConfig(**action))
    make_head(BOX, ActionConfig(**action))
    head = make_head(space)
    stored = head(features()).sample(Generator().manual_seed(0))
    assert torch.equal(head.env_action(stored), stored)


def test_clip_keeps_each_bound_that_there_is() -> None:
    inf = np.inf
    low, high = np.array([[0, -inf, -1, -inf], [inf, 2, 1, inf]], np.float32)
    head = make_head(gym.spaces.Box(low, high), ActionConfig(squash="clip"))
    stored = torch.tensor([[-5.0] * 4, [5.0] * 4])
    assert head.env_action(stored).tolist() == [[0, -5, -1, -5], [5, 2, 1, 5]]


def test_a_component_that_cannot_move_has_no_fraction_of_its_range() -> None:
    space = gym.spaces.Box(np.zeros(2, np.float32), np.array([1, 0], np.float32))
    with pytest.raises(ValueError, match=r"action\.std range"):
        make_head(space, ActionConfig(std="range"))
    assert make_head(space, ActionConfig(squash="tanh")).env_action(torch.ones(1, 2))[0, 1] == 0
