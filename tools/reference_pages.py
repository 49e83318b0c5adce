"""Write the pages of docs/reference, and the tables of results on the other pages."""

from __future__ import annotations

import dataclasses
import re
import typing
from functools import cache
from pathlib import Path

from phasicrl.config import Config, get_defaults, get_option_docs
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.presets import PRESETS, differences
from phasicrl.runs.metrics import METRICS
from tools.result_tables import beside, blocks, on_reacher, one_out, task_name, trained

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- written by tools/reference_pages.py; do not edit -->\n\n"
_TABLE, _END = "<!-- table ", "<!-- end -->"


def pages() -> dict[str, str]:
    """Return the text of every page with generated content, by its path in docs/."""
    return {
        **pages_with_tables(),
        "reference/metrics.md": metrics_page(),
        "reference/options.md": options_page(),
        "reference/presets.md": presets_page(),
        "reference/tricks.md": tricks_page(),
    }


def pages_with_tables() -> dict[str, str]:
    """Return every hand-written page that has a table of results, with its tables updated."""
    tables = blocks()
    texts = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    texts["../README.md"] = (DOCS / "../README.md").read_text()
    return {name: with_tables(text, tables) for name, text in texts.items() if _TABLE in text}


def with_tables(text: str, tables: dict[str, str]) -> str:
    """Update the tables of results on a page.

    Each stands between `<!-- table NAME -->` and `<!-- end -->`.
    """
    before, *parts = text.split(_TABLE)
    for part in parts:
        name, rest = part.split(" -->\n", 1)
        before += f"{_TABLE}{name} -->\n{tables[name]}{_END}{rest.split(_END, 1)[1]}"
    return before


def metrics_page() -> str:
    """The table of metric names."""
    head = (
        "# Metrics\n\nEach iteration writes one row to `metrics.jsonl`: `env_steps`, `iteration`, "
        "`phase`, `wall_time` and the metrics below. TensorBoard and Weights & Biases "
        "(`--log.wandb`) use the same names. Losses are means over all epochs and minibatches "
        "of the iteration, or of the auxiliary phase.\n\n"
        "| name | meaning |\n|---|---|\n"
    )
    return NOTE + head + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in METRICS.items())


def options_page() -> str:
    """Every option with its default and its sentence."""
    text = (
        "# Options\n\nThe path is the flag: `ppo.learning_rate` is `--ppo.learning-rate`. `none` "
        "switches off what can be off, and `--no-` what is on or off: `--env.no-action-masks`.\n"
    )
    hints = typing.get_type_hints(Config)
    groups = {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    text += _table("", Config, skip={*groups})
    for name, kind in groups.items():
        text += _table(name, kind, skip=set())
    return NOTE + text


def presets_page() -> str:
    """Every preset with its source and its difference to its parent."""
    text = (
        "# Presets\n\n`phasicrl presets NAME` shows source and differences. "
        "Results are of [report seeds](../../CONTRIBUTING.md#seeds), which no setting was chosen "
        "on.\n"
    )
    for name, preset in PRESETS.items():
        parent = Config() if preset.parent is None else PRESETS[preset.parent].config
        changes = differences(preset.config, parent)
        summary = f"{preset.summary[0].upper()}{preset.summary[1:]}"
        text += f"\n## {name}\n\n{summary}. Source: {_with_links(preset.source)}. {trained(name)} "
        text += f"Like {f'`{preset.parent}`' if preset.parent else 'the defaults'}, but:\n\n"
        text += "| field | here | there |\n|---|---|---|\n"
        text += "".join(
            f"| `{field}` | {_show(new)} | {_show(old)} |\n"
            for field, (old, new) in changes.items()
        )
    return NOTE + text


TRICKS = (
    ("clipped surrogate", "PPO paper, eq. 7", "objectives.surrogate_loss", "ppo.clip"),
    ("several epochs over a rollout", "PPO paper, algorithm 1", "phases.policy_phase",
     "ppo.policy_epochs"),
    ("several value epochs", "PPG paper, algorithm 1: E_V", "phases.policy_phase",
     "ppo.value_epochs"),
    ("order of policy and value epochs", "PPG paper, algorithm 1; OPPG ppo.py:222-245",
     "config.PPOConfig.epoch_schedule", "ppo.epoch_order"),
    ("minibatches", "PPO paper, algorithm 1", "rollout.Samples.minibatches", "ppo.num_minibatches"),
    ("whole segments as minibatches", "OPPG minibatch_optimize.py:82-93",
     "rollout.Samples.minibatches", "ppo.minibatch_by"),
    ("whole segments in the auxiliary phase", "OPPG ppg.py:173; source 000",
     "rollout.Samples.minibatches", "aux.minibatch_by"),
    ("TD(λ): generalized advantages", "Schulman et al. 2016, eq. 16", "returns.gae",
     "ppo.gae_lambda"),
    ("other returns: n-step, Monte-Carlo", "sources 003, 004",
     "returns.n_step_return, returns.monte_carlo_return", "ppo.estimator"),
    ("returns of whole episodes", "sources 003, 004", "returns.first_half_episode_mask",
     "ppo.collect_by"),
    ("a number of episodes an iteration", "source 003", "returns.first_half_episode_mask",
     "ppo.max_episodes"),
    ("what values learn", "PPG paper, V̂; Spinning Up ppo.py:66-67", "phases.compute_targets",
     "ppo.value_target"),
    ("baseline", "Williams 1992; source 003", "phases.compute_targets", "ppo.baseline"),
    ("REINFORCE and actor-critic", "Williams 1992; Spinning Up vpg.py:216",
     "objectives.log_prob_loss", "ppo.objective"),
    ("advantages recomputed each epoch", "Tianshou ppo.py:174-178", "phases.recompute_values",
     "ppo.recompute_advantages"),
    ("advantage normalization", "Baselines ppo2/model.py:139; OPPG ppo.py:69",
     "returns.normalize_advantages", "ppo.advantage_norm"),
    ("advantage normalization over the batch, not the minibatch", "OPPG ppo.py:69; source 000",
     "returns.normalize_advantages", "ppo.advantage_norm"),
    ("deviation of advantages",
     "by n: OPPG ppo.py:69, Baselines ppo2/model.py:139; "
     "by n − 1: CleanRL ppo.py:262, SB3 ppo.py:218-219",
     "returns.normalize_advantages", "ppo.advantage_std"),
    ("observation normalization", "Baselines vec_normalize.py:36-40; source 003",
     "normalize.ObservationNormalizer", "obs_norm.statistics"),
    ("reward normalization", "OPPG reward_normalizer.py:75-88", "normalize.RewardNormalizer",
     "reward_norm.per"),
    ("reward normalization by the algorithm's γ",
     "source 000; 0.99: OPPG reward_normalizer.py:66, Baselines vec_normalize.py:10 in "
     "train-procgen train.py:43",
     "normalize.RewardNormalizer", "reward_norm.gamma"),
    ("reward normalization step by step",
     "Baselines vec_normalize.py:26-34; by rollout: OPPG reward_normalizer.py:75-88",
     "learner.Learner.normalize_reward", "reward_norm.per"),
    ("where its running return restarts",
     "OPPG reward_normalizer.py:91-105; Gymnasium stateful_reward.py:134-136",
     "learner.Learner.normalize_reward", "reward_norm.reset_at"),
    ("value-target normalization, Pop-Art", "van Hasselt et al. 2016; source 003",
     "models.agent.Agent.update_value_statistics", "value_norm.statistics"),
    ("value clipping", "Baselines ppo2/model.py:72-80", "objectives.value_loss", "ppo.value_clip"),
    ("entropy bonus", "PPO paper, eq. 9", "models.distributions.JointPolicy.entropy",
     "ppo.entropy_coef"),
    ("gradient clipping", "Baselines ppo2/model.py:105-107; source 003: policy and value apart",
     "optimize.clip_gradients", "ppo.max_grad_norm"),
    ("orthogonal weights, small policy head",
     "Baselines a2c/utils.py:20-35, Baselines policies.py:49; source 003",
     "models.init.Initializer", "model.init"),
    ("normalized weights", "OPPG torch_util.py:327-351; source 000", "models.init.Initializer",
     "model.init"),
    ("LayerNorm with orthogonal weights", "source 000", "models.encoders.Dense",
     "model.layer_norm"),
    ("scale of the policy head", "0.01: Baselines policies.py:49; 0.1: OPPG ppg.py:107",
     "models.heads.PolicyHead", "model.policy_head_scale"),
    ("Adam's ε", "1e-5: Baselines ppo2/model.py:98-100", "learner.Learner", "ppo.adam_eps"),
    ("Adam's ε before the bias correction", "TensorFlow, so Baselines ppo2/model.py:98-100",
     "optimize.adam_", "ppo.adam_eps_hat"),
    ("Adam's decays", "ppo-ewma train.py:24-31", "learner.Learner", "ppo.adam_betas"),
    ("learning rate falling to zero", "Baselines ppo2/ppo2.py:133-135; source 004",
     "learner.Learner.start_iteration", "ppo.schedule"),
    ("clip range falling to zero", "Baselines ppo2/ppo2.py:133-137",
     "learner.Learner.loss_coefficients", "ppo.clip_schedule"),
    ("rollouts that fit into the budget",
     "up: OPPG ppo.py:212, SB3 on_policy_algorithm.py:323; "
     "down: Baselines ppo2/ppo2.py:128, CleanRL ppo.py:133", "config.Config.budget",
     "budget_rounding"),
    ("a separate rate for the value network", "Spinning Up ppo.py:251-252; source 004",
     "learner.Learner.start_iteration", "ppo.value_learning_rate"),
    ("KL penalty", "PPO paper, eq. 8; OPPG ppo.py:104",
     "objectives.sampled_kl_penalty, models.distributions.JointPolicy.kl_from", "ppo.kl_penalty"),
    ("adaptive KL penalty", "PPO paper, section 4", "objectives.adapt_kl_coef",
     "ppo.kl_penalty_target"),
    ("averaged proximal policy", "Hilton et al. 2021; ppo-ewma ppg.py:169-190",
     "models.proximal.ProximalPolicy", "ppo.proximal_decay"),
    ("advantage statistics over several rollouts", "Hilton et al. 2021; ppo-ewma ppo.py:158-185",
     "normalize.EmaMoments", "ppo.advantage_decay"),
    ("early stop by the epoch's mean KL", "Spinning Up ppo.py:268-271", "phases.policy_phase",
     "ppo.target_kl"),
    ("estimate of that KL", "k1: Spinning Up ppo.py:237; k3: SB3 ppo.py:263-264",
     "phases.estimate_rollout_kl", "ppo.epoch_kl"),
    ("time limits are not terminations", "Pardo et al. 2018", "collect.Collector",
     "ppo.bootstrap_truncation"),
    ("action masks", "Huang & Ontañón 2020; source 003", "models.heads.PolicyHead",
     "env.action_masks"),
    ("masks by a heuristic at first", "source 003", "envs.wrappers.HeuristicMask",
     "env.heuristic_mask_steps"),
    ("standard deviation of actions", "sources 003, 004; Acme networks.py:332-346",
     "models.heads.PolicyHead", "action.std"),
    ("deviation through tanh", "source 004", "models.heads.PolicyHead", "action.std"),
    ("mean through tanh", "source 004", "models.heads.PolicyHead", "action.mean"),
    ("actions squashed to their range", "Haarnoja et al. 2018, appendix C",
     "models.heads.PolicyHead.env_action", "action.squash"),
    ("actions in [−1, 1]", "source 004", "models.heads.PolicyHead.env_action", "action.rescale"),
    ("memory", "Hochreiter & Schmidhuber 1997", "models.memory.RecurrentMemory", "model.memory"),
    ("two networks", "PPG paper, figure 1", "models.agent.Agent", "model.value_path"),
    ("auxiliary phase", "PPG paper, eq. 3", "phases.auxiliary_phase", "aux.epochs"),
    ("several auxiliary epochs", "PPG paper, figure 4", "phases.auxiliary_phase", "aux.epochs"),
    ("several iterations before it", "PPG paper, figure 5", "config.Config.rollouts_per_phase",
     "aux.every"),
    ("values trained in it", "PPG paper, figure 9", "phases.auxiliary_phase", "aux.value_coef"),
    ("every other auxiliary phase left out", "source 000", "config.Config.aux_phase_interval",
     "aux.run_every"),
    ("auxiliary epochs over half of the data", "source 001", "phases.auxiliary_phase",
     "aux.iterations_per_epoch"),
    ("auxiliary epochs over the last iterations alone", "source 001: harmful",
     "phases.auxiliary_phase", "aux.iterations_from"),
    ("value targets recomputed for it", "source 001", "phases.auxiliary_phase",
     "aux.recompute_targets"),
    ("a separate optimizer for it", "OPPG ppg.py:239; not in CleanRL ppg_procgen.py:265",
     "learner.Learner", "aux.optimizer"),
)  # fmt: skip
"""Every trick: source, function, option."""
RUNG_OF = {
    "env.action_masks": "action masking",
    "ppo.baseline": "baseline", "ppo.clip": "clipping", "ppo.gae_lambda": "TD(λ)",
    "model.init": "initialization",
    "ppo.advantage_norm": "advantage normalization", "obs_norm.statistics": "state normalization",
    "value_norm.statistics": "return normalization",
    "ppo.max_grad_norm": "gradient clipping", "ppo.entropy_coef": "entropy bonus",
}  # fmt: skip
"""Name in `experiments/tricks.py` of the trick behind an option."""
OTHER_VALUES = (
    "normalized weights", "advantage normalization over the batch, not the minibatch",
    "deviation through tanh", "reward normalization step by step",
)  # fmt: skip
"""Tricks whose option is that of another one."""
CHANGED_ON_REACHER = {
    "ppo.policy_epochs": "--ppo.policy-epochs 1 --ppo.value-epochs 1",
    "ppo.num_minibatches": "--ppo.num-minibatches 1",
    "ppo.bootstrap_truncation": "--ppo.no-bootstrap-truncation",
    "obs_norm.statistics": "--obs-norm.statistics none",
    "ppo.gae_lambda": "--ppo.gae-lambda 1.0",
    "ppo.clip": "--ppo.clip none", "model.policy_head_scale": "--model.policy-head-scale 1.0",
    "ppo.advantage_norm": "--ppo.advantage-norm none",
    "reward_norm.per": "--reward-norm.per none",
    "model.init": "--model.init torch --model.head-init torch",
    "ppo.max_grad_norm": "--ppo.max-grad-norm none",
    "ppo.recompute_advantages": "--ppo.no-recompute-advantages",
    "ppo.adam_eps": "--ppo.adam-eps 1e-8", "ppo.schedule": "--ppo.schedule constant",
}  # fmt: skip
"""Flags that change an option back on Reacher."""
IN_SUITES = {
    "order of policy and value epochs": (("ppo-details", "PPO", "policy epochs first"),),
    "returns of whole episodes": (
        ("ppo-details", "rollouts 1 × 1024", "whole episodes of 1 × 1024"),
        ("ppo-details", "PPO", "whole episodes of 4 × 512"),
    ),
    "what values learn": (("ppo-details", "values learn returns of λ = 1", "PPO"),),
    "deviation of advantages": (("ppo-details", "advantages' deviation by n − 1", "PPO"),),
    "where its running return restarts": (
        ("ppo-details", "running return as in Gymnasium", "PPO"),
    ),
    "value clipping": (("ppo-details", "PPO", "value clipping"),),
    "a separate rate for the value network": (("ppo-details", "PPO", "value rate × 3"),),
    "early stop by the epoch's mean KL": (("ppo-details", "PPO", "stop at a KL of 0.015"),),
    "estimate of that KL": (
        ("ppo-details", "stop at a KL of 0.015 by k1", "stop at a KL of 0.015"),
    ),
    "actions squashed to their range": (
        ("ppo-details", "actions as drawn", "actions through tanh"),
    ),
    "several epochs over a rollout": (("fig3", "E_π = 1", "E_π = 10"),),
    "several value epochs": (("value-epochs", "E_V = 1", "E_V = 10"),),
    "reward normalization by the algorithm's γ": (
        ("details", "rewards normalized by γ 0.99", "PPG"),
    ),
    "deviation through tanh": (
        ("mva", "σ learned, actions normalized, tanh",
         "σ learned through tanh, actions normalized, tanh"),
    ),
    "value targets recomputed for it": (("details", "PPG", "value targets recomputed"),),
    "auxiliary epochs over the last iterations alone": (
        ("n-aux", "N = N_π", "the last N_π / 4 alone"),
    ),
    "whole segments as minibatches": (("details", "PPG", "policy phase on whole segments"),),
    "whole segments in the auxiliary phase": (
        ("details", "PPG", "auxiliary phase on whole segments"),
    ),
    "other returns: n-step, Monte-Carlo": (
        ("tricks-one-out", "everything", "without TD(λ)"),
    ),
    "REINFORCE and actor-critic": (("tricks", "+ clipping", "+ baseline"),),
    "advantage normalization over the batch, not the minibatch": (
        ("details", "PPG", "advantages normalized by batch"),
    ),
    "reward normalization": (
        ("penalties", "clipping, rewards as they are", "clipping, rewards normalized"),
        ("mva", "rewards not normalized", "σ fixed"),
    ),
    "orthogonal weights, small policy head": (
        ("details", "weights PyTorch's, heads orthogonal", "PPG"),
    ),
    "normalized weights": (("details", "PPG", "weights normalized"),),
    "LayerNorm with orthogonal weights": (("details", "PPG", "LayerNorm, weights orthogonal"),),
    "Adam's ε": (("details", "Adam's ε 1e-8", "PPG"),),
    "KL penalty": (
        ("fig6", "clipping", "KL penalty"),
        ("penalties", "clipping, rewards normalized", "KL penalty, rewards normalized"),
    ),
    "adaptive KL penalty": (
        ("penalties", "clipping, rewards normalized", "adaptive KL penalty, rewards normalized"),
    ),
    "standard deviation of actions": (("mva", "σ fixed", "σ learned"),),
    "actions in [−1, 1]": (("mva", "σ fixed", "σ fixed, actions normalized"),),
    "mean through tanh": (
        ("mva", "σ fixed, actions normalized", "σ fixed, actions normalized, tanh"),
    ),
    "two networks": (
        ("fig7", "one network", "two networks"),
        ("fig8", "PPO, one network", "PPO, two networks"),
    ),
    "auxiliary phase": (("fig2", "PPO", "PPG"),),
    "several auxiliary epochs": (("fig4", "E_aux = 1", "E_aux = 6"),),
    "several iterations before it": (("fig5", "N_π = 2", "N_π = 32"),),
    "values trained in it": (("fig9", "values not trained", "values trained"),),
    "every other auxiliary phase left out": (("skip-aux", "all phases", "every other phase"),),
    "auxiliary epochs over half of the data": (("n-aux", "N = N_π", "N = N_π / 2"),),
    "a separate optimizer for it": (("details", "one optimizer for both phases", "PPG"),),
}  # fmt: skip
"""By trick: the suites that measure it, the arm without it and the arm with it."""
_ONE_OUT = "../experiments.md#ppo-without-one-of-its-tricks"
_REACHER = "../learning.md#what-each-trick-is-worth"
_BATCHES = "together: [larger batches](../distributed.md#larger-batches)"
_HEURISTIC = "[a trader](../memory-and-masks.md#a-heuristic-for-the-first-steps)"
_FIRST_ROLLOUTS = "[first rollouts](../learning.md#ppo-on-procgen-among-the-published-runs)"
ON_PAGES = {
    "Adam's decays": _BATCHES, "averaged proximal policy": _BATCHES,
    "advantage statistics over several rollouts": _BATCHES,
    "rollouts that fit into the budget": "no more than one rollout",
    "mean through tanh": "with [−1, 1]: [mva](../experiments.md#the-reports-findings-source-004)",
    "masks by a heuristic at first": _HEURISTIC,
    "reward normalization step by step": _FIRST_ROLLOUTS,
    "Adam's ε before the bias correction": _FIRST_ROLLOUTS,
    "memory": "[tests of learning](../learning.md#masks-and-memory)",
    "action masks": "[tests of learning](../learning.md#masks-and-memory)",
}  # fmt: skip
"""By trick: pages that measure it otherwise."""
SHOWN = ("procgen-ppg", "procgen-ppo", "cartpole-ppo", "halfcheetah-ppo", "atari-ppo")


def tricks_page() -> str:
    """Every trick with its source, function and option, and the option's value in some presets."""
    apart = SUITES["tricks-one-out"].small
    text = (
        "# Tricks\n\nSource, function and option of each trick, its value in five presets, and "
        "what it is worth: the greedy return without it (and with it), means over seeds. "
        "Seeds, budgets and spans are on the pages of the links; many spans overlap.\n\n"
        f"| trick | source | here | option | {' | '.join(f'`{name}`' for name in SHOWN)} | "
        f"[without it]({_ONE_OUT}): {' | '.join(map(task_name, apart))} | [Reacher]({_REACHER}) | "
        "in other suites |\n"
        f"|---|---|---|---|{'---|' * (len(SHOWN) + len(apart))}---|---|\n"
    )
    for trick, source, function, option in TRICKS:
        values = [_show(PRESETS[name].config.values()[option]) for name in SHOWN]
        # Another value of the same option is another trick, which those runs did not measure.
        switched = "" if trick in OTHER_VALUES else option
        elsewhere = [beside(*arms) for arms in IN_SUITES.get(trick, ())]
        elsewhere += [ON_PAGES[trick]] if trick in ON_PAGES else []
        measured = (
            *(one_out(RUNG_OF.get(switched, ""), task) for task in apart),
            on_reacher(CHANGED_ON_REACHER.get(switched, "")),
            "; ".join(elsewhere) or "–",
        )
        cells = (trick, _with_links(source), f"`{function}`", f"`{option}`", *values, *measured)
        text += f"| {' | '.join(cells)} |\n"
    return NOTE + text


@cache
def cited_lines() -> list[tuple[str, str]]:
    """Lines of others' code as the page of sources cites them, with their addresses."""
    page = (DOCS / "reference" / "sources.md").read_text()
    return re.findall(r"\[([^]]+\.py:[\d-]+)\]\((\S+)\) \|", page)


def _with_links(source: str) -> str:
    """A source whose lines of code, if the page of sources has them, are links."""
    for cited, address in cited_lines():
        source = re.sub(rf"\b{re.escape(cited)}(?![\d-])", f"[{cited}]({address})", source)
    return source


def _table(name: str, kind: type, *, skip: set[str]) -> str:
    """One group of fields."""
    sentences = get_option_docs(kind)
    text = f"\n## {name or 'the run'}\n\n{(kind.__doc__ or '').strip()}\n\n"
    text += "| field | default | what it is |\n|---|---|---|\n"
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            path = f"{name}.{field.name}" if name else field.name
            text += (
                f"| `{path}` | {_show(get_defaults()[path])} | {_cell(sentences[field.name])} |\n"
            )
    return text


def _cell(text: str) -> str:
    """Return the text of an option for a table cell, with each choice on its line."""
    return re.sub(r"\n(?=`[^`]+`: )", "<br>", text).replace("\n", " ")


def _show(value: object) -> str:
    """A value in a table cell."""
    return "–" if value is None or value == {} else f"`{value}`"


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
