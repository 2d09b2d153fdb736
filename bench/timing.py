"""Timing small kernels as a step runs them: many launches in a CUDA graph, over much memory."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

MEMORY_BYTES_PER_S = 4.8e12
MATRIX_FLOP_PER_S = 790e12
"""H200: memory by its datasheet, bf16 matrices as measured on random data."""
CACHE_BYTES = 160 << 20
"""Rotated buffers exceed this: more than twice an H200's 60 MB second-level cache."""
LAUNCHES = 20

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of output. Times are microseconds a launch."""

    kernel: str
    shape: str
    config: str
    us: float
    num_bytes: int
    num_flop: int
    torch_us: float | None = None

    @property
    def bound_us(self) -> float:
        """Shortest possible time by memory or arithmetic."""
        return 1e6 * max(self.num_bytes / MEMORY_BYTES_PER_S, self.num_flop / MATRIX_FLOP_PER_S)

    def line(self) -> str:
        """Return the row as text."""
        versus = "" if self.torch_us is None else f" torch {self.torch_us:8.2f} us"
        return (
            f"{self.kernel:16s} {self.shape:24s} {self.us:8.2f} us"
            f" {self.num_bytes / 1e6:8.2f} MB {self.num_bytes / self.us / 1e3:6.0f} GB/s"
            f" {self.num_flop / self.us / 1e6:6.1f} TF/s {100 * self.bound_us / self.us:4.0f} %"
            f"{versus}  {self.config}"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed: `launch(config, turn)`, turn counting through `turns` sets of buffers."""

    kernel: str
    shape: str
    num_bytes: int
    num_flop: int
    turns: int
    launch: Callable[[Any, int], object]
    in_torch: Sequence[Launch] = ()


def graph_us(launches: Sequence[Launch], *, count: int = LAUNCHES, replays: int = 7) -> float:
    """Return the microseconds a launch takes in a graph of `count`. Compiles first."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for launch in launches[:2]:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in itertools.islice(itertools.cycle(launches), count):
            launch()
    times: list[float] = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[2:])


def copies(num_bytes: int) -> int:
    """Return how many buffers of this size exceed the caches together."""
    return max(2, min(64, -(-CACHE_BYTES // max(1, num_bytes))))


class Report:
    """Collects rows; prints each as it comes, and the best config of each shape."""

    def __init__(self, *, is_full: bool) -> None:
        """`is_full` sweeps configs; otherwise only the served one is timed."""
        self.is_full = is_full
        self.rows: list[Row] = []
        self._start = time.perf_counter()

    def sweep(self, work: Work, configs: Sequence[Any]) -> None:
        """Time a kernel with each config (the first is the one served) and torch's way once."""
        torch_us = graph_us(work.in_torch) if work.in_torch else None
        found: list[Row] = []
        for config in configs if self.is_full else configs[:1]:
            try:
                us = graph_us([partial(work.launch, config, turn) for turn in range(work.turns)])
            except (RuntimeError, ValueError) as error:
                # A candidate may not fit the chip (registers, shared memory); the sweep goes on.
                reason = f"{type(error).__name__} {str(error)[:90]}"
                print(f"{work.kernel:16s} {work.shape:24s} {config}: {reason}")
                continue
            found.append(
                Row(
                    work.kernel,
                    work.shape,
                    str(config),
                    us,
                    work.num_bytes,
                    work.num_flop,
                    torch_us,
                )
            )
        if not found:
            return
        best = min(found, key=lambda row: row.us)
        self.rows += found
        print(found[0].line(), flush=True)
        if best is not found[0]:
            share = 100 * best.bound_us / best.us
            print(f"  best of {len(found):2d}: {best.us:8.2f} us {share:4.0f} %  {best.config}")

    def finish(self, path: str | None) -> None:
        """Print the total time and write the rows as JSON."""
        print(f"# {torch.cuda.get_device_name()}, {time.perf_counter() - self._start:.0f} s")
        if path:
            Path(path).write_text(
                json.dumps(
                    [asdict(row) | {"bound_us": row.bound_us} for row in self.rows], indent=0
                )
            )
