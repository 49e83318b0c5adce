"""Measure images per second through the IMPALA network, forward and backward.

usage: python benchmarks/encoder.py OUT.csv [--repeats 5]

Cases differ in micro-batch, precision, memory and compilation. Each runs in a process of its own
for 1.5 s after warm-up, interleaved; a row each. Rows named `features` and `gradients` hold the
relative error of bf16 against fp32.
"""

import csv
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import tyro

from phasicrl.config import ModelConfig
from phasicrl.execution import device
from phasicrl.models.encoders import ImpalaCNN, autocast
from phasicrl.system.machine import find_commit, num_cores

SIZES = (16, 32, 64, 128, 256, 512)
SECONDS = 1.5
USUAL = {"size": 64, "precision": "fp32", "memory": "kept", "run": "eager"}
CASES: tuple[dict[str, Any], ...] = (
    *(
        {**USUAL, "size": size, "precision": precision}
        for size, precision in itertools.product(SIZES, ("fp32", "bf16"))
    ),
    {**USUAL, "size": 2048},
    {**USUAL, "memory": "default"},
    {**USUAL, "size": 2048, "memory": "default"},
    *({**USUAL, "precision": precision, "run": "compiled"} for precision in ("fp32", "bf16")),
)


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Measure one case in this process: images per second, and the errors of bf16."""
    if case["memory"] == "kept":
        device.keep_freed_memory()
    torch.set_num_threads(num_cores())
    network = ImpalaCNN((64, 64, 3), ModelConfig(), generator=torch.Generator().manual_seed(0))
    parameters = list(network.parameters())
    generator = torch.Generator().manual_seed(1)
    shape = (case["size"], 64, 64, 3)
    images = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)

    def forward_backward(network: Any, precision: Any) -> list[Any]:
        """Return features and, in one tensor, all gradients of their weighted mean."""
        with autocast(precision, images.device):
            features = network(images).float()
        mean = (features @ torch.linspace(-1, 1, features.shape[-1])).mean()
        gradients = torch.autograd.grad(mean, parameters)
        return [features.detach(), torch.cat([each.float().flatten() for each in gradients])]

    found: dict[str, float] = {}
    if case["precision"] == "bf16":
        rounded, exact = (forward_backward(network, precision) for precision in ("bf16", "fp32"))
        for name, one, other in zip(("features", "gradients"), rounded, exact, strict=True):
            found[name] = float((one - other).norm() / other.norm())
    run = torch.compile(network) if case["run"] == "compiled" else network
    for _ in range(2):
        forward_backward(run, case["precision"])
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        forward_backward(run, case["precision"])
        done += len(images)
    return found | {"rate": done / (time.perf_counter() - start)}


def main(output: Path, /, repeats: int = 5) -> None:
    """Measure every case in turns."""
    with output.open("w", newline="") as file:
        columns = [*USUAL, "repeat", "name", "value", "commit"]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for repeat, case in itertools.product(range(repeats), CASES):
            words = [sys.executable, __file__, "--case", json.dumps(case)]
            found = json.loads(subprocess.check_output(words, text=True))
            about = case | {"repeat": repeat, "commit": find_commit() or "unknown"}
            for name, value in found.items():
                writer.writerow(about | {"name": name, "value": f"{value:.5g}"})
            file.flush()
            print(*case.values(), found, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        tyro.cli(main, description=__doc__)
