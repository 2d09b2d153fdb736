"""Bytes from a spec against bytes that steps really take, counted by torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from freetoken import footprint
from freetoken.engine.step_input import warm_step
from freetoken.kernels.prefill_attention import PagedRuns
from freetoken.kvcache.pool import KvPool
from freetoken.layers.rope import Rope
from freetoken.models.cuda_forward import CudaForward, CudaRows
from freetoken.models.decoder import Decoder
from freetoken.models.slots import slots
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, Moe
from tests.kernels.interpreter import scalar_bounds

__all__ = ["scalar_bounds"]

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: compiled, or in Triton's interpreter."""

BLOCKS = 32 * 512
"""A GPU's allocator rounds each small tensor up to 512 bytes."""

TOKENS = 96
PAGE = 16
MIXER = Attention(heads=4, kv_heads=2, head_dim=32, rope=Rope(1e4, 32), qk_norm="head")
WIDE = Attention(heads=16, kv_heads=8, head_dim=64, rope=Rope(1e4, 64), qk_norm="whole")
MOE = Moe(experts=8, top_k=4, inter=64, renormalize=True)


def spec_of(block: Block) -> DecoderSpec:
    """Three equal layers; the vocabulary is small, so that a chunk is what counts."""
    return DecoderSpec(
        hidden=128, vocab=64, norm_eps=1e-6, blocks=(block,) * 3, context=TOKENS, is_tied=True
    )


SPECS = {
    "experts": spec_of(Block(MIXER, MOE)),
    "dense": spec_of(Block(MIXER, Mlp(inter=512))),
    "wide-attention": spec_of(Block(WIDE, Mlp(inter=32))),
}


def decoder_of(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Random weights."""
    torch.manual_seed(0)
    weights = {s.name: torch.randn(s.shape).mul(0.05).to(device, dtype) for s in slots(spec)}
    return Decoder(spec, weights)


def gpu_rows() -> CudaRows:
    """One sequence from its first token."""
    where = torch.arange(TOKENS, device=GPU)
    ends = torch.tensor([TOKENS], dtype=torch.int32, device=GPU)
    pages = torch.arange(TOKENS // PAGE, dtype=torch.int32, device=GPU)[None]
    return CudaRows(where % 64, where, where, PagedRuns(ends, ends, pages, PAGE), where[-1:])


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that torch held at once during `call`, beside what was there before."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    results = seen.profiler
    assert results is not None
    moves = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for move in sorted(moves, key=lambda e: e.start_ns()):
        held += move.nbytes()
        peak = max(peak, held)
    return peak


def gpu_peak_bytes(call: Callable[[], object]) -> int:
    """The same where kernels run."""
    if GPU.type == "cpu":
        return peak_bytes(call)
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(SPECS))
def test_prefill_on_a_gpu_takes_what_the_plan_says(name: str, dtype: torch.dtype) -> None:
    """H25: a formula that forgot a tensor, so that the first long prompt runs out of memory; or one
    so generous that small cards lose their context.
    """
    spec = SPECS[name]
    forward = CudaForward(decoder_of(spec, dtype, GPU))
    kv = KvPool(spec.kv_layers(), TOKENS // PAGE, PAGE, dtype, GPU)
    rows = gpu_rows()
    taken = gpu_peak_bytes(lambda: forward.prefill(rows, kv))
    size = dtype.itemsize
    work = footprint.cuda_workspace(spec, size, max_running=1, page_tokens=PAGE)
    # The rows' own tensors were made before.
    planned = work.token_bytes * TOKENS + footprint.cuda_slot_bytes(spec, size)
    print(name, taken, planned, taken/planned); assert 0.6 * planned <= taken <= planned + BLOCKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(SPECS))
def test_prefill_on_a_cpu_takes_what_the_plan_says(name: str, dtype: torch.dtype) -> None:
    """H25: a server that the system kills at the first long prompt."""
    spec = SPECS[name]
    decoder = decoder_of(spec, dtype, torch.device("cpu"))
    kv = KvPool(spec.kv_layers(), TOKENS // PAGE, PAGE, dtype)
    step = warm_step(TOKENS, PAGE)
    taken = peak_bytes(lambda: decoder.forward(step, kv))
    size = dtype.itemsize
    work = footprint.cpu_workspace(spec, size, has_native=True)
    planned = work.token_bytes * TOKENS + footprint.cpu_slot_bytes(spec, size)
    planned += (work.context_bytes + work.pair_bytes * TOKENS) * TOKENS
    print(name, taken, planned, taken/planned); assert 0.4 * planned <= taken <= planned


def test_weights_are_counted_as_they_are_held() -> None:
    """Experts counted as dense, or a tied output matrix counted twice."""
    spec = SPECS["experts"]
    held = footprint.weights(spec, 4)
    assert held.expert_bytes == 3 * (8 * 3 * 64 * 128) * 4
    assert held.dense_bytes + held.expert_bytes == 4 * sum(
        torch.Size(slot.shape).numel() for slot in slots(spec)
    )


def test_step_reads_chosen_experts_once_and_the_keys_of_its_window() -> None:
    """A bound of speed that counts all experts, or none of the context."""
    spec = SPECS["experts"]
    alone, several = (footprint.step_bytes(spec, 4, context=0, streams=n) for n in (1, 4))
    experts = footprint.weights(spec, 4).expert_bytes
    dense = footprint.weights(spec, 4).dense_bytes
    assert alone == dense + experts // 2
    assert several == dense + int(experts // 3 * (1 - 0.5**4)) * 3
    per_token = 3 * 2 * 2 * 32 * 4
    assert footprint.step_bytes(spec, 4, context=50) == alone + 50 * per_token
    windowed = replace(spec, blocks=(Block(replace(MIXER, window=20), MOE),) * 3)
    assert footprint.step_bytes(windowed, 4, context=50) == alone + 20 * per_token


def test_untied_embedding_table_is_not_read() -> None:
    """A bound that counts one row of a table as all of it."""
    tied = SPECS["dense"]
    untied = replace(tied, is_tied=False)
    assert footprint.step_bytes(tied, 2, context=0) == footprint.step_bytes(untied, 2, context=0)


def test_eager_steps_need_no_graphs() -> None:
    """Memory kept for graphs that --no-cuda-graphs switched off."""
    spec = SPECS["dense"]
    eager, graphs = (footprint.cuda_graph_bytes(spec, 2, 8, is_eager=e) for e in (True, False))
    assert 0 < eager < graphs
