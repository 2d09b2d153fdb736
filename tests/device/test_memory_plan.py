"""The memory plan: plain numbers in, a plan or a refusal out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.device.memory_plan import (
    FLOOR_TOKENS,
    HostAsk,
    MemoryAsk,
    MemoryPlan,
    Workspace,
    plan_memory,
)
from freetoken.errors import ConfigError

GB = 10**9
CARD = MemoryAsk(
    is_gpu=True,
    available_bytes=24 * GB,
    dense_bytes=3 * GB,
    expert_bytes=12 * GB,
    kv_token_bytes=98_304,
    workspace=Workspace(fixed_bytes=50_000_000, token_bytes=60_000, context_bytes=4),
    slot_bytes=4_000_000,
    graph_bytes=60_000_000,
    reserve_bytes=GB,
    model_context=262_144,
    page_tokens=16,
    max_running=8,
    chunk_range=(512, 8192),
    host=HostAsk(16 * GB, 10_000_000, GB, GB // 2),
)


def used(plan: MemoryPlan) -> int:
    """Bytes that stay taken in the first memory."""
    memory = plan.memories[0]
    return memory.available_bytes - memory.unused_bytes


@pytest.mark.parametrize("vram_gb", [4, 8, 12, 15], ids=lambda n: f"vram={n}")
def test_weights_that_do_not_fit_are_refused_before_loading_with_what_is_short(
    vram_gb: int,
) -> None:
    """H25: not enough memory for KV, found after minutes of loading."""
    ask = replace(CARD, available_bytes=vram_gb * GB)
    with pytest.raises(ConfigError, match=r"GB short; .*--device cpu") as caught:
        plan_memory(ask)
    assert f"got {vram_gb:.2f} GB" in str(caught.value)


@pytest.mark.parametrize("vram_gb", [24, 80], ids=lambda n: f"vram={n}")
def test_default_start_keeps_a_context_that_an_agent_needs(vram_gb: int) -> None:
    """H25, H01: the split gives nearly everything to something else and leaves 8k of context."""
    plan = plan_memory(replace(CARD, available_bytes=vram_gb * GB))
    assert plan.context >= FLOOR_TOKENS
    assert not plan.notes
    assert used(plan) <= vram_gb * GB


def test_short_context_is_said_with_the_reason_and_the_flag() -> None:
    """H25: a card that leaves a small context starts without a word."""
    ask = replace(CARD, available_bytes=int(18.5 * GB), max_prefill=1024)
    plan = plan_memory(ask)
    assert plan.context < FLOOR_TOKENS
    (note,) = plan.notes
    assert f"{plan.context} tokens and not {FLOOR_TOKENS}" in note
    assert "98304 bytes a token" in note
    assert "GB short; free" in note


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_tokens": 400_000}, r"--num-tokens 400000: .* short; lower --num-tokens to \d+"),
        ({"max_seq_len": 200_000}, r"--max-seq-len 200000: .* short; lower --max-seq-len to \d+"),
        ({"max_seq_len": 300_000}, r"--max-seq-len: expected at most 262144"),
        ({"num_tokens": 100, "max_seq_len": 200}, r"--num-tokens: expected at least --max-seq-len"),
        ({"max_prefill": 200_000}, r"lower --max-prefill-length to \d+ or less"),
        ({"max_running": 4000}, r"lower --max-running-requests to \d+ or less"),
    ],
    ids=["kv", "context", "over-the-model", "contradiction", "chunk", "requests"],
)
def test_explicit_flag_that_does_not_fit_is_refused_never_overridden(
    settings: dict[str, int], text: str
) -> None:
    """H25: a flag that is silently ignored."""
    with pytest.raises(ConfigError, match=text):
        plan_memory(replace(CARD, **settings))


@pytest.mark.parametrize("flag", ["num_tokens", "max_seq_len", "max_prefill", "max_running"])
def test_value_named_in_a_refusal_fits(flag: str) -> None:
    """A remedy that does not help."""
    huge = {"num_tokens": 400_000, "max_seq_len": 200_000, "max_prefill": 200_000}
    ask = replace(CARD, **{flag: huge.get(flag, 4000)})
    with pytest.raises(ConfigError) as caught:
        plan_memory(ask)
    named = {"max_prefill": "max-prefill-length", "max_running": "max-running-requests"}
    words = str(caught.value).split(f"lower --{named.get(flag, flag.replace('_', '-'))} to ")[1]
    plan_memory(replace(CARD, **{flag: int(words.split()[0])}))


def test_explicit_flags_are_honoured() -> None:
    """A plan that knows better than the person."""
    plan = plan_memory(replace(CARD, num_tokens=40_000, max_seq_len=30_000, max_prefill=700))
    assert (plan.num_pages * 16, plan.context, plan.max_prefill_tokens) == (40_000, 30_000, 700)


def test_ram_too_small_to_load_through_is_refused() -> None:
    """A start that is killed by the system while it reads."""
    with pytest.raises(ConfigError, match="of RAM to load the weights through"):
        plan_memory(replace(CARD, host=HostAsk(GB, 10_000_000, GB, GB // 2)))


@given(
    available=st.integers(0, 100 * GB),
    dense=st.integers(1, 20 * GB),
    experts=st.integers(0, 40 * GB),
    kv=st.integers(1_000, 400_000),
    context=st.sampled_from([8192, 40_960, 262_144]),
    page=st.sampled_from([1, 16, 64]),
)
def test_plan_never_exceeds_memory_and_more_memory_never_gives_less_context(
    available: int, dense: int, experts: int, kv: int, context: int, page: int
) -> None:
    """Arithmetic that only holds for the machine it was written on."""
    ask = replace(
        CARD,
        available_bytes=available,
        dense_bytes=dense,
        expert_bytes=experts,
        kv_token_bytes=kv,
        model_context=context,
        page_tokens=page,
    )
    try:
        plan = plan_memory(ask)
    except ConfigError:
        return
    assert used(plan) <= available
    assert 2 <= plan.context <= min(context, plan.num_pages * page)
    assert 512 <= plan.max_prefill_tokens <= 8192
    assert plan_memory(replace(ask, available_bytes=available + GB)).context >= plan.context
