"""Pictures per second through the IMPALA network, forward and backward, by size of the pieces, with and without keeping freed memory.

usage: python benchmarks/encoder.py [THREADS]      each case in a process of its own, interleaved, median of five; prints a table
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

SIZES = (64, 2048)
SECONDS, REPEATS = 1.5, 5


def measure(num_threads: int, size: int, keep: bool) -> float:
    """Pictures per second in this process."""
    import torch

    from phasicrl import compute
    from phasicrl.config import ModelConfig
    from phasicrl.models.encoders import ImpalaCNN

    if keep:
        compute._keep_memory()
    torch.set_num_threads(num_threads)
    network = ImpalaCNN((64, 64, 3), ModelConfig(), generator=torch.Generator().manual_seed(0))
    pictures = torch.randint(0, 255, (size, 64, 64, 3), dtype=torch.uint8)
    for _ in range(2):
        network(pictures).sum().backward()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        network(pictures).sum().backward()
        done += size
    return done / (time.perf_counter() - start)


def main() -> None:
    """Run every case, and print the table; `--case` is one of them."""
    if sys.argv[1:2] == ["--case"]:
        print(measure(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "keep"))
        return
    threads = sys.argv[1] if len(sys.argv) > 1 else "2"
    cases = [(size, keep) for size in SIZES for keep in ("keep", "default")]
    rates: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for _ in range(REPEATS):
        for size, keep in cases:
            done = subprocess.run(
                [sys.executable, __file__, "--case", threads, str(size), keep], capture_output=True, text=True, check=True
            )
            rates[size, keep].append(float(done.stdout))
    print(
        f"threads {threads}; pictures per second, median (min to max) of {REPEATS}\n\n| pieces of | default | memory kept | ratio |\n|---|---|---|---|"
    )
    for size in SIZES:
        cells = [rates[size, keep] for keep in ("default", "keep")]
        ratio = statistics.median(kept / default for default, kept in zip(*cells, strict=True))
        texts = [f"{statistics.median(cell):,.0f} ({min(cell):,.0f} to {max(cell):,.0f})" for cell in cells]
        print(f"| {size} | {texts[0]} | {texts[1]} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
