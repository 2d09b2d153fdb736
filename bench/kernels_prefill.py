"""Prefill kernels on a GPU: time, rates, percent of the bound, torch's time, best configurations.

    python -m bench.kernels_prefill [--json FILE] [--seconds 125]

Shapes are those of Qwen3-30B-A3B in bf16. A time is the median of replays of a CUDA graph of a few
launches. Attention, sort and short norms read what the launch before left in L2, as in a layer; the
experts' matrices do not fit there. Configurations are swept, the default first, until time is up;
defaults always run. Run only after green tests.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bench.prefill_rows import PEAK_BYTES, PEAK_FLOPS, Bench, Row, attempt
from freetoken.kernels import (
    combine_rows,
    expert_gemm,
    expert_sort,
    prefill_attention,
    rms_norm_rows,
    router_rows,
    silu_mul_rows,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, INTER = 2048, 32, 4, 128, 128, 8, 768
PAGE = 16
TOKENS = (83, 512, 2067, 8192)
ATTENTION_SHAPES = ((83, 0), (2067, 0), (8211, 0), (2048, 30000))
ATTENTION_CONFIGS = tuple(
    prefill_attention.AttentionConfig(*c)
    for c in (
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2),
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (32, 64, 4, 2),
    )
)  # fmt: skip
UP_CONFIGS = {
    16: ((32, 128, 4, 4), (32, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (32, 256, 4, 3)),
    32: ((32, 128, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3)),
    64: ((64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3)),
    128: ((128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4)),
}
DOWN_CONFIGS = {
    16: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (64, 256, 4, 3)),
    32: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3)),
    64: ((128, 64, 4, 4), (128, 64, 4, 3), (256, 64, 4, 3), (256, 64, 8, 3), (128, 128, 4, 3)),
    128: ((256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 4, 4)),
}
BLOCK_MS = {83: (16, 32), 512: (16, 32, 64), 2067: (64, 128), 8192: (64, 128)}


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Return random bf16 numbers on the GPU; never zeros, which run faster."""
    return torch.randn(shape, dtype=torch.bfloat16).mul_(scale)


def bench_attention(bench: Bench, rows: int, cached: int) -> None:
    """Attention of one sequence on shuffled pages; torch gets its keys laid out in one piece."""
    keys = rows + cached
    pages = -(-keys // PAGE)
    k, v = (drawn(pages * PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
    qkv = drawn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, out = qkv[:, :HEADS], torch.empty(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    runs = prefill_attention.PagedRuns(
        torch.tensor([rows], dtype=torch.int32),
        torch.tensor([keys], dtype=torch.int32),
        torch.randperm(pages, dtype=torch.int32)[None], PAGE,
    )  # fmt: skip
    wide_q = q.transpose(0, 1)[None].contiguous()
    wide_k, wide_v = (
        t[:keys].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)[None].contiguous()
        for t in (k, v)
    )
    mask = None if cached == 0 else causal_lower_right(rows, keys)
    torch_us = attempt(
        lambda: F.scaled_dot_product_attention(
            wide_q, wide_k, wide_v, attn_mask=mask, is_causal=mask is None
        )
    )
    seen = rows * (cached + (rows + 1) / 2)
    size = 2.0 * HEAD_DIM * (2 * rows * HEADS + 2 * keys * KV_HEADS), 4.0 * HEADS * HEAD_DIM * seen
    scale = HEAD_DIM**-0.5
    bench.sweep(
        f"attention {rows} rows + {cached}", size,
        (prefill_attention.choose_config(rows, HEADS, q), *ATTENTION_CONFIGS),
        partial(prefill_attention.prefill_attention, q, k, v, runs, scale, out),
        torch_us,
    )  # fmt: skip


@dataclass
class Experts:
    """One layer's experts and their tables."""

    up: Tensor
    down: Tensor
    up_table: Tensor
    down_table: Tensor


def draw_experts() -> Experts:
    """Return one layer: 805 MB up and 403 MB down."""
    up = drawn(EXPERTS, 2 * INTER, HIDDEN, scale=HIDDEN**-0.5)
    down = drawn(EXPERTS, HIDDEN, INTER, scale=INTER**-0.5)
    return Experts(up, down, expert_gemm.pointer_table(up), expert_gemm.pointer_table(down))


def candidates(
    block_m: int,
    defaults: dict[int, expert_gemm.GemmConfig],
    swept: dict[int, tuple[tuple[int, int, int, int], ...]],
) -> list[expert_gemm.GemmConfig]:
    """Return the default first, then those to sweep."""
    return [defaults[block_m], *(expert_gemm.GemmConfig(*c) for c in swept[block_m])]


class Step:
    """A step's tokens, routed at random, and the buffers of one layer."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.pairs = tokens, tokens * TOP_K
        self.x, self.residual = drawn(tokens, HIDDEN), drawn(tokens, HIDDEN)
        self.act, self.rows = drawn(self.pairs, INTER), drawn(self.pairs, HIDDEN)
        self.ids = torch.empty(tokens, TOP_K, dtype=torch.int32)
        self.weights = torch.empty(tokens, TOP_K)
        logits = torch.randn(tokens, EXPERTS)
        router_rows.router_rows(logits, self.ids, self.weights, renormalize=True)

    def sort(self, block_m: int) -> expert_sort.SortedPairs:
        """Sort into new buffers."""
        out = expert_sort.empty_pairs(self.pairs, EXPERTS, block_m, self.x.device)
        return expert_sort.expert_sort(self.ids, EXPERTS, out)

    def combine(self) -> Tensor:
        """Add the rows to the residual stream."""
        return combine_rows.combine_rows(
            self.rows, self.weights, self.residual, residual=self.residual
        )


def bench_products(bench: Bench, experts: Experts, step: Step, default: int) -> tuple[float, float]:
    """Both products for each block_m, the default first. Returns bytes and operations of both."""
    pairs, tokens = step.pairs, step.tokens
    first = step.sort(default)
    touched = int((first.ends.diff(prepend=first.ends.new_zeros(1)) > 0).sum())
    up_torch, down_torch = torch_products(experts, step.x, step.act, first)
    matrix = HIDDEN * INTER
    up_size = 2.0 * (2 * touched * matrix + tokens * HIDDEN + pairs * INTER), 4.0 * pairs * matrix
    down_size = 2.0 * (touched * matrix + pairs * (HIDDEN + INTER)), 2.0 * pairs * matrix
    for block_m in (default, *(m for m in BLOCK_MS[tokens] if m != default)):
        if block_m != default and not bench.has_time():
            break
        out = step.sort(block_m)
        up = bench.sweep(
            f"experts up T={tokens} m{block_m}", up_size,
            candidates(block_m, expert_gemm.GATE_UP_CONFIGS, UP_CONFIGS),
            partial(
                expert_gemm.expert_gemm_up, step.x, out, experts.up_table, step.act, top_k=TOP_K
            ),
            up_torch,
        )  # fmt: skip
        down = bench.sweep(
            f"experts down T={tokens} m{block_m}", down_size,
            candidates(block_m, expert_gemm.DOWN_CONFIGS, DOWN_CONFIGS),
            partial(expert_gemm.expert_gemm_down, step.act, out, experts.down_table, step.rows),
            down_torch,
        )  # fmt: skip
        print(f"  T={tokens} m{block_m}: up + down {up.us + down.us:.1f} us", flush=True)
    return up_size[0] + down_size[0], up_size[1] + down_size[1]


def bench_experts(bench: Bench, experts: Experts, tokens: int) -> None:
    """Sort, both products, combine, and the chain of them with default configurations."""
    step = Step(tokens)
    block_m = expert_gemm.choose_block_m(step.pairs, EXPERTS)
    out = step.sort(block_m)
    us = attempt(lambda: expert_sort.expert_sort(step.ids, EXPERTS, out))
    torch_us = attempt(lambda: step.ids.view(-1).sort(stable=True))
    bench.add(Row(f"sort T={tokens}", us, 8.0 * step.pairs, 0.0, f"m{block_m}", torch_us))
    num_bytes, flops = bench_products(bench, experts, step, block_m)
    us = attempt(step.combine)
    by_rank, weights = step.rows.view(tokens, TOP_K, HIDDEN), step.weights.to(step.rows.dtype)
    torch_us = attempt(lambda: step.residual + torch.bmm(weights[:, None], by_rank)[:, 0])
    moved = 2.0 * HIDDEN * (step.pairs + 2 * tokens)
    bench.add(Row(f"combine T={tokens}", us, moved, 2.0 * step.pairs * HIDDEN, "", torch_us))

    def chain() -> None:
        expert_sort.expert_sort(step.ids, EXPERTS, out)
        tables = experts.up_table, experts.down_table
        expert_gemm.expert_gemm(step.x, out, *tables, step.act, step.rows, top_k=TOP_K)
        step.combine()

    us = attempt(chain)
    name = f"sort+up+down+combine T={tokens}"
    bench.add(Row(name, us, num_bytes + moved, flops, f"m{block_m}, defaults"))


def torch_products(
    experts: Experts, x: Tensor, act: Tensor, pairs: expert_sort.SortedPairs
) -> tuple[float, float]:
    """Time torch's grouped product on rows gathered before; silu(gate) * up is not in it."""
    gathered = x[(pairs.order // TOP_K).long()]
    up, down = experts.up.transpose(1, 2), experts.down.transpose(1, 2)
    return (
        attempt(lambda: torch._grouped_mm(gathered, up, offs=pairs.ends)),  # noqa: SLF001 - no public name
        attempt(lambda: torch._grouped_mm(act, down, offs=pairs.ends)),  # noqa: SLF001
    )


def bench_rows(bench: Bench, tokens: int) -> None:
    """Norm with residual, router and dense activation."""
    x, residual, out, weight = (
        drawn(tokens, HIDDEN),
        drawn(tokens, HIDDEN),
        drawn(tokens, HIDDEN),
        drawn(HIDDEN),
    )
    torch_us = attempt(lambda: F.rms_norm(residual + x, (HIDDEN,), weight, 1e-6))
    bench.sweep(
        f"norm T={tokens}", (8.0 * tokens * HIDDEN, 0.0), (None, 1, 2, 4, 8),
        lambda config: rms_norm_rows.rms_norm_rows(
            x, weight, 1e-6, out, residual=residual, num_warps=config
        ),
        torch_us,
    )  # fmt: skip
    logits = drawn(tokens, EXPERTS)
    ids = torch.empty(tokens, TOP_K, dtype=torch.int32)
    weights = torch.empty(tokens, TOP_K)
    us = attempt(lambda: router_rows.router_rows(logits, ids, weights, renormalize=True))
    torch_us = attempt(lambda: logits.softmax(-1, dtype=torch.float32).topk(TOP_K))
    bench.add(
        Row(f"router T={tokens}", us, tokens * (2.0 * EXPERTS + 8 * TOP_K), 0.0, "", torch_us)
    )
    wide, narrow = drawn(tokens, 2 * 6144), drawn(tokens, 6144)
    us = attempt(lambda: silu_mul_rows.silu_mul_rows(wide, narrow))
    torch_us = attempt(lambda: F.silu(wide[:, :6144]) * wide[:, 6144:])
    bench.add(Row(f"silu_mul T={tokens} x 6144", us, 6.0 * tokens * 6144, 0.0, "", torch_us))


def main() -> int:
    """Run all rows; exit 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--json", type=Path, help="write every row and every swept configuration here"
    )
    parser.add_argument(
        "--seconds", type=float, default=125, help="no new swept configuration starts after this"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "expected an NVIDIA GPU, got none: torch.cuda.is_available() is false", file=sys.stderr
        )
        return 2
    torch.manual_seed(0)
    began = time.monotonic()
    bench = Bench(arguments.seconds)
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}; "
        f"bounds {PEAK_BYTES / 1e12} TB/s, {PEAK_FLOPS / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    with torch.inference_mode(), torch.device("cuda"):
        for rows, cached in ATTENTION_SHAPES:
            bench_attention(bench, rows, cached)
        experts = draw_experts()
        for tokens in TOKENS:
            bench_experts(bench, experts, tokens)
        for tokens in (83, 2067, 8192):
            bench_rows(bench, tokens)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if arguments.json is not None:
        facts = {
            "device": name,
            "torch": str(torch.__version__),
            "bounds": [PEAK_BYTES, PEAK_FLOPS],
        }
        arguments.json.write_bytes(
            msgspec.json.encode({"facts": facts, "rows": bench.rows, "swept": bench.swept})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
