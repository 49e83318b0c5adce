"""Hand a sweep to a cluster, SLURM's or Ray's: each job works on it. Kind: effects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from phasicrl.config import ASKED_IMPORTS
from phasicrl.host.machine import optional_module
from phasicrl.sweeps.sweep import Sweep
from phasicrl.sweeps.work import Worker

Backend = Literal["slurm", "local", "ray"]


class ClusterJob:
    """What a job of submitit does. Told that its time is over, it stops and is queued again.

    Args:
        directory: of the sweep.
        how: arguments of `Worker`.
    """

    def __init__(self, directory: Path, how: dict[str, Any]) -> None:
        self.directory, self._how = directory, how
        self._worker: Worker | None = None

    def __call__(self) -> None:
        """Work until nothing is left."""
        self._worker = Worker(self.directory, **self._how)
        self._worker.run()

    def checkpoint(self) -> Any:
        """What is submitted in place of this job: the same; what was under way here is saved."""
        from submitit.helpers import DelayedSubmission

        if self._worker is not None:
            self._worker.stop()
        return DelayedSubmission(ClusterJob(self.directory, self._how))


def submit_sweep(
    directory: Path,
    *,
    backend: Backend = "slurm",
    workers: int = 1,
    jobs: int = 1,
    cpus: int = 1,
    gpus: float = 0,
    retries: int = 2,
    minutes: int = 24 * 60,
    requeues: int = 20,
    options: Sequence[str] = (),
    address: str = "auto",
) -> list[str]:
    """Have jobs of a cluster work on a sweep; each is what `phasicrl sweep work` is.

    Args:
        directory: Of the sweep, where all machines see it.
        backend: SLURM, background processes on this machine, or Ray.
        workers: How many jobs.
        jobs: Trials at a time in each; they share its cores and its GPUs.
        cpus: Cores of each job.
        gpus: 1 or none for each job, which its trials share; for Ray also a part of one.
        retries: How often a trial that failed is tried again, from its last checkpoint.
        minutes: SLURM: a job that has not finished by then stops in order and is queued again.
        requeues: SLURM: how often. Ray: how often a job whose machine is lost is started anew.
        options: SLURM: further ones of `sbatch`, for example partition=gpu.
        address: Of the Ray cluster.

    Returns:
        SLURM and local: the ids of the jobs, which have not begun. Ray: nothing is left when this
        returns.

    Raises:
        ValueError: numbers that cannot be, or not a sweep.
        ImportError: submitit or Ray is not installed.
    """
    if workers < 1 or cpus < 1 or not 0 <= gpus <= 1:
        raise ValueError(
            f"workers is {workers}, cpus is {cpus} and gpus is {gpus:g}; "
            "give at least one worker and one core, and at most one GPU (a trial uses one)"
        )
    Sweep(directory)
    how = {"jobs": jobs, "retries": retries, "cores": cpus, "wait": False}
    how |= {"imports": [*ASKED_IMPORTS]}
    directory = directory.resolve()
    if backend == "ray":
        _run_on_ray(directory, how, workers, cpus, gpus, requeues, address)
        return []
    submitted = {"timeout_min": minutes, "cpus_per_task": cpus, "gpus_per_node": gpus}
    return _submit(ClusterJob(directory, how), backend, workers, requeues, submitted, options)


def _submit(
    job: ClusterJob, backend: Backend, workers: int, requeues: int, submitted: dict[str, Any],
    options: Sequence[str],
) -> list[str]:  # fmt: skip
    """Queue an array of jobs with submitit; returns their ids."""
    if submitted["gpus_per_node"] != int(submitted["gpus_per_node"]):
        raise ValueError(
            f"gpus is {submitted['gpus_per_node']:g}, and {backend} gives whole ones; "
            "with more jobs in a worker they share one"
        )
    submitit = optional_module("submitit", "this needs submitit", "slurm")
    executor = submitit.AutoExecutor(
        job.directory / backend, cluster=backend, **{f"{backend}_max_num_timeout": requeues}
    )
    submitted["gpus_per_node"] = int(submitted["gpus_per_node"])
    executor.update_parameters(name="phasicrl-sweep", **submitted)
    if backend == "slurm":
        executor.update_parameters(slurm_additional_parameters=dict(map(_option, options)))
    with executor.batch():
        array = [executor.submit(job) for _ in range(workers)]
    return [each.job_id for each in array]


def _option(word: str) -> tuple[str, str]:
    """The name and the value of an option for `sbatch`."""
    name, equals, value = word.partition("=")
    if not name or not equals:
        raise ValueError(f"options are NAME=VALUE, for example partition=gpu; given was {word!r}")
    return name, value


def _work(directory: Path, how: dict[str, Any]) -> None:
    """What a task of Ray does."""
    Worker(directory, **how).run()


def _run_on_ray(
    directory: Path, how: dict[str, Any], workers: int, cpus: int, gpus: float, requeues: int,
    address: str,
) -> None:  # fmt: skip
    """Work on a sweep in tasks of a Ray cluster, and wait for them."""
    ray = optional_module("ray", "this needs Ray", "ray")
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    task = ray.remote(_work).options(
        num_cpus=cpus, num_gpus=gpus, max_retries=requeues, scheduling_strategy="SPREAD"
    )
    tasks = [task.remote(directory, how) for _ in range(workers)]
    # `get` raises with the first that fails; then the command would end, and all others with it.
    ray.wait(tasks, num_returns=len(tasks))
    ray.get(tasks)
