"""Clusters: for real, but on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phasicrl.runs.directory import RunDirectory
from phasicrl.sweeps import submit
from phasicrl.sweeps.attempts import all_attempts, started
from phasicrl.sweeps.submit import submit_sweep
from phasicrl.sweeps.sweep import Sweep, create_sweep
from phasicrl.sweeps.work import FailedTrialsError
from tests.faults.harness import small, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_sweep(
        tmp_path / "sweep", [("a", small(tmp_path, "ppo", total_env_steps=150 * 64))], seeds=(1, 2)
    )
    return tmp_path / "sweep"


def outcomes(folder: Path) -> list[list[str | None]]:
    found = sorted(all_attempts(folder).items())
    return [[attempt.read().get("outcome") for attempt in of] for _, of in found]


def has_begun(folder: Path, number: int) -> bool:
    """Whether so many trials have got somewhere."""
    runs = [run for trial in Sweep(folder).trials() for run in Sweep(folder).runs(trial) if run]
    return sum(len(run.last_rows(5)) == 5 for run in runs) >= number


def test_what_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="give at least one worker"):
        submit_sweep(folder, workers=0)
    with pytest.raises(ValueError, match=r"gpus is 2; .* at most one GPU"):
        submit_sweep(folder, gpus=2)
    with pytest.raises(ValueError, match="is not the folder of a sweep"):
        submit_sweep(folder.parent, backend="local")
    with pytest.raises(ValueError, match="local gives whole ones"):
        submit_sweep(folder, backend="local", gpus=0.5)


class Ray(ModuleType):
    """Stands for Ray: a task runs when it is waited for; `get` raises with the first that fails."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.errors: dict[int, Exception | None] = {}

    def is_initialized(self) -> bool:
        return True

    def remote(self, function: Any) -> Any:
        self._function = function
        return self

    def options(self, **_: Any) -> Any:
        task = ModuleType("task")
        task.remote = lambda *words: lambda: self._function(*words)  # type: ignore
        return task

    def wait(self, tasks: list[Any], *, num_returns: int) -> None:
        for task in tasks[:num_returns]:
            try:
                self.errors[id(task)] = task()
            except FailedTrialsError as error:
                self.errors[id(task)] = error

    def get(self, tasks: list[Any]) -> None:
        for task in tasks:
            if id(task) not in self.errors:
                self.wait([task], num_returns=1)
            if error := self.errors[id(task)]:
                raise error


def test_on_ray_a_worker_that_fails_does_not_end_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def work(directory: Path, how: dict[str, Any]) -> None:
        begun.append(directory)
        if len(begun) < 3:
            raise FailedTrialsError(f"worker {len(begun)} found trials that failed")

    monkeypatch.setitem(sys.modules, "ray", Ray())
    monkeypatch.setattr(submit, "_work", work)
    with pytest.raises(FailedTrialsError, match="worker 1 found"):
        submit_sweep(folder, backend="ray", workers=4)
    assert begun == [folder] * 4


@pytest.mark.slow
@pytest.mark.filterwarnings(
    # submitit does not wait for its processes
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_job_that_is_told_its_time_is_over_goes_on_when_it_is_queued_again(folder: Path) -> None:
    (job,) = submit_sweep(folder, backend="local")
    wait_for(lambda: has_begun(folder, 1))
    below = subprocess.run(["pgrep", "-P", job], check=True, capture_output=True, text=True)
    os.kill(int(below.stdout), signal.SIGUSR2)  # what SLURM sends before the time is over
    wait_for(lambda: started(int(job)) is None, 120)
    assert outcomes(folder) == [["released", "done"], ["done"]]
    assert len(list((folder / "runs").iterdir())) == 2


needs_slurm = pytest.mark.skipif(
    not shutil.which("sbatch"), reason="SLURM is not here; tools/slurm.sh sets it up"
)


def states(jobs: list[str]) -> set[str]:
    """Those of jobs that SLURM has not finished."""
    told = subprocess.run(
        ["squeue", "--noheader", "--format", "%T", "--jobs", ",".join(jobs)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return set(told.stdout.split())  # an error once it has forgotten them


@pytest.mark.slow
@needs_slurm
def test_slurm_trains_it_on_two_nodes(folder: Path) -> None:
    jobs = submit_sweep(folder, workers=2, options=["partition=all", "exclusive=user"])
    wait_for(lambda: not states(jobs), 120)
    assert outcomes(folder) == [["done"], ["done"]]


@pytest.mark.slow
@needs_slurm
def test_slurm_queues_a_job_again_when_its_time_is_over(tmp_path: Path) -> None:
    """submitit asks for a signal 90 seconds before the end; SLURM gives it up to a minute earlier,
    and waits for two before it starts the job again.
    """
    long = small(tmp_path, "ppo", total_env_steps=900_000 * 64)
    create_sweep(tmp_path / "sweep", [("a", long)], seeds=(1,))
    jobs = submit_sweep(tmp_path / "sweep", minutes=3, requeues=1)
    wait_for(lambda: outcomes(tmp_path / "sweep")[:1] == [["released", None]], 480)
    (run,) = (RunDirectory(path) for path in (tmp_path / "sweep" / "runs").iterdir())
    (before,) = run.last_rows(1)
    wait_for(lambda: run.last_rows(1)[0]["env_steps"] > before["env_steps"], 60)
    subprocess.run(["scancel", *jobs], check=True)
    wait_for(lambda: not states(jobs), 60)


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_trains_it_though_one_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)  # Ray takes it, and does not give it back
    size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        # This process belongs to the node that there is now, which stays.
        ray.init(address=cluster.address, log_to_driver=False)
        node = cluster.add_node(**size)
        cluster.wait_for_nodes()
        assert len(ray.nodes()) == 2 and ray.cluster_resources()["CPU"] == 2

        def lose_a_node() -> None:
            wait_for(lambda: has_begun(folder, 2), 120)
            cluster.remove_node(node, allow_graceful=False)

        loser = threading.Thread(target=lose_a_node)
        loser.start()
        submit_sweep(folder, backend="ray", workers=2, address=str(cluster.address))
        loser.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)
    ends = outcomes(folder)
    assert [of[-1] for of in ends] == ["done", "done"] and sorted(map(len, ends)) == [1, 2]
    assert len(list((folder / "runs").iterdir())) == 2
