"""Rows of `bench.kernels`: router, expert gate-up, expert down."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.row_configs import candidates, drawn
from bench.timing import Launch, Report, Work
from freetoken.kernels import expert_down, expert_up, router_gate
from freetoken.kernels.rows import RowConfig, default_config

EPS = 1e-6
TURNS = 20


class Experts:
    """Experts of one layer and several routings, so that each launch reads other ones."""

    def __init__(self, batch: int, hidden: int, experts: int, top_k: int, inter: int) -> None:
        self.up = [drawn(2 * inter, hidden, scale=hidden**-0.5) for _ in range(experts)]
        self.down = [drawn(hidden, inter, scale=inter**-0.5) for _ in range(experts)]
        self.up_table = torch.tensor([w.data_ptr() for w in self.up], device="cuda")
        self.down_table = torch.tensor([w.data_ptr() for w in self.down], device="cuda")
        draws = [[torch.randperm(experts)[:top_k] for _ in range(batch)] for _ in range(TURNS)]
        self.ids = [torch.stack(rows).to("cuda", torch.int32) for rows in draws]
        self.used = sum(int(ids.unique().numel()) for ids in self.ids) / TURNS
        self.weights = torch.full((batch, top_k), 1 / top_k, device="cuda")
        self.h, self.norm = drawn(batch, hidden), drawn(hidden)
        self.inner = drawn(batch * top_k, inter, scale=0.1)

    def up_launch(self, config: Any, turn: int) -> None:
        """Gate-up of all pairs."""
        expert_up.expert_up(
            self.h, self.norm, EPS, self.ids[turn], self.up_table, out=self.inner, config=config
        )

    def down_launch(self, config: Any, turn: int) -> None:
        """Down and sum of all tokens."""
        ids = self.ids[turn]
        expert_down.expert_down(
            self.inner, ids, self.weights, self.down_table, self.h, config=config
        )

    def torch_up(self, chosen: list[int]) -> None:
        """One token, expert by expert, the ids known on the CPU."""
        y = F.rms_norm(self.h, self.norm.shape, self.norm, EPS)
        for expert in chosen:
            gate, up = F.linear(y, self.up[expert]).chunk(2, -1)
            F.silu(gate).mul_(up)

    def torch_down(self, chosen: list[int]) -> None:
        """One token, expert by expert."""
        for rank, expert in enumerate(chosen):
            row = self.inner[rank : rank + 1]
            self.h.add_(F.linear(row, self.down[expert]), alpha=0.125)


def bench_experts(report: Report) -> None:
    """Qwen3-30B-A3B at several batches, the demo MoE."""
    for batch in (1, 4, 8):
        _experts(report, batch, 2048, 128, 8, 768)
    _experts(report, 1, 576, 8, 2, 1536)


def _experts(report: Report, batch: int, hidden: int, experts: int, top_k: int, inter: int) -> None:
    bank = Experts(batch, hidden, experts, top_k, inter)
    shape = f"b{batch} {experts}/{top_k} {inter}x{hidden}"
    flop, used, is_swept = (
        batch * top_k * inter * hidden,
        int(bank.used * inter * hidden),
        hidden > 600 and batch < 8,
    )
    chosen = [ids[0].tolist() for ids in bank.ids] if batch == 1 else []
    in_torch: list[Launch] = [partial(bank.torch_up, ids) for ids in chosen]
    served = expert_up.CONFIGS.get((inter, hidden)) or default_config(hidden, tiles=2)
    report.sweep(
        Work("expert_up", shape, 4 * used, 4 * flop, TURNS, bank.up_launch, in_torch),
        candidates(served, hidden, tiles=2) if is_swept else [served],
    )
    width = top_k * inter
    served = expert_down.CONFIGS.get((hidden, inter, top_k)) or default_config(
        width, chunk_of=inter
    )
    in_torch = [partial(bank.torch_down, ids) for ids in chosen]
    report.sweep(
        Work("expert_down", shape, 2 * used, 2 * flop, TURNS, bank.down_launch, in_torch),
        candidates(served, width, piece=inter) if is_swept else [served],
    )
    _router(report, bank, shape)


def _router(report: Report, bank: Experts, shape: str) -> None:
    (batch, top_k), hidden, experts = bank.ids[0].shape, bank.h.shape[1], len(bank.up)
    router = drawn(experts, hidden, scale=hidden**-0.5)
    logits = torch.empty(batch, experts, device="cuda")
    counters = torch.zeros(8, dtype=torch.int32, device="cuda")
    ids, weights = bank.ids[0].clone(), bank.weights.clone()

    def launch(config: Any, _turn: int) -> None:
        router_gate.router_gate(
            bank.h, bank.norm, router, EPS, renormalize=True, ids=ids, weights=weights,
            logits=logits, counters=counters, config=config,
        )  # fmt: skip

    def in_torch() -> None:
        y = F.linear(F.rms_norm(bank.h, bank.norm.shape, bank.norm, EPS), router)
        y.float().softmax(-1).topk(top_k)

    served = router_gate.CONFIGS.get((experts, hidden)) or default_config(hidden)
    more = [
        (4, 4, 256),
        (8, 8, 256),
        (2, 4, 512),
        (8, 4, 512),
        (1, 4, 1024),
        (1, 2, 512),
        (2, 8, 1024),
    ]
    flop, num_bytes = 2 * batch * experts * hidden, 2 * experts * hidden
    report.sweep(
        Work("router_gate", shape, num_bytes, flop, 1, launch, [in_torch]),
        [served, *(RowConfig(*config) for config in more)] if hidden > 600 else [served],
    )
