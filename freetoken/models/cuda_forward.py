"""The forward pass on a GPU: the same decoder, computed by the Triton kernels. Two ways: `prefill`
for any number of rows, `decode` for one row of each of up to 8 sequences, small enough in launches
to be captured as a graph.

Experts are reached through tables of addresses, one a layer, so that later a cache slot or a
streamed buffer is used in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.kernels.combine_rows import combine_rows
from freetoken.kernels.decode_attention import decode_attention, scratch_elements
from freetoken.kernels.embed_rows import embed_rows
from freetoken.kernels.expert_down import expert_down
from freetoken.kernels.expert_gemm import choose_block_m, expert_gemm, pointer_table
from freetoken.kernels.expert_sort import empty_pairs, expert_sort
from freetoken.kernels.expert_up import expert_up
from freetoken.kernels.linear_add import linear_add
from freetoken.kernels.lm_head import lm_head
from freetoken.kernels.norm_linear import norm_linear
from freetoken.kernels.prefill_attention import PagedRuns, prefill_attention
from freetoken.kernels.qkv_prologue import qkv_prologue, whole_norm
from freetoken.kernels.rms_norm_rows import rms_norm_rows
from freetoken.kernels.router_gate import router_gate
from freetoken.kernels.router_rows import router_rows
from freetoken.kernels.rows import MAX_BATCH
from freetoken.kernels.silu_mul_rows import silu_mul_rows
from freetoken.kvcache.pool import KvPool
from freetoken.layers.attention import HeadNorm, WholeNorm
from freetoken.layers.mlp import GatedMlp
from freetoken.layers.moe import SparseMoe
from freetoken.layers.rope import Rope, RopeAngles
from freetoken.models.build import DecoderLayer
from freetoken.models.decoder import Decoder

__all__ = ["MAX_BATCH", "CudaForward", "CudaRows", "CudaScratch"]


@dataclass(frozen=True, slots=True)
class CudaRows:
    """One step's rows on the device, sequences end to end. T rows, B sequences, S rows to sample.

    tokens       [T] int64
    positions    [T] int64
    write_slots  [T] int64
    runs         where each sequence's rows end and its keys are; for decode T == B
    sample_rows  [S] int64; decode samples every row and does not look at it
    """

    tokens: Tensor
    positions: Tensor
    write_slots: Tensor
    runs: PagedRuns
    sample_rows: Tensor


@dataclass(frozen=True, slots=True)
class CudaScratch:
    """Working memory of decode steps, made once: zero before the first launch and after each."""

    attention: Tensor
    counters: Tensor


@dataclass(frozen=True, slots=True)
class _Experts:
    """Addresses of one layer's expert matrices, [experts] int64 each."""

    up: Tensor
    down: Tensor


class CudaForward:
    """A decoder on a GPU. Keeps nothing between steps; used from one thread and one stream."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._experts = [
            _Experts(pointer_table(layer.ffn.up), pointer_table(layer.ffn.down))
            if isinstance(layer.ffn, SparseMoe)
            else None
            for layer in decoder.layers
        ]
        ropes = {layer.rope for layer in decoder.layers}
        self._angles = {rope: RopeAngles(rope, decoder.device) for rope in ropes}
        self._frequencies = {rope: rope.frequencies().to(decoder.device) for rope in ropes}

    def make_scratch(self) -> CudaScratch:
        """Allocate what `decode` needs for up to MAX_BATCH rows."""
        device = self.decoder.device
        mixers = [layer.mixer for layer in self.decoder.layers]
        elements = max(scratch_elements(MAX_BATCH, m.heads, m.kv_heads, m.head_dim) for m in mixers)
        counters = MAX_BATCH * max(1, *(m.kv_heads for m in mixers))
        return CudaScratch(
            torch.zeros(elements, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    @torch.inference_mode()
    def prefill(self, rows: CudaRows, kv: KvPool) -> Tensor:
        """Compute any rows, write their keys and values. Out: logits [S, vocab] float32."""
        decoder = self.decoder
        angles = self._angles_of(rows.positions)
        residual = decoder.embed(rows.tokens)
        x = torch.empty_like(residual)
        rms_norm_rows(residual, decoder.layers[0].mixer_norm.weight, decoder.norm.eps, x)
        last = len(decoder.layers) - 1
        for index, layer in enumerate(decoder.layers):
            o = self._attend(layer, x, rows, angles[layer.rope], (kv.k[index], kv.v[index]))
            if index == last and rows.sample_rows.shape[0] == 0:
                return residual.new_empty(0, decoder.spec.vocab, dtype=torch.float32)
            if index == last:
                o, residual = o[rows.sample_rows], residual[rows.sample_rows]
                x = torch.empty_like(residual)
            rms_norm_rows(o, layer.ffn_norm.weight, layer.ffn_norm.eps, x, residual=residual)
            norm = decoder.norm if index == last else decoder.layers[index + 1].mixer_norm
            self._feed_forward(index, layer, x, residual)
            rms_norm_rows(residual, norm.weight, norm.eps, x)
        return F.linear(x, decoder.head.weight).float()

    @torch.inference_mode()
    def decode(self, rows: CudaRows, kv: KvPool, scratch: CudaScratch) -> Tensor:
        """Compute one row of each of 1 to MAX_BATCH sequences. Out: logits [B, vocab] float32.

        Reads no value on the host: may be captured as a graph.
        """
        decoder = self.decoder
        h, angles = self._decode_inputs(rows)
        for index, layer in enumerate(decoder.layers):
            pools = (kv.k[index], kv.v[index])
            self._decode_attention(layer, h, rows, angles[layer.rope], pools, scratch)
            self._decode_feed_forward(index, layer, h, scratch)
        logits = torch.empty(
            h.shape[0], decoder.head.weight.shape[0], dtype=torch.float32, device=h.device
        )
        return lm_head(h, decoder.norm.weight, decoder.head.weight, decoder.norm.eps, out=logits)

    # Prefill --------------------------------------------------------------------------------------

    def _angles_of(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        return {rope: turn(positions) for rope, turn in self._angles.items()}

    def _attend(
        self,
        layer: DecoderLayer,
        x: Tensor,
        rows: CudaRows,
        angles: tuple[Tensor, Tensor],
        pools: tuple[Tensor, Tensor],
    ) -> Tensor:
        mixer, norm = layer.mixer, layer.mixer.qk_norm
        width = mixer.heads * mixer.head_dim
        qkv = F.linear(x, mixer.qkv.weight, mixer.qkv.bias)
        head_norm, eps = _prepare_norm(qkv, norm, width, mixer.kv_heads * mixer.head_dim)
        qkv_prologue(
            qkv, *angles, rows.write_slots, *pools, norm=head_norm, eps=eps, clip=mixer.clip
        )
        q = qkv[:, :width].view(-1, mixer.heads, mixer.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        prefill_attention(q, *pools, rows.runs, mixer.scale, out, window=layer.window)
        return F.linear(out.view(-1, width), mixer.out.weight, mixer.out.bias)

    def _feed_forward(self, index: int, layer: DecoderLayer, x: Tensor, residual: Tensor) -> None:
        """Add the feed-forward of x to the residual stream."""
        ffn, tables = layer.ffn, self._experts[index]
        if isinstance(ffn, GatedMlp):
            up = F.linear(x, ffn.up.weight, ffn.up.bias)
            act = torch.empty(x.shape[0], up.shape[1] // 2, dtype=x.dtype, device=x.device)
            residual += F.linear(silu_mul_rows(up, act), ffn.down.weight, ffn.down.bias)
            return
        assert tables is not None
        tokens, experts = x.shape[0], ffn.up.shape[0]
        ids = torch.empty(tokens, ffn.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(tokens, ffn.top_k, dtype=torch.float32, device=x.device)
        logits = F.linear(x, ffn.router.weight, ffn.router.bias)
        router_rows(logits, ids, weights, renormalize=ffn.renormalize)
        block_m = choose_block_m(ids.numel(), experts)
        pairs = expert_sort(ids, experts, empty_pairs(ids.numel(), experts, block_m, x.device))
        act = torch.empty(ids.numel(), ffn.down.shape[2], dtype=x.dtype, device=x.device)
        out = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
        expert_gemm(x, pairs, tables.up, tables.down, act, out, top_k=ffn.top_k)
        combine_rows(out, weights, residual, residual=residual)

    # Decode ---------------------------------------------------------------------------------------

    def _decode_inputs(self, rows: CudaRows) -> tuple[Tensor, dict[Rope, tuple[Tensor, Tensor]]]:
        """Embed the tokens and compute the angles; one launch where all layers share them."""
        table, batch = self.decoder.embed.weight, rows.tokens.shape[0]
        if len(self._frequencies) > 1:
            return self.decoder.embed(rows.tokens), self._angles_of(rows.positions)
        ((rope, frequencies),) = self._frequencies.items()
        h = torch.empty(batch, table.shape[1], dtype=table.dtype, device=table.device)
        shape = (batch, frequencies.shape[0])
        cos = torch.empty(shape, dtype=torch.float32, device=table.device)
        sin = torch.empty_like(cos)
        embed_rows(
            rows.tokens,
            table,
            rows.positions,
            frequencies,
            rope.attention_scale,
            h=h,
            cos=cos,
            sin=sin,
        )
        return h, {rope: (cos, sin)}

    def _decode_attention(
        self,
        layer: DecoderLayer,
        h: Tensor,
        rows: CudaRows,
        angles: tuple[Tensor, Tensor],
        pools: tuple[Tensor, Tensor],
        scratch: CudaScratch,
    ) -> None:
        mixer, norm = layer.mixer, layer.mixer.qk_norm
        batch, width = h.shape[0], mixer.heads * mixer.head_dim
        qkv = torch.empty(batch, mixer.qkv.weight.shape[0], dtype=h.dtype, device=h.device)
        weight, eps = layer.mixer_norm.weight, layer.mixer_norm.eps
        norm_linear(h, weight, mixer.qkv.weight, eps, out=qkv, bias=mixer.qkv.bias)
        head_norm, norm_eps = _prepare_norm(qkv, norm, width, mixer.kv_heads * mixer.head_dim)
        # Measured on an H200: 1.0 us of its own against 2 to 3 inside the attention kernel.
        qkv_prologue(
            qkv, *angles, rows.write_slots, *pools, norm=head_norm, eps=norm_eps, clip=mixer.clip
        )
        out = torch.empty(batch, width, dtype=h.dtype, device=h.device)
        decode_attention(
            qkv,
            *pools,
            rows.runs.page_table,
            rows.runs.kv_lens,
            rows.runs.page_tokens,
            mixer.scale,
            out=out,
            scratch=scratch.attention,
            counters=scratch.counters,
            window=layer.window,
        )
        linear_add(out, mixer.out.weight, h, bias=mixer.out.bias)

    def _decode_feed_forward(
        self, index: int, layer: DecoderLayer, h: Tensor, scratch: CudaScratch
    ) -> None:
        ffn, tables = layer.ffn, self._experts[index]
        norm, eps, batch = layer.ffn_norm.weight, layer.ffn_norm.eps, h.shape[0]
        if isinstance(ffn, GatedMlp):
            inter = ffn.up.weight.shape[0] // 2
            act = torch.empty(batch, inter, dtype=h.dtype, device=h.device)
            norm_linear(h, norm, ffn.up.weight, eps, out=act, bias=ffn.up.bias, gated=True)
            linear_add(act, ffn.down.weight, h, bias=ffn.down.bias)
            return
        assert tables is not None
        ids = torch.empty(batch, ffn.top_k, dtype=torch.int32, device=h.device)
        weights = torch.empty(batch, ffn.top_k, dtype=torch.float32, device=h.device)
        logits = torch.empty(batch, ffn.up.shape[0], dtype=torch.float32, device=h.device)
        router_gate(
            h,
            norm,
            ffn.router.weight,
            eps,
            renormalize=ffn.renormalize,
            ids=ids,
            weights=weights,
            logits=logits,
            counters=scratch.counters,
            bias=ffn.router.bias,
        )
        act = torch.empty(ids.numel(), ffn.down.shape[2], dtype=h.dtype, device=h.device)
        expert_up(h, norm, eps, ids, tables.up, out=act)
        expert_down(act, ids, weights, tables.down, h)


def _prepare_norm(
    qkv: Tensor, norm: HeadNorm | WholeNorm | None, q_width: int, k_width: int
) -> tuple[Tensor | None, float]:
    """Norm all heads together at once; return what the prologue does for heads by themselves."""
    if isinstance(norm, WholeNorm):
        whole_norm(qkv, norm.q_weight, norm.k_weight, norm.eps)
        return None, 0.0
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)
