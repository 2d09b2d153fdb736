"""Time the decode kernels on the GPU: `python -m bench.kernels [--json F] [--only NAME] [--quick]`.

Each line: the served config's microseconds, bytes, GB/s, TFLOP/s, percent of the bound and torch's
time for the same; then the best config of the sweep if it is another.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.kernels_attention import bench_attention
from bench.kernels_experts import bench_experts
from bench.kernels_layer import bench_layer
from bench.kernels_sample import bench_ends, bench_sample
from bench.row_configs import candidates, drawn
from bench.timing import Report, Work, copies, graph_us
from freetoken.kernels import linear_add, lm_head, norm_linear
from freetoken.kernels.rows import default_config

EPS = 1e-6


def _norm_linear(report: Report, batch: int, n: int, width: int, *, is_gated: bool) -> None:
    weights = [drawn(n, width, scale=width**-0.5) for _ in range(copies(n * width * 2))]
    x, norm = drawn(batch, width), drawn(width)
    out = drawn(batch, n // 2 if is_gated else n)

    def launch(config: Any, turn: int) -> None:
        norm_linear.norm_linear(x, norm, weights[turn], EPS, out=out, gated=is_gated, config=config)

    def in_torch(turn: int) -> None:
        F.linear(F.rms_norm(x, norm.shape, norm, EPS), weights[turn])

    tiles = 2 if is_gated else 1
    served = norm_linear.CONFIGS.get((n, width)) or default_config(width, tiles=tiles)
    shape = f"b{batch} {n}x{width}{' gated' if is_gated else ''}"
    work = Work(
        "norm_linear",
        shape,
        2 * n * width,
        2 * batch * n * width,
        len(weights),
        launch,
        [partial(in_torch, turn) for turn in range(len(weights))],
    )
    is_swept = width >= 2048 and batch < 8
    report.sweep(work, candidates(served, width, tiles=tiles) if is_swept else [served])


def bench_norm_linear(report: Report) -> None:
    """Qkv products, dense gate-up."""
    for batch in (1, 4, 8):
        _norm_linear(report, batch, 5120, 2048, is_gated=False)
    _norm_linear(report, 1, 960, 576, is_gated=False)
    _norm_linear(report, 1, 3072, 576, is_gated=True)


def _linear_add(report: Report, batch: int, n: int, width: int) -> None:
    weights = [drawn(n, width, scale=width**-0.5) for _ in range(copies(n * width * 2))]
    x, h = drawn(batch, width), drawn(batch, n)

    def launch(config: Any, turn: int) -> None:
        linear_add.linear_add(x, weights[turn], h, config=config)

    served = linear_add.CONFIGS.get((n, width)) or default_config(width)
    num_bytes, num_flop = 2 * n * width, 2 * batch * n * width
    in_torch = [partial(torch.addmm, h, x, w.T) for w in weights]
    work = Work(
        "linear_add", f"b{batch} {n}x{width}", num_bytes, num_flop, len(weights), launch, in_torch
    )
    report.sweep(work, candidates(served, width) if width == 4096 else [served])


def bench_linear_add(report: Report) -> None:
    """Attention's output product, dense down."""
    for batch, n, width in ((1, 2048, 4096), (4, 2048, 4096), (1, 576, 576), (1, 576, 1536)):
        _linear_add(report, batch, n, width)


def _lm_head(report: Report, batch: int, vocab: int, hidden: int) -> None:
    w, x, norm = drawn(vocab, hidden, scale=hidden**-0.5), drawn(batch, hidden), drawn(hidden)
    out = torch.empty(batch, vocab, device="cuda")

    def launch(config: Any, _turn: int) -> None:
        lm_head.lm_head(x, norm, w, EPS, out=out, config=config)

    def in_torch() -> None:
        F.linear(F.rms_norm(x, norm.shape, norm, EPS), w).float()

    served = lm_head.CONFIGS.get((vocab, hidden)) or default_config(hidden)
    num_bytes, num_flop = 2 * vocab * hidden, 2 * batch * vocab * hidden
    work = Work("lm_head", f"b{batch} {vocab}x{hidden}", num_bytes, num_flop, 1, launch, [in_torch])
    report.sweep(work, candidates(served, hidden) if batch == 1 and hidden == 2048 else [served])


def bench_lm_head(report: Report) -> None:
    """The vocabulary's product."""
    for batch, vocab, hidden in ((1, 151936, 2048), (4, 151936, 2048), (1, 49152, 576)):
        _lm_head(report, batch, vocab, hidden)


BENCHES = {
    "layer": bench_layer,
    "norm_linear": bench_norm_linear,
    "linear_add": bench_linear_add,
    "experts": bench_experts,
    "attention": bench_attention,
    "lm_head": bench_lm_head,
    "sample": bench_sample,
    "ends": bench_ends,
}


def main() -> None:
    """Run the benches asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--only", choices=list(BENCHES), action="append", help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="served configs only, no sweep")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(is_full=not arguments.quick)
    empty = graph_us([partial(torch.zeros(1, device="cuda").add_, 1)])
    print(f"# a node that adds one element: {empty:.2f} us")
    for name, bench in BENCHES.items():
        if not arguments.only or name in arguments.only:
            bench(report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
