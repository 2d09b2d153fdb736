"""Rows of `bench.kernels`: attention of a decode step, with and without its prologue inside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench.row_configs import drawn
from bench.timing import Report, Work, copies
from freetoken.kernels.decode_attention import (
    AttentionConfig,
    Prologue,
    decode_attention,
    default_config,
    scratch_elements,
)
from freetoken.kernels.qkv_prologue import qkv_prologue

EPS = 1e-6
PAGE = 16


class Attention:
    """Pools, pages and rows of one layer at one length."""

    def __init__(self, batch: int, length: int, heads: int, kv_heads: int, width: int) -> None:
        pages = -(-length // PAGE)
        turns = min(copies(4 * batch * length * kv_heads * width), 16)
        shape = (batch * pages * PAGE, kv_heads, width)
        self.pools = [(drawn(*shape), drawn(*shape)) for _ in range(turns)]
        order = torch.randperm(batch * pages, device="cuda")
        self.table = order.view(batch, pages).to(torch.int32)
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.qkv = drawn(batch, (heads + 2 * kv_heads) * width)
        cos, sin = (torch.rand(batch, width // 2, device="cuda") for _ in range(2))
        slots = self.table[:, -1].long() * PAGE + (length - 1) % PAGE
        self.prologue = Prologue(cos, sin, slots, drawn(heads + kv_heads, width), EPS)
        self.out = drawn(batch, heads * width)
        self.counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device="cuda")
        largest = scratch_elements(batch, heads, kv_heads, width, AttentionConfig(128))
        self.scratch = torch.empty(largest, device="cuda")
        self.scale = width**-0.5

    def attend(self, config: Any, turn: int, *, is_fused: bool = False) -> None:
        """Launch the attention."""
        k, v = self.pools[turn]
        decode_attention(
            self.qkv,
            k,
            v,
            self.table,
            self.lens,
            PAGE,
            self.scale,
            out=self.out,
            scratch=self.scratch,
            counters=self.counters,
            prologue=self.prologue if is_fused else None,
            config=config,
        )

    def attend_fused(self, config: Any, turn: int) -> None:
        """Launch it with its prologue inside."""
        self.attend(config, turn, is_fused=True)

    def prepare(self, _config: Any, turn: int) -> None:
        """Launch the prologue alone."""
        k, v = self.pools[turn]
        p = self.prologue
        qkv_prologue(self.qkv, p.cos, p.sin, p.slots, k, v, norm=p.norm, eps=EPS)


def bench_attention(report: Report) -> None:
    """Qwen3-30B-A3B from short to long, a batch, the demo's heads."""
    for batch, length in ((1, 128), (1, 2048), (1, 32768), (4, 2048), (8, 8192)):
        _attention(report, batch, length, 32, 4, 128)
    _attention(report, 1, 2048, 9, 3, 64)


def _attention(
    report: Report, batch: int, length: int, heads: int, kv_heads: int, width: int
) -> None:
    work = Attention(batch, length, heads, kv_heads, width)
    shape, turns = f"b{batch} ctx {length} {heads}/{kv_heads}x{width}", len(work.pools)
    num_bytes, flop = 4 * batch * length * kv_heads * width, 4 * batch * length * heads * width
    served = default_config(kv_heads, heads // kv_heads, width)
    configs = [
        served,
        *(replace(served, splits=splits) for splits in (16, 32, 64) if splits != served.splits),
        replace(served, keys=32),
        replace(served, keys=128, stages=2),
        replace(served, warps=2),
        replace(served, warps=8, keys=128, stages=2),
    ]
    report.sweep(
        Work("attention", shape, num_bytes, flop, turns, work.attend),
        configs if (batch, width) == (1, 128) else configs[:1],
    )
    fused = Work("attention fused", shape, num_bytes, flop, turns, work.attend_fused)
    report.sweep(fused, configs if (batch, length) == (1, 2048) and width == 128 else configs[:1])
    report.sweep(Work("qkv_prologue", shape, 4 * work.qkv.numel(), 0, turns, work.prepare), [None])
