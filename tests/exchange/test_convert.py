"""Settings of CleanRL and RL Baselines3 Zoo: what they become, and what is said of the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from phasicrl import cli
from phasicrl.config import Config, ObsNormConfig, RewardNormConfig
from phasicrl.exchange.convert import convert_cleanrl, convert_sb3_zoo
from phasicrl.presets import differences, get_preset

CLEANRL_ARGUMENTS = """
    exp-name seed torch-deterministic cuda track wandb-project-name wandb-entity capture-video
    save-model upload-model hf-entity env-id total-timesteps learning-rate num-envs num-steps
    anneal-lr gamma gae-lambda num-minibatches update-epochs norm-adv clip-coef clip-vloss
    ent-coef vf-coef max-grad-norm target-kl batch-size minibatch-size num-iterations gae
    adv-norm-fullbatch n-iteration e-policy v-value e-auxiliary beta-clone num-aux-rollouts
    n-aux-grad-accum num-phases aux-batch-rollouts local-num-envs local-batch-size
    local-minibatch-size world-size device-ids backend
"""
"""Of all scripts that are converted (ppo.py to ppg_procgen.py)."""


def changed(command: str) -> dict[str, Any]:
    """What flags change in the preset that the script alone gives."""
    words = command.split()
    base = convert_cleanrl(words[:1]).config
    return {
        path: new for path, (_, new) in differences(convert_cleanrl(words).config, base).items()
    }


@pytest.mark.parametrize(
    ("script", "preset"),
    [
        ("ppo.py", "compat-cleanrl-ppo"),
        ("ppo_continuous_action.py", "compat-cleanrl-ppo-continuous"),
        ("ppo_atari.py", "compat-cleanrl-ppo-atari"),
        ("ppo_procgen.py", "compat-cleanrl-ppo-procgen"),
        ("ppg_procgen.py", "compat-cleanrl-ppg"),
    ],
)
def test_a_script_without_flags_is_its_preset(script: str, preset: str) -> None:
    found = convert_cleanrl(["python", f"cleanrl/{script}"])
    assert found.config == get_preset(preset) and not found.left


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("ppo.py --env-id Acrobot-v1 --total-timesteps 1e6",
         {"env.id": "Acrobot-v1", "total_env_steps": 1_000_000}),
        ("ppo.py --clip-coef 0.3", {"ppo.clip": 0.3, "ppo.value_clip": 0.3}),
        ("ppo.py --clip-coef 0.3 --no-clip-vloss", {"ppo.clip": 0.3, "ppo.value_clip": None}),
        ("ppo.py --clip-vloss=False --clip-coef 0.3", {"ppo.clip": 0.3, "ppo.value_clip": None}),
        ("ppo.py --update_epochs 7", {"ppo.policy_epochs": 7, "ppo.value_epochs": 7}),
        ("ppo.py --no-norm-adv --no-anneal-lr",
         {"ppo.advantage_norm": "none", "ppo.schedule": "constant",
          "ppo.advantage_std": "biased"}),  # which nothing is divided by
        ("ppo.py --anneal-lr False --cuda false",
         {"ppo.schedule": "constant", "compute.device": "cpu"}),
        ("ppo_atari.py --env-id PongNoFrameskip-v4 --track",
         {"env.id": "envpool:Pong-v5", "log.wandb": True}),
        ("ppo.py --anneal-lr 0 --track no", {"ppo.schedule": "constant"}),
        ("ppo.py --track 1 --wandb-entity 7 --torch-deterministic yes",
         {"log.wandb": True, "log.wandb_entity": "7", "compute.deterministic": True}),
        ("ppg_procgen.py --env-id bigfish --max-grad-norm 0.7",
         {"env.id": "procgen:bigfish", "ppo.max_grad_norm": 0.7, "aux.max_grad_norm": 0.7}),
        # 64 segments of a rollout, 4 × 2 of them to a step.
        ("ppg_procgen.py --num-aux-rollouts 4 --n-aux-grad-accum 2", {"aux.num_minibatches": 8}),
        # 32 segments, 4 of them to a step.
        ("ppg_procgen.py --num-envs 32", {"env.num_envs": 32, "aux.num_minibatches": 8}),
        ("ppg_procgen.py --e-policy 3", {"ppo.policy_epochs": 3, "ppo.value_epochs": 3}),
        ("ppo_procgen.py --num-envs 32", {"env.num_envs": 32}),
        ("ppo.py --target-kl 0.02", {"ppo.target_kl": 0.02}),  # CleanRL stops at it as well
        ("ppg_procgen.py --n-iteration 16 --e-auxiliary 3 --beta-clone 2 --gae False",
         {"aux.every": 16, "aux.epochs": 3, "aux.beta_clone": 2, "ppo.gae_lambda": 1.0}),
    ],
)  # fmt: skip
def test_flags_become_fields(command: str, fields: dict[str, Any]) -> None:
    assert changed(command) == fields


def test_the_recurrent_script_has_a_memory_and_one_frame() -> None:
    found = convert_cleanrl(["ppo_atari_lstm.py"]).config
    assert (found.model.memory, found.model.memory_size) == ("lstm", 128)
    assert found.env.options["stack_num"] == 1 and found.ppo.minibatch_by == "segments"


def test_every_argument_of_cleanrl_is_accounted_for() -> None:
    """U9: the same spelling for all of them, and a field or a reason for each."""
    for name in CLEANRL_ARGUMENTS.split():
        values = {"env-id": "coinrun", "num-envs": "64", "total-timesteps": "25e6"}
        value = values.get(name, "1")
        found = convert_cleanrl(["ppg_procgen.py", f"--{name}", value])
        assert len(found.taken) + len(found.left) == 2, name
        assert "no such flag" not in str(found.left), name
    # What a user of ppo.py sets: 24 of 25 become fields.
    set_by_hand = CLEANRL_ARGUMENTS.split()[:8] + CLEANRL_ARGUMENTS.split()[11:28]
    values = {"env-id": "CartPole-v1", "total-timesteps": "1e5", "num-steps": "8"}
    values["update-epochs"] = "2"  # with one, nothing would be left to stop at a --target-kl
    words = [word for name in set_by_hand for word in (f"--{name}", values.get(name, "1"))]
    found = convert_cleanrl(["ppo.py", *words])
    assert len(set_by_hand) == 25 and len(found.taken) == 1 + 24
    assert found.left.keys() == {"--capture-video"}
    found = convert_cleanrl(["ppo_atari_multigpu.py", "--device-ids", "0", "1", "--seed", "7"])
    assert found.config.seed == 7 and found.left == {
        "--device-ids": "`torchrun` chooses: docs/distributed.md"
    }
    found = convert_cleanrl(["ppo.py", "--new-flag", "3"])
    assert found.left == {"--new-flag": "there is no such flag in CleanRL"}
    found = convert_cleanrl(["ppo.py", "--learnin-rate", "1", "--n-iteration", "8"])
    assert found.left == {
        "--learnin-rate": "there is no such flag in CleanRL (did you mean '--learning-rate'?)",
        "--n-iteration": "this script of CleanRL has no such flag",
    }


ZOO = """
CartPole-v1: &cartpole
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  n_steps: 32
  batch_size: 256
  gae_lambda: 0.8
  learning_rate: lin_0.001
  clip_range: lin_0.2
Acrobot-v1:
  <<: *cartpole
  batch_size: 60
  normalize: "{'norm_obs': False, 'norm_reward': True}"
  vf_coef: 0.7
Pendulum-v1:
  normalize: true
  n_envs: 4
  n_timesteps: 100000
  policy: MlpPolicy
  n_steps: 1024
  use_sde: true
  policy_kwargs: "dict(log_std_init=-2, ortho_init=False, activation_fn=nn.ReLU,
    net_arch=[dict(pi=[32, 16], vf=[32, 16])])"
PendulumNoVel-v1:
  policy: MlpLstmPolicy
  n_envs: 4
  n_timesteps: 100000
  n_steps: 1024
atari:
  env_wrapper:
    - stable_baselines3.common.atari_wrappers.AtariWrapper:
        terminal_on_life_loss: False
  frame_stack: 4
  policy: 'CnnPolicy'
  n_envs: 8
  n_steps: 128
  n_epochs: 4
  batch_size: 256
  n_timesteps: !!float 1e7
  learning_rate: lin_2.5e-4
  clip_range: 0.1
"""


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    (tmp_path / "ppo.yml").write_text(ZOO)
    return tmp_path / "ppo.yml"


def zoo_changes(config: Config) -> dict[str, Any]:
    base = get_preset("compat-sb3-ppo")
    return {path: new for path, (_, new) in differences(config, base).items()}


def test_an_entry_of_the_zoo(zoo: Path) -> None:
    found = convert_sb3_zoo(zoo, "CartPole-v1")
    assert zoo_changes(found.config) == {
        "env.id": "CartPole-v1", "env.num_envs": 8, "ppo.num_steps": 32, "ppo.gae_lambda": 0.8,
        "ppo.num_minibatches": 1, "ppo.learning_rate": 1e-3, "ppo.schedule": "linear",
    }  # fmt: skip
    assert found.left == {"clip lin_0.2": "it does not fall here, it stays"}
    assert found.config.total_env_steps == 100_000 and found.config.name == "zoo-CartPole-v1"


def test_normalization_batches_and_the_value_loss_of_the_zoo(zoo: Path) -> None:
    found = convert_sb3_zoo(zoo, "Acrobot-v1")
    assert found.config.obs_norm is None
    assert found.config.reward_norm == RewardNormConfig(per="step")
    assert found.config.ppo.value_coef == 1.4  # on half the squared error
    assert found.config.ppo.num_minibatches == 4  # of 64 steps, which is nearest to 60
    assert "of 64 steps" in found.left["batch_size: 60"]


def test_continuous_actions_and_networks_of_the_zoo(zoo: Path) -> None:
    found = convert_sb3_zoo(zoo, "Pendulum-v1")
    config = found.config
    assert config.action.squash == "clip" and config.action.std_value == math.exp(-2)
    assert (config.model.hidden_sizes, config.model.activation) == ((32, 16), "relu")
    assert config.model.init == "torch" and config.obs_norm == ObsNormConfig(
        from_first_rollout=False
    )
    assert config.ppo.num_minibatches == 64  # SB3's batch size is 64 if none is given
    assert set(found.left) == {"use_sde"}


def test_memory_of_the_zoo_and_an_environment_that_is_not_here(zoo: Path) -> None:
    found = convert_sb3_zoo(zoo, "PendulumNoVel-v1", algorithm="ppo_lstm")
    assert found.config.model.memory == "lstm" and found.config.model.memory_size == 256
    assert found.config.ppo.minibatch_by == "segments" and found.config.ppo.num_minibatches == 4
    assert "unknown environment" in found.left["PendulumNoVel-v1"]


def test_atari_of_the_zoo(zoo: Path) -> None:
    found = convert_sb3_zoo(zoo, "atari")
    assert found.config.model == get_preset("compat-cleanrl-ppo-atari").model
    assert found.config.env.options == {"episodic_life": False}
    assert found.config.ppo.reward_clip == 1.0 and found.config.ppo.bootstrap_truncation
    assert found.config.ppo.num_minibatches == 4 and not found.left


@pytest.mark.parametrize(
    ("policy", "arch", "widths", "left"),
    [
        ("Mlp", "[]", (), []),
        ("Mlp", "None", (64, 64), []),
        ("Mlp", "[32]", (32,), []),
        ("Mlp", "dict(pi=[], vf=[64])", (), ["net_arch vf=[64]"]),
        ("Mlp", "dict(pi=[16, 8])", (16, 8), ["net_arch vf=[]"]),
        ("Mlp", "[dict(pi=[16], vf=[16])]", (16,), []),
        ("Cnn", "[]", (512,), []),  # SB3's encoder of images ends with a dense layer itself
        ("Cnn", "[64]", (512, 64), ["net_arch [64] behind images"]),
    ],
)
def test_the_layers_of_the_zoo(
    zoo: Path, policy: str, arch: str, widths: tuple[int, ...], left: list[str]
) -> None:
    kwargs = f"{{policy: {policy}Policy, policy_kwargs: 'dict(net_arch={arch})'}}"
    zoo.write_text(f"CartPole-v1: {kwargs}\natari: {kwargs}\n")
    found = convert_sb3_zoo(zoo, "atari" if policy == "Cnn" else "CartPole-v1")
    assert found.config.model.hidden_sizes == widths and list(found.left) == left
    assert any(given.startswith("net_arch: ") for given in found.taken)


def test_every_argument_of_the_zoos_normalization_is_accounted_for(zoo: Path) -> None:
    arguments = "clip_obs=5, clip_reward=4.0, gamma=0.9, epsilon=1e-6, norm_obs_keys=['a']"
    zoo.write_text(f"""
CartPole-v1: {{normalize: "dict({arguments})"}}
Acrobot-v1: {{normalize: "dict(norm_obs=False, norm_reward=False, {arguments})"}}
""")
    found = convert_sb3_zoo(zoo, "CartPole-v1")
    assert found.config.obs_norm == ObsNormConfig(from_first_rollout=False, clip=5.0)
    assert found.config.reward_norm == RewardNormConfig(per="step", clip=4.0, gamma=0.9)
    none = "it has no counterpart"
    rest = {"normalize epsilon=1e-06": none, "normalize norm_obs_keys=['a']": none}
    assert found.left == rest
    (said,) = (meant for given, meant in found.taken.items() if given.startswith("normalize"))
    assert "obs_norm.clip 5.0" in said and "reward_norm.clip 4.0" in said
    found = convert_sb3_zoo(zoo, "Acrobot-v1")
    assert found.config.obs_norm is None and found.config.reward_norm is None
    idle = ("clip_obs=5", "clip_reward=4.0", "gamma=0.9")
    why = "nothing is normalized by it"
    assert found.left == rest | {f"normalize {argument}": why for argument in idle}


def test_the_zoo_normalizes_rewards_by_the_gamma_of_the_entry(zoo: Path) -> None:
    zoo.write_text('CartPole-v1: {gamma: 0.98, normalize: "dict(gamma=0.9)"}')
    found = convert_sb3_zoo(zoo, "CartPole-v1")
    assert found.config.reward_norm == RewardNormConfig(per="step", gamma=None)  # ppo.gamma
    assert found.config.ppo.gamma == 0.98 and [*found.left] == ["normalize gamma=0.9"]


def test_the_zoos_target_kl_is_where_sb3_stops(zoo: Path) -> None:
    """SB3 stops above 1.5 times the number."""
    zoo.write_text("CartPole-v1: {target_kl: 0.02}\nAcrobot-v1: {target_kl: null}\n")
    found = convert_sb3_zoo(zoo, "CartPole-v1")
    assert found.config.ppo.target_kl == pytest.approx(0.03)
    assert found.taken["target_kl: 0.02"] == "ppo.target_kl 0.03"
    assert convert_sb3_zoo(zoo, "Acrobot-v1").config.ppo.target_kl is None


def test_numbers_that_yaml_reads_as_texts(zoo: Path) -> None:
    zoo.write_text("CartPole-v1: {n_timesteps: 1e5, target_kl: null, ent_coef: 1e-3}\n")
    config = convert_sb3_zoo(zoo, "CartPole-v1").config
    assert config.total_env_steps == 100_000 and config.ppo.entropy_coef == 1e-3


def test_memory_of_the_zoo_has_the_defaults_of_its_own_class(zoo: Path) -> None:
    """128 steps, and 128 in a batch: of eight environments eight minibatches."""
    zoo.write_text("CartPole-v1: {n_envs: 8}\n")
    config = convert_sb3_zoo(zoo, "CartPole-v1", algorithm="ppo_lstm").config
    assert (config.ppo.num_steps, config.ppo.num_minibatches) == (128, 8)


def test_one_environment_is_the_zoos_default_also_of_images(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yml"
    path.write_text("atari: {policy: CnnPolicy, n_timesteps: 1000, n_steps: 128, batch_size: 64}")
    config = convert_sb3_zoo(path, "atari").config
    assert (config.env.num_envs, config.ppo.num_steps, config.ppo.num_minibatches) == (1, 128, 2)


def test_what_the_other_settings_make_useless_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yml"
    path.write_text("ALE/Pong-v5: {n_epochs: 1, target_kl: 0.01, clip_range_vf: 0.2}")
    found = convert_sb3_zoo(path, "ALE/Pong-v5")
    assert found.config.name == "zoo-ALE-Pong-v5" and found.config.ppo.target_kl is None
    assert "no effect" in found.left["target_kl: 0.01"] and found.config.ppo.value_clip == 0.2
    assert "the clipped value counts" in found.left["the loss of clip_range_vf"]
    found = convert_cleanrl(["ppg_procgen.py", "--target-kl", "0.01", "--exp-name", "a/b"])
    assert found.config.name == "a-b" and found.config.ppo.target_kl is None
    assert "no effect" in found.left["--target-kl 0.01"]
    for flag in ("--num-aux-rollouts", "--n-aux-grad-accum"):
        assert "no such flag" in convert_cleanrl(["ppo.py", flag, "8"]).left[flag]


def test_mistakes_are_told(zoo: Path) -> None:
    with pytest.raises(ValueError, match=r"no entry CartPole-v0 .*did you mean 'CartPole-v1'"):
        convert_sb3_zoo(zoo, "CartPole-v0")
    zoo.write_text("a: [1\n")
    with pytest.raises(ValueError, match="is no YAML"):
        convert_sb3_zoo(zoo, "a")
    zoo.write_text("- 1\n")
    with pytest.raises(ValueError, match="does not have an entry"):
        convert_sb3_zoo(zoo, "a")
    zoo.write_text("CartPole-v1: {learning_rate: fast}\n")
    with pytest.raises(ValueError, match="learning_rate: 'fast' is not understood"):
        convert_sb3_zoo(zoo, "CartPole-v1")
    zoo.write_text("CartPole-v1: {policy_kwargs: 'dict(__import__(\"os\"))'}\n")
    with pytest.raises(ValueError, match="cannot be read as dict"):
        convert_sb3_zoo(zoo, "CartPole-v1")
    zoo.write_text("CartPole-v1: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="is no YAML"):
        convert_sb3_zoo(zoo, "CartPole-v1")
    with pytest.raises(ValueError, match="name the script first"):
        convert_cleanrl(["--num-envs", "3"])
    with pytest.raises(ValueError, match=r"no preset for dqn\.py"):
        convert_cleanrl(["dqn.py"])
    with pytest.raises(ValueError, match="'3' belongs to no flag"):
        convert_cleanrl(["ppo.py", "--seed=1", "3"])
    for words in (["--num-envs", "abc"], ["--num-envs"], ["--learning-rate", "--seed", "3"]):
        with pytest.raises(ValueError, match=r"needs a number; given was (abc|True)"):
            convert_cleanrl(["ppo.py", *words])
    with pytest.raises(ValueError, match="--track is on or off, True or False; given was games"):
        convert_cleanrl(["ppo.py", "--track", "games"])
    for entry, said in (
        ("n_timesteps: null", "n_timesteps: None is not a number"),
        ("gamma: abc", "gamma: 'abc' is not a number"),
        ("vf_coef: abc", "vf_coef: 'abc' is not understood"),
        ("batch_size: null", "batch_size: None is not a number"),
        ("batch_size: 0", "batch_size 0: each must be at least 1"),
        ("n_steps: 0", "n_steps 0, batch_size 64: each must be"),
        ("normalize: 'dict(clip_obs=[1])'", r"normalize: .* is not understood"),
        ("policy_kwargs: 'dict(net_arch=5)'", "layers that are no widths"),
        (
            "policy_kwargs: 'dict(net_arch=[128, dict(pi=[64], vf=[64])])'",
            r"net_arch: \[128, .* layers that are no widths; give \[64, 64\] or dict\(pi=",
        ),
        ("policy_kwargs: 'dict(net_arch=dict(pi=[64], vf=[0.5]))'", "layers that are no widths"),
    ):
        zoo.write_text(f"CartPole-v1: {{{entry}}}\n")
        with pytest.raises(ValueError, match=said):
            convert_sb3_zoo(zoo, "CartPole-v1")


def test_the_command_line_writes_a_configuration_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "c.json")
    words = ["convert", "cleanrl", "ppo.py", "--seed", "7", "--capture-video", "--output", output]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "--seed 7: seed 7" in said and "--capture-video: it films episodes" in said
    assert cli.parse_config(["--from", output]).seed == 7


def test_a_file_that_nobody_named_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["convert", "cleanrl", "ppo.py", "--num-envs", "8"]
    assert cli.main(words) == 0
    written = Path("config.json").read_text()
    Path("config.json").write_text("of mine")
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said == "error: config.json is there already; name the file to write: --output FILE\n"
    assert Path("config.json").read_text() == "of mine"
    assert cli.main([*words, "--output", "config.json"]) == 0
    assert Path("config.json").read_text() == written
