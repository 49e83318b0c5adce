"""Two machines that train one run: two network namespaces, joined by a pair of virtual cards."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Fault
from tests.faults.harness import only_run, wait_for
from tests.helpers import assert_same

ROOT = Path(__file__).parents[2]
STEPS, ENVS = 20_480, 8


class Machines:
    """Two network namespaces with the addresses 10.77.N.1 and 10.77.N.2."""

    def __init__(self, number: int) -> None:
        self.names = [f"phasicrl-{os.getpid()}-{end}" for end in (1, 2)]
        self.cards = [f"px{os.getpid() % 10**6}-{end}" for end in (1, 2)]
        self.addresses = [f"10.77.{number}.{end}" for end in (1, 2)]

    def build(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        one, other = self.cards
        run("ip", "link", "add", one, "type", "veth", "peer", "name", other)
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            run("ip", "link", "set", card, "netns", name)
            self.on(name, "ip", "addr", "add", f"{address}/24", "dev", card)
            self.on(name, "ip", "link", "set", card, "up")
            self.on(name, "ip", "link", "set", "lo", "up")

    def on(self, name: str, *command: str) -> None:
        """Run a command on one machine."""
        run("ip", "netns", "exec", name, *command)

    def cut(self) -> None:
        """Pull the plug."""
        self.on(self.names[0], "ip", "link", "set", self.cards[0], "down")

    def heal(self) -> None:
        """Put it in again."""
        self.on(self.names[0], "ip", "link", "set", self.cards[0], "up")

    def remove(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)

    def start(self, folder: Path, *words: str) -> list[subprocess.Popen[bytes]]:
        """Start the command of the pages for several machines on both."""
        started = []
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, card, address) in enumerate(
            zip(self.names, self.cards, self.addresses, strict=True)
        ):
            command = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--nproc-per-node", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:29511",
                # These machines have no names to tell by which of them has that address.
                "--rdzv-conf", f"is_host={1 - number}", "--rdzv-id", folder.name,
                "--local-addr", address, "-m", "phasicrl", "train", "classic-ppo",
                "--output-dir", str(folder), "--log.no-tensorboard",
                "--total-env-steps", str(STEPS), "--env.num-envs", str(ENVS), *words,
            ]  # fmt: skip
            variables = {"GLOO_SOCKET_IFNAME": card, "TP_SOCKET_IFNAME": card}
            output: Any = {"env": os.environ | variables, "stderr": subprocess.STDOUT}
            with (folder / f"said-{number}.txt").open("w") as said:
                started.append(subprocess.Popen(command, cwd=ROOT, stdout=said, **output))
        return started


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def machines(is_full: bool) -> Iterator[Machines]:
    """Make two machines; skip the test where that is not allowed, or in a short run."""
    if not is_full:
        pytest.skip("takes three minutes: make test-faults")
    made = Machines(os.getpid() % 250)
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield made
    made.remove()


def said(folder: Path) -> str:
    """Return what both machines have printed."""
    return "".join(path.read_text() for path in folder.glob("said-*.txt"))


def finish(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for both."""
    assert [process.wait(300) for process in processes] == [0, 0], said(folder)


def begun(folder: Path) -> bool:
    """Return true if a few iterations are done."""
    return any(len(path.read_text().splitlines()) > 3 for path in folder.glob("*/metrics.jsonl"))


@pytest.mark.fault("F-03", "two machines, a slow link, a link that is cut and healed", 1, 1)
def test_two_machines_train_one_run(tmp_path: Path, machines: Machines, fault: Fault) -> None:
    """A slow link, or one that is cut for a while, changes no bit of the run."""
    for _ in fault:
        finish(tmp_path / "good", machines.start(tmp_path / "good"))
        expected = only_run(tmp_path / "good").load_weights()
        assert only_run(tmp_path / "good").card["processes"] == 2

        processes = machines.start(tmp_path / "cut")
        wait_for(lambda: begun(tmp_path / "cut"))
        machines.cut()
        time.sleep(3)
        machines.heal()
        finish(tmp_path / "cut", processes)
        assert_same(only_run(tmp_path / "cut").load_weights(), expected)

        slow = ("tc", "qdisc", "add", "dev", machines.cards[0], "root", "tbf",
                "rate", "20mbit", "burst", "32kbit", "latency", "50ms")  # fmt: skip
        try:
            machines.on(machines.names[0], *slow)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"traffic cannot be shaped here: {error.stderr.strip()}")
        finish(tmp_path / "slow", machines.start(tmp_path / "slow"))
        assert_same(only_run(tmp_path / "slow").load_weights(), expected)


@pytest.mark.fault("F-03", "a link that is cut for too long: both machines end, go on later", 1, 1)
def test_a_link_that_is_cut_for_too_long(tmp_path: Path, machines: Machines, fault: Fault) -> None:
    """The processes end meanwhile; torchrun itself waits for the other machine's word."""
    for _ in fault:
        timeout = ("--compute.rank-timeout", "4", "--checkpoint.every-minutes", "0")
        processes = machines.start(tmp_path, *timeout)
        wait_for(lambda: begun(tmp_path))
        machines.cut()
        wait_for(lambda: "lost the connection" in said(tmp_path), 120, lambda: said(tmp_path))
        machines.heal()
        assert all(process.wait(300) for process in processes), said(tmp_path)
        assert only_run(tmp_path).checkpoints[-1].name > "step-000000000000"
        finish(tmp_path, machines.start(tmp_path, *timeout, "--resume", "auto"))
        assert only_run(tmp_path).card["env_steps"] == STEPS
