"""Rows of `bench.kernels`: a whole decode layer of Qwen3-30B-A3B as a graph runs it."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels_attention import Attention
from bench.kernels_experts import EPS, Experts
from bench.row_configs import drawn
from bench.timing import Report, Work
from freetoken.kernels.expert_down import expert_down
from freetoken.kernels.expert_up import expert_up
from freetoken.kernels.linear_add import linear_add
from freetoken.kernels.norm_linear import norm_linear
from freetoken.kernels.router_gate import router_gate

HIDDEN, HEADS, KV_HEADS, WIDTH, EXPERTS, TOP_K, INTER = 2048, 32, 4, 128, 128, 8, 768
TURNS = 20
WEIGHTS = 6


class Layer:
    """One layer's buffers; each turn takes other weights and experts, more than the caches hold."""

    def __init__(self, batch: int, length: int) -> None:
        self.attention = Attention(batch, length, HEADS, KV_HEADS, WIDTH)
        self.bank = Experts(batch, HIDDEN, EXPERTS, TOP_K, INTER)
        rows = (HEADS + 2 * KV_HEADS) * WIDTH
        self.qkv = [drawn(rows, HIDDEN, scale=0.02) for _ in range(WEIGHTS)]
        self.out = [drawn(HIDDEN, HEADS * WIDTH, scale=0.001) for _ in range(WEIGHTS)]
        self.router = drawn(EXPERTS, HIDDEN, scale=0.02)
        self.logits = torch.empty(batch, EXPERTS, device="cuda")
        self.counters = torch.zeros(8, dtype=torch.int32, device="cuda")
        self.ids, self.weights = self.bank.ids[0].clone(), self.bank.weights.clone()
        read = rows * HIDDEN + HIDDEN * HEADS * WIDTH + EXPERTS * HIDDEN
        self.num_bytes = int(
            2 * read + self.bank.used * 6 * INTER * HIDDEN + 4 * batch * length * KV_HEADS * WIDTH
        )

    def launch(self, turn: int, *, is_fused: bool) -> None:
        """Run the layer: seven launches, six if the prologue is inside the attention."""
        bank, attention = self.bank, self.attention
        norm_linear(bank.h, bank.norm, self.qkv[turn % WEIGHTS], EPS, out=attention.qkv)
        pool = turn % len(attention.pools)
        if not is_fused:
            attention.prepare(None, pool)
        attention.attend(None, pool, is_fused=is_fused)
        linear_add(attention.out, self.out[turn % WEIGHTS], bank.h)
        router_gate(
            bank.h,
            bank.norm,
            self.router,
            EPS,
            renormalize=True,
            ids=self.ids,
            weights=self.weights,
            logits=self.logits,
            counters=self.counters,
        )
        # The bank's routings and not the router's, whose experts would come from the cache.
        ids = bank.ids[turn]
        expert_up(bank.h, bank.norm, EPS, ids, bank.up_table, out=bank.inner)
        expert_down(bank.inner, ids, self.weights, bank.down_table, bank.h)

    def apart(self, _config: Any, turn: int) -> None:
        """Run with the prologue as its own launch."""
        self.launch(turn, is_fused=False)

    def fused(self, _config: Any, turn: int) -> None:
        """Run with the prologue inside the attention."""
        self.launch(turn, is_fused=True)


def bench_layer(report: Report) -> None:
    """One, four and eight sequences at 1,024 tokens."""
    for batch in (1, 4, 8):
        layer = Layer(batch, 1024)
        for name, launch in (("apart", layer.apart), ("fused", layer.fused)):
            shape = f"b{batch} ctx 1024 {name}"
            report.sweep(Work("layer", shape, layer.num_bytes, 0, TURNS, launch), [None])
