"""Time the decode kernels on the GPU: `python -m bench.kernels [--json F] [--only NAME] [--quick]`.

Each line: the served config's microseconds, bytes, GB/s, TFLOP/s, percent of the bound and torch's time for the same;
then the best config of the sweep if it is another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.timing import Launch, Report, copies, graph_us
from freetoken.kernels import (
    advance,
    decode_attention,
    embed_rows,
    expert_down,
    expert_up,
    linear_add,
    lm_head,
    norm_linear,
    qkv_prologue,
    router_gate,
)
from freetoken.kernels.decode_attention import Prologue
from freetoken.kernels.rows import RowConfig, default_config

EPS = 1e-6
DTYPE = torch.bfloat16


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Draw a normal tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).mul_(scale).to(DTYPE)


def candidates(
    first: RowConfig, width: int, *, tiles: int = 1, piece: int | None = None, limit: int = 9
) -> list[RowConfig]:
    """Return the served config and others whose threads hold about 64 weight elements, 16 bytes a load."""
    piece = piece or width
    found: list[tuple[float, RowConfig]] = []
    for rows in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8):
            for chunk in (256, 512, 1024, 2048, 4096):
                padded = -(-piece // chunk) * chunk
                held = tiles * rows * padded * (width // piece) / (32 * warps)
                if rows * chunk >= 256 * warps and padded <= 1.34 * piece and 24 <= held <= 200:
                    found.append(
                        (
                            abs(held - 72) + 8 * (rows * chunk != 256 * warps),
                            RowConfig(rows, warps, chunk),
                        )
                    )
    found.sort(key=lambda entry: entry[0])
    return [first, *[config for _, config in found if config != first][:limit]]


def bench_norm_linear(report: Report, configs: Callable[..., list[RowConfig]]) -> None:
    """Qkv products, dense gate-up."""
    for batch, n, width, gated in (
        (1, 5120, 2048, False),
        (4, 5120, 2048, False),
        (8, 5120, 2048, False),
        (1, 960, 576, False),
        (1, 3072, 576, True),
    ):
        weights = [drawn(n, width, scale=width**-0.5) for _ in range(copies(n * width * 2))]
        x, norm = drawn(batch, width), drawn(width)
        out = torch.empty(batch, n // 2 if gated else n, device="cuda", dtype=DTYPE)
        launches = lambda config, weights=weights, x=x, norm=norm, out=out, gated=gated: [  # noqa: E731
            partial(norm_linear.norm_linear, x, norm, w, EPS, out=out, gated=gated, config=config)
            for w in weights
        ]
        in_torch: list[Launch] = [
            lambda w=w, x=x, norm=norm: F.linear(F.rms_norm(x, norm.shape, norm, EPS), w)
            for w in weights
        ]
        tiles = 2 if gated else 1
        served = norm_linear.CONFIGS.get((n, width)) or default_config(width, tiles=tiles)
        chosen = configs(served, width, tiles=tiles) if batch == 1 or width == 2048 else [served]
        report.sweep(
            "norm_linear",
            f"b{batch} {n}x{width}{' gated' if gated else ''}",
            2 * n * width,
            2 * batch * n * width,
            launches=launches,
            configs=chosen,
            torch_launches=in_torch,
        )


def bench_linear_add(report: Report, configs: Callable[..., list[RowConfig]]) -> None:
    """Attention's output product."""
    for batch, n, width in ((1, 2048, 4096), (4, 2048, 4096), (1, 576, 576), (1, 576, 1536)):
        weights = [drawn(n, width, scale=width**-0.5) for _ in range(copies(n * width * 2))]
        x, h = drawn(batch, width), drawn(batch, n)
        launches = lambda config, weights=weights, x=x, h=h: [
            partial(linear_add.linear_add, x, w, h, config=config) for w in weights
        ]
        in_torch: list[Launch] = [lambda w=w, x=x, h=h: h.add_(F.linear(x, w)) for w in weights]
        served = linear_add.CONFIGS.get((n, width)) or default_config(width)
        report.sweep(
            "linear_add",
            f"b{batch} {n}x{width}",
            2 * n * width,
            2 * batch * n * width,
            launches=launches,
            configs=configs(served, width) if width == 4096 else [served],
            torch_launches=in_torch,
        )


def bench_lm_head(report: Report, configs: Callable[..., list[RowConfig]]) -> None:
    """The vocabulary's product."""
    for batch, vocab, hidden in ((1, 151936, 2048), (4, 151936, 2048), (1, 49152, 576)):
        weight, x, norm = (
            drawn(vocab, hidden, scale=hidden**-0.5),
            drawn(batch, hidden),
            drawn(hidden),
        )
        out = torch.empty(batch, vocab, device="cuda")
        served = lm_head.CONFIGS.get((vocab, hidden)) or default_config(hidden)
        report.sweep(
            "lm_head",
            f"b{batch} {vocab}x{hidden}",
            2 * vocab * hidden,
            2 * batch * vocab * hidden,
            launches=lambda config, weight=weight, x=x, norm=norm, out=out: [
                partial(lm_head.lm_head, x, norm, weight, EPS, out=out, config=config)
            ],
            configs=configs(served, hidden) if hidden == 2048 else [served],
            torch_launches=[
                lambda weight=weight, x=x, norm=norm: F.linear(
                    F.rms_norm(x, norm.shape, norm, EPS), weight
                ).float()
            ],
        )


class Experts:
    """Experts of one layer and several routings, so that each launch reads other ones."""

    def __init__(self, batch: int, hidden: int, experts: int, top_k: int, inter: int) -> None:
        self.up = [drawn(2 * inter, hidden, scale=hidden**-0.5) for _ in range(experts)]
        self.down = [drawn(hidden, inter, scale=inter**-0.5) for _ in range(experts)]
        self.up_table = torch.tensor([w.data_ptr() for w in self.up], device="cuda")
        self.down_table = torch.tensor([w.data_ptr() for w in self.down], device="cuda")
        draws = [[torch.randperm(experts)[:top_k] for _ in range(batch)] for _ in range(20)]
        self.ids = [torch.stack(rows).to("cuda", torch.int32) for rows in draws]
        used = sum(int(ids.unique().numel()) for ids in self.ids) / len(self.ids)
        self.weights = torch.full((batch, top_k), 1 / top_k, device="cuda")
        self.h, self.norm = drawn(batch, hidden), drawn(hidden)
        self.inner = drawn(batch * top_k, inter, scale=0.1)
        self.up_bytes, self.down_bytes = (
            int(used * 4 * inter * hidden),
            int(used * 2 * inter * hidden),
        )

    def torch_up(self) -> list[Launch]:
        """One token's gate-up products, expert by expert, the ids known on the CPU."""

        def one(chosen: list[int]) -> None:
            y = F.rms_norm(self.h, self.norm.shape, self.norm, EPS)
            for expert in chosen:
                gate, up = F.linear(y, self.up[expert]).chunk(2, -1)
                F.silu(gate).mul_(up)

        return [partial(one, ids[0].tolist()) for ids in self.ids]

    def torch_down(self) -> list[Launch]:
        """One token's down products."""

        def one(chosen: list[int]) -> None:
            for rank, expert in enumerate(chosen):
                self.h.add_(F.linear(self.inner[rank : rank + 1], self.down[expert]), alpha=0.125)

        return [partial(one, ids[0].tolist()) for ids in self.ids]


def bench_experts(report: Report, configs: Callable[..., list[RowConfig]]) -> None:
    """Router, gate-up and down."""
    for batch, hidden, experts, top_k, inter in (
        (1, 2048, 128, 8, 768),
        (4, 2048, 128, 8, 768),
        (8, 2048, 128, 8, 768),
        (1, 576, 8, 2, 1536),
    ):
        bank, is_main = Experts(batch, hidden, experts, top_k, inter), batch == 1 and hidden == 2048
        shape = f"b{batch} {experts}/{top_k} {inter}x{hidden}"
        served = expert_up.CONFIGS.get((inter, hidden)) or default_config(hidden, tiles=2)
        flop = 4 * batch * top_k * inter * hidden
        report.sweep(
            "expert_up",
            shape,
            bank.up_bytes,
            flop,
            torch_launches=bank.torch_up() if batch == 1 else None,
            launches=lambda c, bank=bank: [
                partial(
                    expert_up.expert_up,
                    bank.h,
                    bank.norm,
                    EPS,
                    ids,
                    bank.up_table,
                    out=bank.inner,
                    config=c,
                )
                for ids in bank.ids
            ],
            configs=configs(served, hidden, tiles=2) if is_main or batch == 4 else [served],
        )
        served = expert_down.CONFIGS.get((hidden, inter, top_k)) or default_config(
            top_k * inter, chunk_of=inter
        )
        report.sweep(
            "expert_down",
            shape,
            bank.down_bytes,
            flop // 2,
            torch_launches=bank.torch_down() if batch == 1 else None,
            launches=lambda c, bank=bank: [
                partial(
                    expert_down.expert_down,
                    bank.inner,
                    ids,
                    bank.weights,
                    bank.down_table,
                    bank.h,
                    config=c,
                )
                for ids in bank.ids
            ],
            configs=configs(served, top_k * inter, piece=inter)
            if is_main or batch == 4
            else [served],
        )
        router, logits = (
            drawn(experts, hidden, scale=hidden**-0.5),
            torch.empty(batch, experts, device="cuda"),
        )
        counters = torch.zeros(8, dtype=torch.int32, device="cuda")
        served = router_gate.CONFIGS.get((experts, hidden)) or default_config(hidden)
        more = [
            RowConfig(4, 4, 256),
            RowConfig(8, 8, 256),
            RowConfig(2, 4, 512),
            RowConfig(8, 4, 512),
            RowConfig(1, 4, 1024),
        ]
        report.sweep(
            "router_gate",
            shape,
            2 * experts * hidden,
            2 * batch * experts * hidden,
            launches=lambda c, bank=bank, router=router, logits=logits, counters=counters: [
                partial(
                    router_gate.router_gate,
                    bank.h,
                    bank.norm,
                    router,
                    EPS,
                    renormalize=True,
                    ids=ids.clone(),
                    weights=bank.weights.clone(),
                    logits=logits,
                    counters=counters,
                    config=c,
                )
                for ids in bank.ids[:2]
            ],
            configs=[served, *more] if is_main and configs is candidates else [served],
            torch_launches=[
                lambda bank=bank, router=router, top_k=top_k: (
                    F.linear(F.rms_norm(bank.h, bank.norm.shape, bank.norm, EPS), router)
                    .float()
                    .softmax(-1)
                    .topk(top_k)
                )
            ],
        )


def bench_attention(report: Report, configs: Callable[..., list[RowConfig]]) -> None:
    """Prologue and split attention, apart and fused, at several contexts."""
    for batch, length, heads, kv_heads, width in (
        (1, 128, 32, 4, 128),
        (1, 2048, 32, 4, 128),
        (1, 32768, 32, 4, 128),
        (4, 2048, 32, 4, 128),
        (8, 8192, 32, 4, 128),
        (1, 2048, 9, 3, 64),
    ):
        pages, page_tokens = -(-length // 16), 16
        num = copies(batch * length * kv_heads * width * 4) if length < 32768 else 3
        pools = [
            (drawn(batch * pages * 16, kv_heads, width), drawn(batch * pages * 16, kv_heads, width))
            for _ in range(num)
        ]
        table = torch.randperm(batch * pages, device="cuda").view(batch, pages).to(torch.int32)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        qkv, norm = drawn(batch, (heads + 2 * kv_heads) * width), drawn(heads + kv_heads, width)
        cos, sin = (torch.rand(batch, width // 2, device="cuda") for _ in range(2))
        slots = table[:, -1].long() * 16 + (length - 1) % 16
        out = torch.empty(batch, heads * width, device="cuda", dtype=DTYPE)
        counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device="cuda")
        scratch = torch.empty(
            decode_attention.scratch_elements(
                batch, heads, kv_heads, width, decode_attention.AttentionConfig(128)
            ),
            device="cuda",
        )
        served = decode_attention.default_config(kv_heads, heads // kv_heads, width)
        sweep = [
            served,
            *(replace(served, splits=s) for s in (16, 64)),
            replace(served, keys=32),
            replace(served, keys=128, stages=2),
            replace(served, warps=2),
            replace(served, keys=128, warps=8, stages=2),
        ]
        for name, prologue in (
            ("attention", None),
            ("attention fused", Prologue(cos, sin, slots, norm, EPS)),
        ):
            report.sweep(
                name,
                f"b{batch} ctx {length} {heads}/{kv_heads}x{width}",
                4 * batch * length * kv_heads * width,
                4 * batch * length * heads * width,
                launches=lambda c, pools=pools, table=table, lens=lens, qkv=qkv, out=out, scratch=scratch, counters=counters, prologue=prologue, width=width: [
                    partial(
                        decode_attention.decode_attention,
                        qkv,
                        k,
                        v,
                        table,
                        lens,
                        page_tokens,
                        width**-0.5,
                        out=out,
                        scratch=scratch,
                        counters=counters,
                        prologue=prologue,
                        config=c,
                    )
                    for k, v in pools
                ],
                configs=sweep
                if configs is candidates and (prologue is None or length == 2048) and width == 128
                else [served],
            )
        k, v = pools[0]
        report.sweep(
            "qkv_prologue",
            f"b{batch} {heads}/{kv_heads}x{width}",
            4 * qkv.numel(),
            0,
            configs=[None],
            launches=lambda _, k=k, v=v, qkv=qkv, cos=cos, sin=sin, slots=slots, norm=norm: [
                partial(qkv_prologue.qkv_prologue, qkv, cos, sin, slots, k, v, norm=norm, eps=EPS)
            ],
        )


def bench_ends(report: Report, _configs: Callable[..., list[RowConfig]]) -> None:
    """First and last nodes of a step."""
    batch, hidden, half = 1, 2048, 64
    table, h = drawn(151936, hidden), torch.empty(batch, hidden, device="cuda", dtype=DTYPE)
    cos, sin = (torch.empty(batch, half, device="cuda") for _ in range(2))
    tokens, frequencies = (
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.rand(half, device="cuda"),
    )
    positions = torch.full((batch,), 100_000, device="cuda")
    report.sweep(
        "embed_rows",
        f"b{batch}",
        4 * hidden,
        0,
        configs=[None],
        launches=lambda _: [
            partial(
                embed_rows.embed_rows, tokens, table, positions, frequencies, h=h, cos=cos, sin=sin
            )
        ],
    )
    state = advance.StepState(
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.ones(batch, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.zeros(batch, 4096, dtype=torch.int32, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    host = [torch.zeros(shape, dtype=torch.int64, pin_memory=True) for shape in ((4, batch), (1,))]
    sound = torch.ones(batch, dtype=torch.int32, device="cuda")
    report.sweep(
        "advance",
        f"b{batch}",
        0,
        0,
        configs=[None],
        launches=lambda _: [
            partial(
                advance.advance,
                tokens,
                sound,
                state,
                16,
                host_ids=host[0],
                host_word=host[1],
                spare_slot=0,
            )
        ],
    )


def bench_layer(report: Report, _configs: Callable[..., list[RowConfig]]) -> None:
    """A whole decode layer of Qwen3-30B-A3B as the graph runs it, seven and six nodes, and how far from its bytes."""
    for batch in (1, 4, 8):
        hidden, heads, kv_heads, width, experts, top_k, inter, length = (
            2048,
            32,
            4,
            128,
            128,
            8,
            768,
            1024,
        )
        bank = Experts(batch, hidden, experts, top_k, inter)
        num = 3
        qkv_w, out_w = (
            [drawn(5120, hidden, scale=0.02) for _ in range(num)],
            [drawn(hidden, 4096, scale=0.01) for _ in range(num)],
        )
        router, norm = drawn(experts, hidden, scale=0.02), drawn(heads + kv_heads, width)
        pools = [
            (drawn(batch * length, kv_heads, width), drawn(batch * length, kv_heads, width))
            for _ in range(num)
        ]
        table = torch.randperm(batch * length // 16, device="cuda").view(batch, -1).to(torch.int32)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        slots = table[:, -1].long() * 16 + 15
        qkv, attended = (
            torch.empty(batch, 5120, device="cuda", dtype=DTYPE),
            torch.empty(batch, 4096, device="cuda", dtype=DTYPE),
        )
        cos, sin = (torch.rand(batch, width // 2, device="cuda") for _ in range(2))
        logits, counters = (
            torch.empty(batch, experts, device="cuda"),
            torch.zeros(64, dtype=torch.int32, device="cuda"),
        )
        scratch = torch.empty(
            decode_attention.scratch_elements(batch, heads, kv_heads, width), device="cuda"
        )
        ids, weights = bank.ids[0].clone(), bank.weights.clone()

        def layer(
            i: int,
            fused: bool,
            b: Any = bank,
            t: Sequence[Any] = (
                qkv_w,
                out_w,
                router,
                norm,
                pools,
                table,
                lens,
                slots,
                qkv,
                attended,
                cos,
                sin,
                logits,
                counters,
                scratch,
                ids,
                weights,
            ),
        ) -> None:
            (
                qkv_w,
                out_w,
                router,
                norm,
                pools,
                table,
                lens,
                slots,
                qkv,
                attended,
                cos,
                sin,
                logits,
                counters,
                scratch,
                ids,
                weights,
            ) = t
            k, v = pools[i]
            norm_linear.norm_linear(b.h, b.norm, qkv_w[i], EPS, out=qkv)
            if not fused:
                qkv_prologue.qkv_prologue(qkv, cos, sin, slots, k, v, norm=norm, eps=EPS)
            prologue = Prologue(cos, sin, slots, norm, EPS) if fused else None
            decode_attention.decode_attention(
                qkv,
                k,
                v,
                table,
                lens,
                16,
                width**-0.5,
                out=attended,
                scratch=scratch,
                counters=counters[:32],
                prologue=prologue,
            )
            linear_add.linear_add(attended, out_w[i], b.h)
            router_gate.router_gate(
                b.h,
                b.norm,
                router,
                EPS,
                renormalize=True,
                ids=ids,
                weights=weights,
                logits=logits,
                counters=counters[32:],
            )
            # The bank's routings and not the router's, which would take the same experts again and again from the cache.
            turn = b.ids[(7 * i + 3) % 20]
            expert_up.expert_up(b.h, b.norm, EPS, turn, b.up_table, out=b.inner)
            expert_down.expert_down(b.inner, turn, weights, b.down_table, b.h)

        num_bytes = (
            2 * (5120 * hidden + hidden * 4096 + experts * hidden)
            + bank.up_bytes
            + bank.down_bytes
            + 4 * batch * length * kv_heads * width
        )
        for fused in (False, True):
            report.sweep(
                "layer",
                f"b{batch} ctx {length} {'fused' if fused else 'apart'}",
                num_bytes,
                0,
                configs=[None],
                launches=lambda _, fused=fused, layer=layer: [
                    partial(layer, i, fused) for i in range(num)
                ],
            )


BENCHES = {
    "layer": bench_layer,
    "norm_linear": bench_norm_linear,
    "linear_add": bench_linear_add,
    "experts": bench_experts,
    "attention": bench_attention,
    "lm_head": bench_lm_head,
    "ends": bench_ends,
}


def main() -> None:
    """Run the benches asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument(
        "--only", choices=list(BENCHES), action="append", help="run this bench (may be repeated)"
    )
    parser.add_argument("--quick", action="store_true", help="served configs only, no sweep")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    print(
        f"# empty node (torch add of one element): {graph_us([partial(torch.zeros(1, device='cuda').add_, 1)]):.2f} us"
    )
    for name, bench in BENCHES.items():
        if not arguments.only or name in arguments.only:
            bench(
                report,
                (lambda first, *_args, **_kwargs: [first]) if arguments.quick else candidates,
            )
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
