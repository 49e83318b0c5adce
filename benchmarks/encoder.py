"""Images per second through the IMPALA network, forward and backward.

By size of the pieces, precision, memory, and way of running it.

usage: python benchmarks/encoder.py OUT.csv [--threads 2] [--repeats 5]

Each case runs in a process of its own for 1.5 s after warming up, interleaved; a row each. Rows
named `features` and `gradients` hold the relative error of bf16 against fp32 instead. The tables in
docs/performance.md are drawn from the committed file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from phasicrl.host.machine import num_cores
from phasicrl.host.provenance import commit

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


def measure(case: dict[str, Any], num_threads: int) -> dict[str, float]:
    """One case in this process: images per second, and of bf16 its errors."""
    import torch

    from phasicrl.config import ModelConfig
    from phasicrl.execution import device
    from phasicrl.models.encoders import ImpalaCNN, in_precision

    if case["memory"] == "kept":
        device.keep_memory()
    torch.set_num_threads(num_threads)
    network = ImpalaCNN((64, 64, 3), ModelConfig(), generator=torch.Generator().manual_seed(0))
    parameters = list(network.parameters())
    images = torch.randint(
        0,
        255,
        (case["size"], 64, 64, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )

    def forward_backward(network: Any, precision: Any) -> list[Any]:
        """Return features and, in one tensor, all gradients of their weighted mean."""
        with in_precision(precision, images.device):
            features = network(images).float()
        mean = (features @ torch.linspace(-1, 1, features.shape[-1])).mean()
        gradients = torch.autograd.grad(mean, parameters)
        return [
            features.detach(),
            torch.cat([gradient.float().flatten() for gradient in gradients]),
        ]

    found = {}
    if case["precision"] == "bf16":
        errors = [
            float((rounded - exact).norm() / exact.norm())
            for rounded, exact in zip(
                forward_backward(network, "bf16"), forward_backward(network, "fp32"), strict=True
            )
        ]
        found = dict(zip(("features", "gradients"), errors, strict=True))
    run = torch.compile(network) if case["run"] == "compiled" else network
    for _ in range(2):
        forward_backward(run, case["precision"])
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        forward_backward(run, case["precision"])
        done += len(images)
    return found | {"rate": done / (time.perf_counter() - start)}


def main() -> None:
    """Run every case; `--case` is one of them, in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", type=json.loads, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(options.case, options.threads)))
        return
    made = commit() or "unknown"
    with options.output.open("w", newline="") as file:
        columns = [*USUAL, "repeat", "name", "value", "commit"]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for repeat, case in itertools.product(range(options.repeats), CASES):
            words = [
                sys.executable,
                __file__,
                str(options.output),
                "--threads",
                str(options.threads),
                "--case",
                json.dumps(case),
            ]
            found = json.loads(
                subprocess.run(words, capture_output=True, text=True, check=True).stdout
            )
            for name, value in found.items():
                row = {"repeat": repeat, "name": name, "value": f"{value:.5g}", "commit": made}
                writer.writerow(case | row)
            file.flush()
            print(
                ", ".join(map(str, case.values())),
                {name: round(value, 4) for name, value in found.items()},
                flush=True,
            )


if __name__ == "__main__":
    main()
