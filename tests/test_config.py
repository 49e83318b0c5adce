"""Configuration: what is refused and how, derived numbers, reading back."""

import dataclasses
import math
import pickle
import re
import typing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest

from phasicrl import config_io
from phasicrl.algorithm import train
from phasicrl.config import (
    ActionConfig,
    AuxConfig,
    Config,
    EnvConfig,
    ModelConfig,
    ObsNormConfig,
    PPOConfig,
    RewardNormConfig,
    ValueNormConfig,
    get_defaults,
    get_option_docs,
)
from phasicrl.config_io import SYNONYMS, ConfigError, read_json, suggest_name, write_json
from phasicrl.presets import PRESETS, get_preset
from tests.helpers import OBS_NORM
from tools.reference_pages import TRICKS

BAD: list[tuple[dict[str, Any], str]] = [
    ({"env.num_envs": 0}, "env.num_envs is 0"),
    ({"env.num_levels": -1}, "env.num_levels is -1"),
    ({"env.id": ""}, "env.id is"),
    ({"model.channels": ()}, "model.channels is empty"),
    ({"model.hidden_sizes": (64, 0)}, "model.hidden_sizes is (64, 0)"),
    ({"ppo.gamma": 1.1}, "ppo.gamma is 1.1"),
    ({"ppo.clip": 0.0}, "ppo.clip is 0.0"),
    ({"ppo.adam_betas": (0.9, 1.0)}, "ppo.adam_betas is (0.9, 1.0)"),
    ({"ppo.policy_epochs": 0}, "ppo.policy_epochs is 0"),
    ({"aux.every": 0}, "aux.every is 0"),
    ({"aux.every": 4, "aux.iterations_per_epoch": 5}, "aux.iterations_per_epoch is 5"),
    ({"reward_norm.clip": 0}, "reward_norm.clip is 0"),
    ({"compute.micro_batch": 0}, "compute.micro_batch is 0"),
    ({"checkpoint.keep": 0}, "checkpoint.keep is 0"),
    ({"total_env_steps": 0}, "total_env_steps is 0"),
    ({"total_env_steps": 16383, "budget_rounding": "down"}, "expected 16384 or more"),
    ({"seed": -1}, "seed is -1"),
    *(({"stop_at_return": x}, f"stop_at_return is {x}; expected a finite number")
      for x in (math.nan, math.inf, -math.inf)),
    ({"env.options": {"a": math.nan}}, "env.options has a = nan; expected a text, bool or finite"),
    ({"ppo.num_minibatches": 7}, "64 segments (env.num_envs), such as 8 or 4"),
    ({"ppo.num_minibatches": 7, "ppo.minibatch_by": "transitions", "ppo.num_steps": 2},
     "128 transitions (env.num_envs × ppo.num_steps)"),
    ({"aux.epochs": 6, "aux.num_minibatches": 48}, "such as 32 or 64"),
    ({"env.num_envs": 1, "ppo.num_steps": 1, "ppo.num_minibatches": 1,
      "ppo.advantage_std": "unbiased"}, "ppo.advantage_std is unbiased"),
    ({"ppo.advantage_norm": "minibatch", "env.num_envs": 8, "ppo.num_steps": 1},
     "needs more than 1 sample"),
    ({"model.memory": "lstm", "ppo.minibatch_by": "transitions"}, "ppo.minibatch_by is"),
    ({"ppo.baseline": False}, "ppo.estimator is gae; expected monte_carlo"),
    ({"ppo.baseline": False, "ppo.estimator": "monte_carlo", "aux.epochs": 6}, "aux.epochs is 6"),
    ({"action.std_value": 0.0}, "action.std_value is 0.0"),
    ({"action.max_std": 0.5}, "action.std_value is 1.0; expected a number from 1e-06"),
    ({"action.min_std": 0.5, "action.max_std": 0.2, "action.std_value": 0.3}, "0.3"),
    ({"action.mean": "tanh", "action.squash": "tanh"}, "action.mean and action.squash"),
    ({"ppo.objective": "log_prob"}, "ppo.clip is 0.2"),
    ({"ppo.objective": "log_prob", "ppo.clip": None, "ppo.policy_epochs": 2}, "policy_epochs 2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_impossible_values_are_refused_with_the_numbers(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(env=EnvConfig(id="x")).with_updates(changes)


def test_numbers_that_mean_nothing_are_refused() -> None:
    accepted = []
    for path, default in get_defaults().items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            for value in (math.nan, math.inf) if isinstance(default, float) else (-(10**12),):
                try:
                    Config().with_updates({path: value})
                    accepted.append(path)
                except ConfigError as error:
                    assert str(error).startswith(f"{path} is {value}")
    assert accepted == []


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {"env.num_envs": 0, "ppo.gamma": 2.0, "ppo.clip": -1.0, "checkpoint.keep": 0}
    with pytest.raises(ConfigError) as error:
        Config().with_updates(wrong)
    assert {problem.partition(" ")[0] for problem in error.value.problems} == {*wrong}
    text = Config().to_json().replace('"gamma": 0.999', '"gamma": 2.0, "gama": 1')
    text = text.replace('"num_envs": 64', '"num_envs": "many"')
    with pytest.raises(ConfigError) as error:
        Config.from_json(text)
    assert len(error.value.problems) == 2, "a wrong type and an unknown name; then values"


@pytest.mark.parametrize(
    "name", ["../../x", "/abs/x", "a\\b", "", ".hidden", "a\x1b[31mred", "a\nb", "x" * 101]
)
def test_names_that_leave_the_folder_or_the_terminal_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name is"):
        Config(name=name)
    Config(name="my run [b] é")


@pytest.mark.parametrize(("given", "nearest"), [(5, "4 or 6"), (9, "8 or 6"), (99, "96 or 48")])
def test_an_error_of_minibatches_names_the_nearest_divisors(given: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"such as {nearest}\b"):
        Config(env=EnvConfig(num_envs=96), ppo=PPOConfig(num_minibatches=given))


def test_derived_numbers() -> None:
    config = Config(total_env_steps=100_000, aux=AuxConfig(epochs=6, every=4))
    assert config.batch_size == 64 * 256
    assert config.num_iterations == 7  # 6.1 rollouts: the last one is finished
    down = replace(config, budget_rounding="down")  # or left out
    assert (config.budget, down.budget, down.num_iterations) == (100_000, 6 * 64 * 256, 6)
    assert config.num_gradient_steps == 7 * 8 + 6 * 16 * 4
    assert down.num_gradient_steps == 6 * 8 + 6 * 16 * 4
    assert config.rollouts_per_phase == 4 and config.has_auxiliary_phase
    assert replace(config, aux=AuxConfig(epochs=0)).rollouts_per_phase == 1
    assert config.reward_norm_gamma == config.ppo.gamma
    norm = RewardNormConfig(per="rollout", gamma=0.5)
    assert replace(config, reward_norm=norm).reward_norm_gamma == 0.5


def test_epochs_are_in_the_order_asked_for_and_joint_where_there_are_as_many_of_both() -> None:
    """In Algorithm 1, policy epochs come first and none are joint."""
    policy, value, joint = (True, False), (False, True), (True, True)
    cases: list[tuple[Any, int, int, Any]] = [
        ("value_first", 2, 2, (joint, joint)),
        ("value_first", 1, 3, (value, value, value, policy)),
        ("value_first", 1, 0, (policy,)),
        ("policy_first", 2, 2, (policy, policy, value, value)),
        ("policy_first", 1, 3, (policy, value, value, value)),
    ]
    for order, num_policy, num_value, expected in cases:
        ppo = PPOConfig(policy_epochs=num_policy, value_epochs=num_value, epoch_order=order)
        assert ppo.epoch_kinds == expected


def test_an_experiment_is_the_same_for_other_seeds_lengths_and_machines() -> None:
    config = get_preset("procgen-ppg")
    same = {
        "name": "other", "seed": 9, "total_env_steps": 1_000_000, "output_dir": "there",
        "env.num_threads": 2, "compute.num_threads": 1, "log.console": "off", "checkpoint.keep": 5,
    }  # fmt: skip
    assert config.with_updates(same).identity() == config.identity()
    for change in ({"env.id": "x"}, {"env.num_envs": 32}, {"ppo.gamma": 0.9}, {"aux.epochs": 0}):
        (path,) = change
        identity = config.with_updates(change).identity()
        assert identity == config.identity() | change and identity[path] == change[path]
    options = replace(Config(), env=EnvConfig(id="x", options={"a": 1})).identity()
    assert options["env.options.a"] == 1 and "env.options" not in options


def test_a_file_of_json_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "no space left")

    path = tmp_path / "trial.json"
    write_json(path, {"a": 1})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(config_io.os, "fsync", full)
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    write_json(path, {"a": 3})
    assert read_json(path) == {"a": 3} and list(tmp_path.iterdir()) == [path]


GROUPS = {kind for kind in typing.get_type_hints(Config).values() if dataclasses.is_dataclass(kind)}


def test_every_field_says_what_it_is() -> None:
    """The command line's help and the reference page are made from these sentences."""
    for kind in GROUPS:
        names = [field.name for field in dataclasses.fields(kind)]
        assert [name for name in names if not get_option_docs(kind).get(name)] == [], kind


CODES = (
    "OPPG", "ppo-ewma", "Baselines", "Spinning Up", "CleanRL", "SB3", "contrib", "Tianshou",
    "Acme", "rsl_rl",
)  # fmt: skip
"""Names of code bases in docs/reference/sources.md."""
KNOWN_SOURCE = re.compile(
    r"PP[OG] paper|source 00[0-4]|et al\. \d{4}|Williams 1992|Gymnasium|\(ours\)"
    rf"|{'|'.join(CODES)}"
)


ALGORITHM = (
    ModelConfig, ActionConfig, PPOConfig, AuxConfig, RewardNormConfig, ObsNormConfig,
    ValueNormConfig,
)  # fmt: skip


@pytest.mark.parametrize("kind", ALGORITHM)
def test_every_option_of_the_algorithm_names_a_source(kind: type) -> None:
    sentences = get_option_docs(kind)
    unnamed = [name for name, text in sentences.items() if not KNOWN_SOURCE.search(text)]
    assert len(sentences) > 1 and not unnamed


def test_other_options_have_their_source_in_the_sentence_of_their_group() -> None:
    others = GROUPS - {*ALGORITHM}
    assert len(others) == 5
    assert [kind for kind in others if "(ours" not in (kind.__doc__ or "")] == []
    own = {name: text for name, text in get_option_docs(Config).items() if text}
    assert [name for name, text in own.items() if not KNOWN_SOURCE.search(text)] == []


def named(text: str) -> set[str]:
    """Return the papers, codes and sources that a text names."""
    text = text.replace("sources 003, 004", "source 003, source 004")
    people = r"(?:van )?[A-Z][a-z]+(?= et al\. \d{4}| (?:& \w+ )?\d{4})"
    return set(re.findall(rf"PP[OG] paper|source 00[0-4]|Huang|{people}|{'|'.join(CODES)}", text))


def test_the_help_of_an_option_and_the_page_of_tricks_share_a_source() -> None:
    kinds = dict(zip(("model", "action", "ppo", "aux", "reward_norm"), ALGORITHM, strict=False))
    sentences = {
        f"{group}.{name}": text
        for group, kind in (kinds | {"env": EnvConfig}).items()
        for name, text in get_option_docs(kind).items()
    }
    found = [row for row in TRICKS if row["option"] in sentences]
    compared = [(row["source"], sentences[row["option"]]) for row in found]
    apart = [pair for pair in compared if not named(pair[0]) & named(pair[1])]
    assert len(compared) > 40 and apart == []


def test_sources_of_options_are_on_the_page_of_sources() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "sources.md").read_text()
    papers, called = page.split("## Code")
    assert [code for code in CODES if f"| {code}" not in called] == []
    sentences = " ".join(text for kind in ALGORITHM for text in get_option_docs(kind).values())
    cited = set(re.findall(r"(\w+) (?:et al\. )?((?:19|20)\d\d)", sentences))
    assert len(cited) > 5
    for author, year in cited:
        assert re.search(rf"\| (?:van )?{author}[ ,].*\b{year}, ", papers), f"{author} {year}"


def test_presets_are_consistent() -> None:
    for name, preset in PRESETS.items():
        assert preset.config.name == name
        assert preset.parent is None or preset.parent in PRESETS
        assert preset.source and preset.summary


def test_an_unknown_preset_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'procgen-pgp' .did you mean 'procgen-pp"):
        get_preset("procgen-pgp")


def test_the_papers_settings_are_the_papers() -> None:
    """S35 to S51 of the sources, and what the authors' code does beside them."""
    config = get_preset("procgen-ppg-paper")
    paper = {
        "aux.every": 32, "ppo.policy_epochs": 1, "ppo.value_epochs": 1, "aux.epochs": 6,
        "aux.beta_clone": 1.0, "ppo.gamma": 0.999, "ppo.gae_lambda": 0.95, "ppo.num_steps": 256,
        "ppo.num_minibatches": 8, "ppo.entropy_coef": 0.01, "ppo.clip": 0.2, "env.num_envs": 256,
        "ppo.learning_rate": 5e-4, "aux.learning_rate": 5e-4, "env.distribution": "hard",
        "total_env_steps": 100_000_000, "ppo.max_grad_norm": None, "ppo.value_clip": None,
        "aux.max_grad_norm": None, "ppo.schedule": "constant", "ppo.adam_eps": 1e-8,
        "ppo.advantage_norm": "batch", "ppo.minibatch_by": "segments", "aux.optimizer": "own",
        "aux.minibatch_by": "segments", "ppo.value_coef": 1.0, "ppo.bootstrap_truncation": False,
    }  # fmt: skip
    assert config.values() | paper == config.values() and config.reward_norm_gamma == 0.99
    # Segments of a global auxiliary minibatch: 4 on each of 4 workers.
    assert config.env.num_envs // config.aux.num_minibatches == 16


@pytest.mark.parametrize((
    "name", "rates", "returns", "batch", "updates", "clips", "entropy", "on_mse", "grad", "eps",
), [
    ("compat-cleanrl-ppo", (2.5e-4, "linear"), (0.99, 0.95), (128, 4), (4, 4), (0.2, 0.2),
     0.01, 0.25, 0.5, 1e-5),
    ("compat-cleanrl-ppo-continuous", (3e-4, "linear"), (0.99, 0.95), (2048, 1), (32, 10),
     (0.2, 0.2), 0.0, 0.25, 0.5, 1e-5),
    ("compat-cleanrl-ppo-atari", (2.5e-4, "linear"), (0.99, 0.95), (128, 8), (4, 4),
     (0.1, 0.1), 0.01, 0.25, 0.5, 1e-5),
    ("compat-baselines-ppo-mujoco", (3e-4, "linear"), (0.99, 0.95), (2048, 1), (32, 10),
     (0.2, 0.2), 0.0, 0.25, 0.5, 1e-5),
    ("compat-sb3-ppo", (3e-4, "constant"), (0.99, 0.95), (2048, 1), (32, 10), (0.2, None),
     0.0, 0.5, 0.5, 1e-5),
    ("compat-spinningup-ppo", (3e-4, "constant"), (0.99, 0.97), (4000, 1), (1, 80), (0.2, None),
     0.0, 1.0, None, 1e-8),
])  # fmt: skip
def test_compatible_presets_have_the_settings_of_their_sources(
    name: str, rates: Any, returns: Any, batch: Any, updates: Any, clips: Any, entropy: float,
    on_mse: float, grad: Any, eps: float,
) -> None:  # fmt: skip
    """The table of defaults in the sources' notes (2R), row by row.

    `on_mse` is the weight of the plain squared error.
    """
    config = get_preset(name)
    ppo = config.ppo
    assert (ppo.learning_rate, ppo.schedule) == rates
    assert (ppo.gamma, ppo.gae_lambda) == returns
    assert (ppo.num_steps, config.env.num_envs) == batch
    assert (ppo.num_minibatches, ppo.policy_epochs, ppo.value_epochs) == (*updates, updates[1])
    assert (ppo.clip, ppo.value_clip) == clips
    expected = (entropy, on_mse, grad, eps)
    assert (ppo.entropy_coef, ppo.value_coef / 2, ppo.max_grad_norm, ppo.adam_eps) == expected
    assert grad is None or config.model.value_path == "shared" or ppo.grad_norm_of == "agent"
    assert not config.has_auxiliary_phase


def test_options_are_changed_by_their_paths_all_of_a_group_at_once() -> None:
    config = Config(env=EnvConfig(id="x"))
    changes = {"seed": 5, "ppo.baseline": False, "ppo.estimator": "monte_carlo",
               "obs_norm": OBS_NORM}  # fmt: skip
    changed = config.with_updates(changes)
    assert (changed.seed, changed.ppo.baseline, changed.obs_norm) == (5, False, OBS_NORM)
    assert replace(changed, seed=1, ppo=config.ppo, obs_norm=config.obs_norm) == config


def test_a_memory_needs_no_other_option_or_names_all_of_them_at_once() -> None:
    refused: list[str] = []
    for name, preset in PRESETS.items():
        changes: dict[str, Any] = {"model.memory": "lstm"}
        try:
            config = preset.config.with_updates(changes)
        except ConfigError as error:
            refused.append(name)
            for problem in error.problems:
                found = re.match(r"(\w+.num_minibatches) is .*, such as (\d+)", problem)
                assert found, problem
                changes[found[1]] = int(found[2])
            config = preset.config.with_updates(changes)
        for group in (config.ppo, config.aux):
            assert config.get_shuffle_unit(group) == "segments"
    assert {"hopper-ppg", "compat-sb3-ppo"} <= {*refused}
    assert not {"procgen-ppg", "classic-ppg", "atari-ppo", "cartpole-ppo"} & {*refused}
    with pytest.raises(ConfigError) as given:  # a unit that was asked for is not replaced
        get_preset("hopper-ppo").with_updates({**changes, "ppo.minibatch_by": "transitions"})
    assert [problem.split()[0] for problem in given.value.problems] == [
        "ppo.minibatch_by", "ppo.num_minibatches",
    ]  # fmt: skip


def test_without_a_memory_presets_shuffle_what_their_sources_do() -> None:
    units = {
        name: (preset.config.get_shuffle_unit(preset.config.ppo), preset.config.aux.epochs
               and preset.config.get_shuffle_unit(preset.config.aux))
        for name, preset in PRESETS.items()
    }  # fmt: skip
    assert units["procgen-ppg"] == units["quickstart"] == ("segments", "segments")
    assert units["compat-cleanrl-ppg"] == units["atari-ppg"] == ("transitions", "segments")
    assert units["classic-ppg"] == units["hopper-ppg"] == ("transitions", "transitions")
    assert units["compat-sb3-ppo"] == ("transitions", 0)
    assert units["cartpole-masked-velocity-ppg"] == ("segments", "segments")


def test_presets_named_after_another_code_learn_from_the_first_rollout_as_it_does() -> None:
    norms = {name: preset.config.obs_norm for name, preset in PRESETS.items()}
    first = {name: norm.from_first_rollout for name, norm in norms.items()
             if norm.statistics != "none"}  # fmt: skip
    assert {name for name, on in first.items() if not on} == {
        name for name in first if name.startswith("compat-")
    }
    assert len(first) > 10 and not all(first.values())


@pytest.mark.parametrize(("path", "value", "expected"), [
    ("ppo.objective", "surogate", "surrogate, log_prob"),
    ("ppo.learning_rate", "lin_3e-4", "float"),
    ("ppo.clip", lambda left: 0.2 * left, "float"), ("ppo.num_steps", [128], "int"),
    ("ppo.adam_betas", 0.9, "a list"), ("ppo.adam_betas", [0.9], "a list of 2"),
    ("log.tensorboard", "False", "bool"), ("ppo", {"gamma": 0.9}, "PPOConfig"),
    ("env", "CartPole-v1", "EnvConfig"), ("seed", True, "int"),
    ("ppo.entropy_coef", "0.01", "float"),
])  # fmt: skip
def test_values_of_other_types_are_refused_by_name(path: str, value: Any, expected: str) -> None:
    group, _, name = path.rpartition(".")
    kind: type[Any] = type(getattr(Config(), group)) if group else Config
    for make in (lambda: kind(**{name: value}), lambda: Config().with_updates({path: value})):
        with pytest.raises(ConfigError) as refused:
            make()
        (problem,) = refused.value.problems
        assert problem.startswith(f"{path} is {value!r}; expected {expected}")


def test_values_are_converted_to_the_types_of_their_options() -> None:
    given: dict[str, Any] = {"model.hidden_sizes": np.array([64, 32])}
    given |= {"ppo.adam_betas": (np.float32(0.5), 0)}
    given |= {"ppo.clip": 1, "seed": np.int64(4), "total_env_steps": 1e6}
    values = Config().with_updates(given).values()
    assert repr([values[x] for x in given]) == "[(64, 32), (0.5, 0.0), 1.0, 4, 1000000]"
    options: dict[str, Any] = {"a": np.int64(1)}
    kept = EnvConfig(options=MappingProxyType(options)).options
    options["b"] = np.nan
    assert kept == {"a": 1} and type(kept["a"]) is int


def test_a_group_and_one_of_its_options_change_together() -> None:
    config = Config().with_updates({"aux.epochs": 3, "aux": AuxConfig(every=8, epochs=9)})
    assert config.aux == AuxConfig(every=8, epochs=3)
    with pytest.raises(ConfigError, match="aux is 5; expected AuxConfig"):
        Config().with_updates({"aux.epochs": 3, "aux": 5})


def test_names_of_other_trainers_lead_to_our_options() -> None:
    assert {*"+".join(SYNONYMS.values()).split("+")} <= {*get_defaults(), "classic_ppo"}
    ppo, config, env = cast(Any, (PPOConfig, Config, EnvConfig))
    for name, path in {"lr": "ppo.learning_rate", "n_envs": "env.num_envs", "gama": "ppo.gamma",
                       "num_envs": "env.num_envs", "max_iterations": "total_env_steps",
                       "n_epochs": "ppo.policy_epochs' or 'ppo.value_epochs"}.items():  # fmt: skip
        for make in (
            lambda name=name: ppo(**{name: 1}),
            lambda name=name: config(**{name: 1}),
            lambda name=name: Config().with_updates({f"ppo.{name}": 1}),
        ):
            with pytest.raises(ValueError, match=rf"option .*\b{name} .did you mean '{path}'"):
                make()
    assert "'aux.learning_rate'" in suggest_name("aux.lr", get_defaults())
    with pytest.raises(ConfigError, match=r"'CartPole-v1' .*EnvConfig\(id="):
        env("CartPole-v1")
    with pytest.raises(ValueError, match=r"config is 'cartpole-ppo'; .*get_preset"):
        train(cast(Any, "cartpole-ppo"))


def test_problems_come_out_of_another_process_as_they_were() -> None:
    told = pickle.loads(pickle.dumps(ConfigError(["ppo.clip is -1", "seed is x"])))
    assert told.problems == ("ppo.clip is -1", "seed is x")
    assert str(told) == "ppo.clip is -1\nseed is x"
