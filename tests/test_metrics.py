"""The record of a run: means, rows that survive crashes, sinks, and what a person sees."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from phasicrl import metrics
from phasicrl.config import AuxConfig, Config, EnvConfig, LogConfig, PPOConfig
from phasicrl.metrics import METRICS, MeanAccumulator, MetricsLog, read_metrics

BATCH = 8 * 16  # environment steps of an iteration of `config()`


def config(*, aux: AuxConfig | None = None, iterations: int = 10, ppo: PPOConfig | None = None, **log: Any) -> Config:
    return Config(
        name="demo",
        env=EnvConfig(id="procgen:coinrun", num_envs=8),
        ppo=ppo or PPOConfig(num_steps=16, num_minibatches=2),
        aux=aux,
        total_env_steps=iterations * BATCH,
        log=LogConfig(**{"console": "off", "tensorboard": False, **log}),
    )


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "monotonic", clock)
    return clock


class FakeTerminal(io.StringIO):
    """A terminal that remembers everything that was sent to it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    fake = FakeTerminal()
    monkeypatch.setattr(metrics, "sys", types.SimpleNamespace(stdout=fake))
    return fake


def text_of(terminal: FakeTerminal) -> str:
    """What was sent, without the codes for colours and the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def write_rows(log: MetricsLog, first: int, last: int, **record: float) -> None:
    for iteration in range(first, last + 1):
        values = {"charts/SPS": float(iteration), **{name.replace("__", "/"): value for name, value in record.items()}}
        log.write(values, env_steps=iteration * BATCH, iteration=iteration, phase=0)


# ---------------------------------------------------------------------------------------------------------------- means


def test_means_are_weighted_by_samples() -> None:
    means = MeanAccumulator()
    means.add({"losses/entropy": torch.tensor(1.0), "losses/value_loss": 4.0}, weight=3)
    means.add({"losses/entropy": torch.tensor(5.0), "losses/value_loss": 8.0}, weight=1)
    assert means.result() == {"losses/entropy": 2.0, "losses/value_loss": 5.0}


def test_names_may_come_in_different_groups_and_kinds() -> None:
    means = MeanAccumulator()
    means.add({"a": torch.tensor(1.0), "b": torch.tensor(10.0)}, weight=1)
    means.add({"a": torch.tensor(4.0)}, weight=2)
    means.add({"a": 7.0}, weight=1)
    assert means.result() == {"a": (1 + 8 + 7) / 4, "b": 10.0}


def test_a_tensor_may_be_overwritten_after_it_was_added() -> None:
    means, loss = MeanAccumulator(), torch.tensor(2.0)
    means.add({"a": loss}, weight=1)
    loss.fill_(1000.0)
    assert means.result() == {"a": 2.0}


def test_tensors_with_gradients_keep_their_graph_and_do_not_enter_the_sum() -> None:
    means, weight = MeanAccumulator(), torch.tensor(3.0, requires_grad=True)
    loss = weight * weight
    means.add({"a": loss}, weight=1)
    loss.backward()
    assert weight.grad is not None and weight.grad.item() == 6.0
    with torch.inference_mode():
        means.add({"a": torch.tensor(1.0)}, weight=1)
    means.add({"a": torch.tensor(2.0)}, weight=1)
    assert means.result() == {"a": 4.0}


def test_sums_are_in_double_precision() -> None:
    means = MeanAccumulator()
    means.add({"a": torch.tensor(1e8)}, weight=1)
    for _ in range(1000):
        means.add({"a": torch.tensor(1.0)}, weight=1)
    assert means.result()["a"] * 1001 == pytest.approx(1e8 + 1000, abs=1e-3)


def test_ranks_are_joined_by_their_samples() -> None:
    means = MeanAccumulator()
    means.add({"b": torch.tensor(1.0), "a": 3.0}, weight=2)
    other_rank = torch.tensor([6.0, 1.0, 40.0, 4.0], dtype=torch.float64)  # (sum, weight) of a and b
    joined = means.result(lambda table: table + other_rank)
    assert joined == {"a": (6 + 6) / 3, "b": (2 + 40) / 6}


def test_nothing_added_is_an_empty_record_and_no_weight_is_nan() -> None:
    means = MeanAccumulator()
    assert means.result(lambda table: table) == {}
    means.add({"a": 1.0}, weight=0)
    assert math.isnan(means.result()["a"])


def test_a_metric_is_one_number() -> None:
    with pytest.raises(AssertionError, match=r"0-d tensors; \('a',\) have the shape \(2,\)"):
        MeanAccumulator().add({"a": torch.ones(2)}, weight=1)


# ----------------------------------------------------------------------------------------------------------------- rows


def test_every_metric_has_a_group_and_a_sentence() -> None:
    for name, meaning in METRICS.items():
        assert re.fullmatch(r"[a-z]+(/[A-Za-z0-9_]+)+", name), name
        assert meaning.endswith(").") and "(" in meaning, f"{name}: a sentence that ends with its unit"


def test_a_row_holds_the_place_in_the_run_and_every_metric(tmp_path: Path, clock: Clock) -> None:
    with MetricsLog(tmp_path / "run", config()) as log:
        clock.now += 2.5
        log.write({"losses/entropy": 0.25, "charts/num_episodes": 3}, env_steps=128, iteration=1, phase=0)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"env_steps": 128, "iteration": 1, "phase": 0, "wall_time": 2.5, "charts/num_episodes": 3.0, "losses/entropy": 0.25}]


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, config()) as log:
        record = {"losses/entropy": math.nan, "losses/value_loss": math.inf, "losses/policy_loss": torch.tensor(-math.inf)}
        log.write(record, env_steps=128, iteration=1, phase=0)  # pyright: ignore[reportArgumentType]
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["losses/entropy"] is row["losses/value_loss"] is row["losses/policy_loss"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["losses/entropy"])


def test_a_row_is_on_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, config()) as log:
        write_rows(log, 1, 2)
        assert [row["charts/SPS"] for row in read_metrics(tmp_path)] == [1.0, 2.0]


@pytest.mark.parametrize("active", [True, False])
def test_a_metric_without_description_is_refused_by_name(tmp_path: Path, active: bool) -> None:
    with (
        MetricsLog(tmp_path, config(), active=active) as log,
        pytest.raises(ValueError, match="metric 'losses/entropi' has no description; did you mean 'losses/entropy'"),
    ):
        log.write({"losses/entropi": 1.0}, env_steps=1, iteration=1, phase=0)


def test_a_resumed_run_has_every_row_once(tmp_path: Path, clock: Clock) -> None:
    with MetricsLog(tmp_path, config()) as log:
        for iteration in range(1, 6):
            clock.now += 10
            write_rows(log, iteration, iteration)
    clock.now += 10_000  # the pause between the two processes is not part of the run
    with MetricsLog(tmp_path, config(), resumed_at=3 * BATCH) as log:
        clock.now += 10
        write_rows(log, 4, 4)
    rows = read_metrics(tmp_path)
    assert [row["env_steps"] for row in rows] == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert [row["wall_time"] for row in rows] == [10, 20, 30, 40]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", ['{"env_steps": 384, "iter', '{"env_steps": 384, "iteration": 3}'[:-1], "\0" * 40, "12"])
def test_a_line_torn_by_a_crash_is_dropped(tmp_path: Path, tail: str) -> None:
    with MetricsLog(tmp_path, config()) as log:
        write_rows(log, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert len(read_metrics(tmp_path)) == 2
    with MetricsLog(tmp_path, config(), resumed_at=2 * BATCH) as log:
        write_rows(log, 3, 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["env_steps"] for line in lines] == [BATCH, 2 * BATCH, 3 * BATCH]


def test_a_last_line_that_lost_only_its_line_break_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 128}')
    with MetricsLog(tmp_path, config(), resumed_at=BATCH) as log:
        write_rows(log, 2, 2)
    assert [row["env_steps"] for row in read_metrics(tmp_path)] == [BATCH, 2 * BATCH]


def test_a_line_damaged_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 128}\n{"env_ste\n{"env_steps": 384}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl is damaged"):
        read_metrics(tmp_path)


def test_resuming_before_the_first_row_and_without_a_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, config(), resumed_at=0) as log:
        write_rows(log, 1, 2)
    with MetricsLog(tmp_path, config(), resumed_at=0) as log:
        write_rows(log, 1, 1)
    assert [row["env_steps"] for row in read_metrics(tmp_path)] == [BATCH]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, config()) as log:
        write_rows(log, 1, 1)
    with pytest.raises(FileExistsError, match="holds the metrics of an earlier run; resume that run"):
        MetricsLog(tmp_path, config())


def test_a_folder_without_metrics_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no metrics\.jsonl: it is not a run directory"):
        read_metrics(tmp_path)


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tmp_path / "run", config(console="plain", tensorboard=True), active=False) as log:
        log.progress("rollout", env_steps=1)
        log.message("hello")
        write_rows(log, 1, 1)
        log.flush()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, config())
    log.close()
    log.flush()
    log.close()


# ---------------------------------------------------------------------------------------------------------------- sinks


def tensorboard_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run_dir))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_same_names_over_environment_steps(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, config(tensorboard=True)) as log:
        write_rows(log, 1, 2, losses__aux__kl_loss=0.5, losses__entropy=math.nan)
    assert tensorboard_scalars(tmp_path) == {
        "charts/SPS": [(BATCH, 1.0), (2 * BATCH, 2.0)],
        "losses/aux/kl_loss": [(BATCH, 0.5), (2 * BATCH, 0.5)],
    }


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, config(tensorboard=True)) as log:
        write_rows(log, 1, 4)
    with MetricsLog(tmp_path, config(tensorboard=True), resumed_at=2 * BATCH) as log:
        log.write({"charts/SPS": 30.0}, env_steps=3 * BATCH, iteration=3, phase=0)
    assert tensorboard_scalars(tmp_path)["charts/SPS"] == [(BATCH, 1.0), (2 * BATCH, 2.0), (3 * BATCH, 30.0)]


def test_without_tensorboard_a_run_says_so_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.summary_pb2", None)
    with MetricsLog(tmp_path, config(tensorboard=True, console="plain")) as log:
        write_rows(log, 1, 1)
    out = capsys.readouterr().out
    assert out.count("pip install 'phasicrl[tensorboard]'") == 1
    assert len(read_metrics(tmp_path)) == 1


class FakeWandB(types.ModuleType):
    """Remembers what was sent to Weights & Biases."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self.finished = 0

    def init(self, **settings: Any) -> FakeWandB:
        self.begun.append(settings)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_the_same_names_and_a_resumed_run_goes_on_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = config(wandb=True, wandb_project="games")
    with MetricsLog(tmp_path / "run", settings) as log:
        write_rows(log, 1, 1, losses__entropy=math.inf)
    with MetricsLog(tmp_path / "run", settings, resumed_at=BATCH) as log:
        write_rows(log, 2, 2)
    assert wandb.rows == [{"env_steps": BATCH, "charts/SPS": 1.0}, {"env_steps": 2 * BATCH, "charts/SPS": 2.0}]
    assert wandb.finished == 2 and wandb.axes[0] == ("*", "env_steps")
    first, second = wandb.begun
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["project"], first["group"], first["name"]) == ("games", "demo", "run")
    assert first["config"]["env"]["id"] == "procgen:coinrun"


def test_without_wandb_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'phasicrl\[track\]'"):
        MetricsLog(tmp_path, config(wandb=True))


# ----------------------------------------------------------------------------------------------------------------- pace


def test_time_left_and_speed_of_ppo_by_hand() -> None:
    pace = metrics._Pace(config(iterations=10), 0, 0.0)
    assert pace.seconds_left(1.0) is None and pace.steps_per_second() == 0.0
    pace.iteration({}, BATCH, 4.0)
    pace.iteration({}, 2 * BATCH, 10.0)
    assert pace.steps_per_second() == 2 * BATCH / 10
    assert pace.seconds_left(10.0) == 8 * 5.0  # 8 iterations to come, 5 s each on average
    assert pace.seconds_left(13.0) == 37.0
    assert pace.seconds_left(1000.0) == 0.0
    pace.iteration({}, 10 * BATCH, 11.0)
    assert pace.seconds_left(11.0) == 0.0


@pytest.mark.parametrize("console", ["plain", "live"])
def test_what_is_prepared_before_the_first_rollout_does_not_count(
    tmp_path: Path, clock: Clock, terminal: FakeTerminal, console: str
) -> None:
    with MetricsLog(tmp_path, config(console=console, iterations=10)) as log:
        clock.now += 60  # environments, networks, compilers
        log.progress("rollout", env_steps=0)
        clock.now += 1
        log.progress("policy", env_steps=BATCH)
        write_rows(log, 1, 1)
        clock.now += 1
        log.progress("rollout", env_steps=BATCH)
    assert "128 steps/s" in text_of(terminal) and ("9 s left" in text_of(terminal) or "8 s left" in text_of(terminal))


def test_time_left_of_ppg_counts_the_auxiliary_phases_to_come() -> None:
    pace = metrics._Pace(config(iterations=12, aux=AuxConfig(every=4, epochs=6, num_minibatches=2)), 0, 0.0)
    seconds = {"time/rollout": 1.0, "time/policy": 0.5, "time/auxiliary": 0.0}
    for iteration in range(1, 4):
        pace.iteration(seconds, iteration * BATCH, iteration * 2.0)
    # No phase is measured yet: 6 epochs over 4 iterations at 0.5 s. Two of them, none at the end, and 9 iterations of 2 s.
    assert pace.seconds_left(6.0) == pytest.approx(9 * 2 + 2 * 6 * 4 * 0.5)
    pace.iteration(seconds | {"time/auxiliary": 20.0}, 4 * BATCH, 28.0)
    assert pace.seconds_left(28.0) == pytest.approx(8 * 2 + 1 * 20)


def test_time_left_knows_the_knobs_of_the_auxiliary_phase() -> None:
    aux = AuxConfig(every=4, epochs=3, run_every=2, iterations_per_epoch=2, num_minibatches=2)
    ppo = PPOConfig(num_steps=16, num_minibatches=2, policy_epochs=2, value_epochs=4)
    pace = metrics._Pace(config(iterations=17, aux=aux, ppo=ppo), 0, 0.0)
    pace.iteration({"time/policy": 2.0, "time/value": 8.0, "time/auxiliary": math.nan}, BATCH, 10.0)
    # A pass with both losses takes 2/2 + 8/4 = 3 s; 3 epochs over 2 iterations; every 8th iteration has one: 2 of 17.
    assert pace.seconds_left(10.0) == pytest.approx(16 * 10 + 2 * 3 * 2 * 3.0)


def test_speed_is_recent() -> None:
    pace = metrics._Pace(config(iterations=1000), 0, 0.0)
    for iteration in range(1, 101):
        pace.iteration({}, iteration * BATCH, float(iteration))
    for iteration in range(101, 401):
        pace.iteration({}, iteration * BATCH, 100 + (iteration - 100) / 10)
    assert pace.steps_per_second() == pytest.approx(10 * BATCH)


# -------------------------------------------------------------------------------------------------------------- console


def test_plain_lines_by_hand(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "charts/episodic_return_100": 12.345, "charts/episodic_length": 1234.5, "losses/entropy": 2.7, "losses/approx_kl": 0.004212,
        "losses/explained_variance": math.nan, "charts/SPS": 3.0,
    }  # fmt: skip
    with MetricsLog(tmp_path, config(console="plain", iterations=20)) as log:
        clock.now += 4
        log.write(record, env_steps=BATCH, iteration=1, phase=0)
    line = "  5.0 %  128/2.56k steps  32 steps/s  return 12.3  length 1,234  entropy 2.70  kl 0.00421  expl.var -  76 s left\n"
    assert capsys.readouterr().out == line


def test_plain_lines_are_two_seconds_apart_and_the_last_is_never_lost(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsLog(tmp_path, config(console="plain", iterations=100)) as log:
        for iteration in range(1, 24):  # 0.5 s each
            clock.now += 0.5
            log.progress("rollout", env_steps=iteration * BATCH)
            write_rows(log, iteration, iteration)
    shown = [float(line.split("%")[0]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [1, 5, 9, 13, 17, 21, 23]


def test_plain_lines_are_ascii_and_messages_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tmp_path, config(console="plain")) as log:
        log.message("checkpoint saved")
        write_rows(log, 1, 1, losses__aux__kl_loss=1e-9)
        out = capsys.readouterr().out
        assert out.startswith("checkpoint saved\n") and "aux kl 1.0e-09" in out and out.isascii()


def test_off_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tmp_path, config(console="off")) as log:
        log.progress("rollout", env_steps=1)
        log.message("hello")
        write_rows(log, 1, 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environment", "kind"),
    [({}, "_Live"), ({"NO_COLOR": "1"}, "_Live"), ({"TERM": "dumb"}, "_Lines"), ({"CI": "true"}, "_Lines"), ({"CI": ""}, "_Live")],
)
def test_auto_is_live_only_where_somebody_can_watch(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], kind: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert type(metrics._open_display(config(console="auto"), 0, terminal)).__name__ == kind


@pytest.mark.parametrize("stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")])
def test_auto_is_plain_in_files_and_pipes(stream: TextIO) -> None:
    assert isinstance(metrics._open_display(config(console="auto"), 0, stream), metrics._Lines)


def test_a_terminal_that_cannot_show_the_signs_gets_lines(terminal: FakeTerminal) -> None:
    terminal.encoding = "latin-1"
    assert isinstance(metrics._open_display(config(console="auto"), 0, terminal), metrics._Lines)


def test_the_choice_of_a_display_is_obeyed(terminal: FakeTerminal) -> None:
    assert isinstance(metrics._open_display(config(console="plain"), 0, terminal), metrics._Lines)
    assert isinstance(metrics._open_display(config(console="live"), 0, io.StringIO()), metrics._Live)


def run_live(tmp_path: Path, clock: Clock, settings: Config) -> None:
    """Two iterations, the second with an auxiliary phase, and the beginning of a third."""
    with MetricsLog(tmp_path, settings) as log:
        log.progress("rollout", env_steps=0)
        clock.now += 5
        log.progress("policy", env_steps=BATCH)
        write_rows(log, 1, 1, charts__episodic_return_100=21.5, losses__entropy=2.0, time__auxiliary=0.0)
        log.message("checkpoint [saved]")
        clock.now += 5
        log.progress("auxiliary 2/6", env_steps=2 * BATCH)
        write_rows(log, 2, 2, losses__aux__kl_loss=0.004, time__auxiliary=2.0)
        clock.now += 1
        log.progress("rollout", env_steps=2 * BATCH + 64)


def test_the_live_display_shows_the_place_and_the_numbers(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    run_live(tmp_path, clock, config(console="live", iterations=5, aux=AuxConfig(every=2, num_minibatches=2)))
    text = text_of(terminal)
    frames = text.split("╭─")
    assert "demo · procgen:coinrun · seed 1" in frames[1]
    assert "rollout  ·  iteration 1/5  ·  1/2 until the auxiliary phase" in frames[1]
    assert "auxiliary 2/6  ·  iteration 2/5 " in text
    assert "rollout  ·  iteration 3/5  ·  1/2 until the auxiliary phase" in text
    assert re.search(r"50\.0 %  320/640 steps  26 steps/s  13 s left", text), (
        "3 iterations of 4 s and a phase of 2 s, less the second that passed"
    )
    for label in ("return", "length", "entropy", "KL", "expl. var.", "value loss", "aux KL"):
        assert label in frames[-1]
    assert re.search(r"21\.5 +– +2\.00 +– +– +– +0\.00400", frames[-1])
    assert "checkpoint [saved]" in text
    assert "stopped  ·  iteration 3/5" in frames[-1] and "in 11 s" in frames[-1]
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_live_display_of_ppo_has_no_auxiliary_phase_and_ends_finished(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    with MetricsLog(tmp_path, config(console="auto", iterations=1)) as log:
        log.progress("rollout", env_steps=BATCH)
        write_rows(log, 1, 1)
    text = text_of(terminal)
    assert "aux" not in text
    assert "finished  ·  iteration 1/1" in text


def test_a_narrow_terminal_shows_everything_on_more_lines(
    tmp_path: Path, clock: Clock, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run_live(tmp_path, clock, config(console="live", iterations=5, aux=AuxConfig(every=2, num_minibatches=2)))
    text = text_of(terminal)
    assert "50.0 %  320/640 steps  26 steps/s" in text and "aux KL" in text and "expl. var." in text
    assert max(len(line) for line in text.replace("\r", "\n").splitlines()) <= 60


def test_the_live_display_is_drawn_at_most_four_times_a_second(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    with MetricsLog(tmp_path, config(console="live")) as log:
        for step in range(1000):
            clock.now += 0.001
            log.progress("policy", env_steps=step)
        assert text_of(terminal).count("╭─") <= 5


def test_no_colour_only_takes_the_colour_away(
    tmp_path: Path, clock: Clock, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run_live(tmp_path, clock, config(console="auto", iterations=4))
    assert "╭─" in text_of(terminal)
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", terminal.getvalue())


def test_after_the_last_auxiliary_phase_none_is_announced(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    run_live(tmp_path, clock, config(console="live", iterations=4, aux=AuxConfig(every=2, num_minibatches=2)))
    text = text_of(terminal)
    assert "iteration 1/4  ·  1/2 until the auxiliary phase" in text
    assert "iteration 3/4  " in text and "iteration 3/4  ·" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (100, "100"), (999, "999"), (1000, "1k"), (16_384, "16.4k"), (100_000, "100k"), (999_999, "1M"), (25e6, "25M"), (2e9, "2G")],
)
def test_compact_numbers(number: float, text: str) -> None:
    assert metrics._compact(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (23.456, "23.5"), (-0.0123456, "-0.0123"), (1234.6, "1,235"), (9.87e-6, "9.9e-06"), (math.inf, "inf"), (math.nan, "-")],
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert metrics._number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (98.0, "98 s"), (600.0, "10 min"), (7_500.0, "2 h 05 min"), (86_399.0, "24 h 00 min"), (200_000.0, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert metrics._duration(seconds) == text
