"""What a decoder takes in bytes, from its spec alone: weights, working memory, tables, graphs, and
the bytes that one decode step reads.

`element_bytes` is the size of one number of weights, activations and KV. The formulas of working
memory follow the allocations of `models/cuda_forward.py` and `models/decoder.py` one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from freetoken.device.memory_plan import Workspace
from freetoken.kernels.decode_attention import scratch_elements
from freetoken.kernels.expert_sort import CHUNK
from freetoken.kernels.rows import MAX_BATCH
from freetoken.kernels.sample_rows import BINS
from freetoken.models.slots import slots
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, Moe

_ROUNDING = 8
"""The allocator rounds up and keeps pieces: one part in eight more than what tensors hold. At half
pieces of a changing chunk length may not fit; double costs chunks their length."""

_NODE_BYTES = 4096
"""Device memory of one captured launch: its arguments and the driver's own record."""

_LAYER_NODES = 9
"""Launches of one layer in a decode step, attention and experts, at most."""

_SETTINGS_BYTES, _INPUT_BYTES = 64, 48
"""Of a row of a step, with alignment: sampling settings (`cuda_choice`), tokens and pages
(`cuda_batch`)."""

_SORT_BYTES = 40
"""A token of one row that is sorted, for log-probabilities or on a CPU: values, ids, shares, and
copies of each."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights once loaded, experts apart: they are most of a large model and the part that
    may lie elsewhere one day.
    """

    dense_bytes: int
    expert_bytes: int


def weights(spec: DecoderSpec, element_bytes: int) -> Weights:
    """Count dense and expert weights."""
    dense = experts = 0
    for slot in slots(spec):
        if len(slot.shape) == 3:
            experts += prod(slot.shape) * element_bytes
        else:
            dense += prod(slot.shape) * element_bytes
    return Weights(dense, experts)


def step_bytes(spec: DecoderSpec, element_bytes: int, *, context: int, streams: int = 1) -> int:
    """Bytes that a decode step of `streams` sequences must read from memory at least, each at
    `context` tokens: dense weights once, every chosen expert once (choices taken as even and
    independent), each sequence's keys and values.
    """
    held = weights(spec, element_bytes)
    table = spec.vocab * spec.hidden * element_bytes
    # The embedding table gives one row a token; a tied one is read whole as the output matrix.
    total = held.dense_bytes - (0 if spec.is_tied else table)
    for block in spec.blocks:
        mixer, ffn = block.mixer, block.ffn
        if isinstance(ffn, Moe):
            share = 1 - (1 - ffn.top_k / ffn.experts) ** streams
            matrices = 3 * ffn.experts * ffn.inter * spec.hidden * element_bytes
            total += int(share * matrices)
        seen = context if mixer.window is None else min(context, mixer.window)
        total += streams * seen * 2 * mixer.kv_heads * mixer.head_dim * element_bytes
    return total


def cuda_workspace(
    spec: DecoderSpec, element_bytes: int, *, max_running: int, page_tokens: int
) -> Workspace:
    """Working memory of `CudaForward`: scratch of decode steps, and a prompt chunk."""
    blocks = spec.blocks
    ropes = {block.mixer.rope for block in blocks}
    inputs = 5 * 8  # tokens, their owners and last ids, positions, slots
    angles = sum(4 * rope.dim for rope in ropes) + max(4 * rope.dim for rope in ropes)
    peak = max(_cuda_token_bytes(block, spec.hidden, element_bytes) for block in blocks)
    mixers = [block.mixer for block in blocks]
    scratch = 4 * max(
        scratch_elements(MAX_BATCH, m.heads, m.kv_heads, m.head_dim) + MAX_BATCH * m.kv_heads
        for m in mixers
    )
    experts = max((b.ffn.experts for b in blocks if isinstance(b.ffn, Moe)), default=0)
    tables = 16 * sum(b.ffn.experts for b in blocks if isinstance(b.ffn, Moe))
    return Workspace(
        fixed_bytes=scratch + tables + 20 * experts + _SORT_BYTES * spec.vocab,
        token_bytes=_rounded(inputs + angles + peak),
        # Page tables: of all slots, of a chunk's sequences, of a decode step's.
        context_bytes=-(-4 * (2 * max_running + MAX_BATCH) // page_tokens),
    )


def cuda_slot_bytes(spec: DecoderSpec, element_bytes: int) -> int:
    """Sampling on a GPU: tables of penalties and bias, scratch, logits, for each request."""
    tables = spec.vocab * (4 + 1 + 4)
    scratch = spec.vocab * (4 + 8) + -(-spec.vocab // 1024) * 16 + BINS * 12
    logits = spec.vocab * (4 if element_bytes == 4 else 4 + element_bytes)
    return tables + scratch + logits


def cuda_graph_bytes(
    spec: DecoderSpec, element_bytes: int, max_running: int, *, is_eager: bool
) -> int:
    """Decode graphs of 1 to MAX_BATCH rows, each with and without draws: the logits that each
    keeps, the memory they share, and the driver's records. Eager steps need one set of outputs.
    """
    rows = min(max_running, MAX_BATCH)
    peak = max(_cuda_token_bytes(block, spec.hidden, element_bytes) for block in spec.blocks)
    step = rows * (peak + 4 * spec.vocab)
    if is_eager:
        return step
    kept = 2 * 4 * spec.vocab * rows * (rows + 1) // 2
    nodes = 2 * rows * (_LAYER_NODES * len(spec.blocks) + 8)
    return step + kept + nodes * _NODE_BYTES


def pinned_bytes(max_running: int) -> int:
    """RAM that the GPU reads and writes itself: rings of settings, inputs and results. Pieces come
    in pages of the driver, so few requests take as much as many.
    """
    rings = 4 * (max_running * (_SETTINGS_BYTES * 2 + 8) + MAX_BATCH * _INPUT_BYTES)
    return rings + (2 << 20)


def cpu_workspace(spec: DecoderSpec, element_bytes: int, *, has_native: bool) -> Workspace:
    """Working memory of `Decoder.forward`: a prompt chunk, and the keys and values of one request
    gathered from their pages. Without the native library decode steps gather them, too.
    """
    peak = max(_cpu_token_bytes(block, spec.hidden, element_bytes) for block in spec.blocks)
    ropes = {block.mixer.rope for block in spec.blocks}
    windows = {block.mixer.window for block in spec.blocks}
    gathered = max(2 * b.mixer.kv_heads * b.mixer.head_dim for b in spec.blocks) * element_bytes
    return Workspace(
        fixed_bytes=_SORT_BYTES * spec.vocab,
        token_bytes=_rounded(24 + sum(8 * rope.dim for rope in ropes) + peak),
        context_bytes=gathered + 16,
        pair_bytes=len(windows) + element_bytes,
        # Sequences filled up to the longest of their group: at most twice their keys.
        kv_token_bytes=0 if has_native else 2 * gathered,
    )


def cpu_slot_bytes(spec: DecoderSpec, element_bytes: int) -> int:
    """Sampling on a CPU: counts of penalties, logits and their adjusted copy, for each request."""
    return spec.vocab * (4 + 4 + 4 + (0 if element_bytes == 4 else element_bytes))


def _cuda_token_bytes(block: Block, hidden: int, element_bytes: int) -> int:
    """Most that one layer holds at once for each row of `CudaForward.prefill`."""
    q, kv = _widths(block.mixer)
    # Residual, normed rows, the last layer's output; then qkv, attended heads, and their product.
    attention = (3 * hidden + (q + 2 * kv) + q + hidden) * element_bytes
    ffn, three = block.ffn, 3 * hidden * element_bytes
    if isinstance(ffn, Mlp):
        return max(attention, three + (3 * ffn.inter + hidden) * element_bytes)
    router = ffn.experts * element_bytes + 8 * ffn.top_k
    # Of each pair: its place, its part of a tile's three words, its part of a chunk's counts.
    sorting = ffn.top_k * (4 + 1 + -(-4 * ffn.experts // CHUNK))
    products = ffn.top_k * (ffn.inter + hidden) * element_bytes
    return max(attention, three + router + sorting + products)


def _cpu_token_bytes(block: Block, hidden: int, element_bytes: int) -> int:
    """Most that one layer holds at once for each row of `Decoder.forward`, on torch alone."""
    q, kv = _widths(block.mixer)
    rotating = 6 * (q + kv)  # three halves of all rotary heads, fp32
    attending = 3 * q * element_bytes
    attention = (3 * hidden + q + 2 * kv) * element_bytes + max(rotating, attending)
    ffn, two = block.ffn, 2 * hidden * element_bytes
    if isinstance(ffn, Mlp):
        return max(attention, two + (4 * ffn.inter + hidden) * element_bytes)
    # All rows may go to one expert; the results of the ranks are added in fp32.
    one = (4 * ffn.inter + hidden) * element_bytes
    widened = 0 if element_bytes == 4 else 4
    sorted_rows = ffn.top_k * hidden * element_bytes
    products = two + 2 * sorted_rows + one
    adding = two + 3 * sorted_rows + ffn.top_k * hidden * widened + 4 * hidden
    router = 24 * ffn.top_k + 12 * ffn.experts
    return max(attention, products + router, adding + router)


def _widths(mixer: Attention) -> tuple[int, int]:
    return mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim


def _rounded(count: int) -> int:
    return count + -(-count // _ROUNDING)
