"""Measure the peak memory of PPG with a full phase of the paper's size.

32 rollouts of 64 environments and 256 steps, two networks; ten minutes on two cores.

usage: python benchmarks/memory.py OUT.json [--preset procgen-ppg]

Every rollout of the phase is collected, so that the buffer is written from end to end; then follow
the policy phase of the last one and the auxiliary phase with a single pass over one rollout's worth
of minibatches, drawn from the whole phase. More passes do the same again. Logs are the usual
ones, and a checkpoint is saved at the end.
"""

import json
import resource
import tempfile
from pathlib import Path

import tyro

from phasicrl import get_preset
from phasicrl.phases import auxiliary_phase, policy_phase
from phasicrl.system.machine import find_commit, processor
from phasicrl.training.build import start_run


def peak_memory() -> int:
    """Return the most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(output: Path, /, preset: str = "procgen-ppg") -> None:
    """Fill the buffer, train on it once, and write the memory in use after each stage."""
    found: dict[str, object] = {
        "preset": preset, "commit": find_commit() or "unknown", "processor": processor(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = get_preset(preset).with_updates(
            {"output_dir": folder, "aux.epochs": 1, "aux.iterations_per_epoch": 1}
        )
        with start_run(config) as run:
            found["after start-up"] = peak_memory()
            while not run.buffer.is_full:
                rollout = run.collect(run.buffer.next_rollout())
            policy_phase(run.learner, rollout)
            found["after the policy phase"] = peak_memory()
            auxiliary_phase(run.learner, run.buffer)
            found["after the auxiliary phase"] = peak_memory()
            run.save()
            found["after a checkpoint"] = peak_memory()
            found["buffer"] = sum(x.nbytes for x in run.buffer.rollouts.tensors().values())
            found["beyond the buffer"] = peak_memory() - found["buffer"]
            found["micro-batch"] = run.executor.plan.micro_batch
            found["precision"] = run.executor.plan.precision
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
