"""Rows of the prefill bench: how a launch is timed, what a row says, what is tried."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial

import torch

from freetoken.kernels.triton_import import triton

PEAK_BYTES, PEAK_FLOPS = 4.8e12, 790e12
"""H200: memory by datasheet, dense bf16 as measured with torch on random data."""
LINE = (
    "{name:<30}{us:>9.1f} us {gb_per_s:>6.0f} GB/s {tflop_per_s:>6.1f} TF/s {percent:>5.1f} %"
    "  torch {torch_us:>8.1f} us  {config}"
)


@dataclass
class Row:
    """One kernel at one shape; percent of the larger bound. torch_us: NaN without such a call."""

    name: str
    us: float
    bytes: float
    flops: float
    config: str
    torch_us: float = float("nan")
    gb_per_s: float = field(init=False)
    tflop_per_s: float = field(init=False)
    percent: float = field(init=False)

    def __post_init__(self) -> None:
        self.gb_per_s = self.bytes / self.us / 1e3
        self.tflop_per_s = self.flops / self.us / 1e6
        self.percent = 100e6 * max(self.bytes / PEAK_BYTES, self.flops / PEAK_FLOPS) / self.us


class Bench:
    """Owns the rows and the clock; prints each row as it is measured."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[Row] = []
        self.swept: list[Row] = []
        self.deadline = time.monotonic() + seconds

    def has_time(self) -> bool:
        """Say whether another swept configuration may start."""
        return time.monotonic() < self.deadline

    def add(self, row: Row) -> Row:
        """Keep and print."""
        self.rows.append(row)
        print(LINE.format(**asdict(row)), flush=True)
        return row

    def sweep(
        self,
        name: str,
        size: tuple[float, float],
        configs: Iterable[object],
        launch: Callable[..., object],
        torch_us: float,
    ) -> Row:
        """Time the default, which comes first, then others in time; print it and the best."""
        found: list[Row] = []
        for config in dict.fromkeys(configs):
            if found and not self.has_time():
                break
            us = attempt(partial(launch, config=config))
            if not math.isnan(us):
                found.append(Row(name, us, *size, short(config), torch_us))
        if not found:
            print(f"{name:<30} no configuration ran", flush=True)
            return Row(name, float("inf"), *size, "none", torch_us)
        self.swept += found
        best = min(found, key=lambda row: row.us)
        if best is not found[0]:
            self.add(found[0])
            best.config = f"best of {len(found)}: {best.config}"
        return self.add(best)


def short(config: object) -> str:
    """Write a configuration as its numbers, in the order of its fields."""
    return ",".join(str(value) for value in vars_of(config).values()) or str(config)


def vars_of(config: object) -> dict[str, object]:
    """Return the fields of a configuration; none for a plain number."""
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


def measure(launch: Callable[[], object]) -> float:
    """Return the microseconds of a launch: median of 5 replays of a graph of about 2 ms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.stream(stream):
        launch()
        marks[0].record()
        launch()
        marks[1].record()
        marks[1].synchronize()
        count = int(min(20, max(2, 2.0 / max(marks[0].elapsed_time(marks[1]), 1e-3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                launch()
        graph.replay()
        times: list[float] = []
        for _ in range(5):
            marks[0].record()
            graph.replay()
            marks[1].record()
            marks[1].synchronize()
            times.append(marks[0].elapsed_time(marks[1]) * 1e3 / count)
    return statistics.median(times)


def attempt(launch: Callable[[], object]) -> float:
    """Measure; NaN, and the reason printed, where a launch does not fit or torch lacks it."""
    try:
        return measure(launch)
    except (triton.TritonError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), "")[:120]
        print(f"  not measured: {type(error).__name__}: {reason}", flush=True)
        return float("nan")
