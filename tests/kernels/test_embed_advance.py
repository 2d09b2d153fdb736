"""embed_rows and advance: the first and the last node of a decode step."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import advance, embed_rows
from freetoken.kernels.advance import StepState
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import poisoned


@pytest.mark.parametrize(("batch", "hidden", "half"), [(1, 32, 8), (3, 1100, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_embed_rows_matches_reference(
    batch: int,
    hidden: int,
    half: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Caught: another sequence's token or angle; a cosine that is only good near 0."""
    table = torch.randn(50, hidden, generator=generator).to(device, dtype)
    tokens = torch.randint(50, (batch,), generator=generator).to(device)
    positions = torch.tensor([0, 262_143, 777][:batch], device=device)
    frequencies = 1.0 / (1e6 ** (torch.arange(half, device=device) / half))
    h, cos, sin = (
        poisoned((batch, hidden), dtype, device),
        *(poisoned((batch, half), torch.float32, device) for _ in range(2)),
    )
    embed_rows.embed_rows(tokens, table, positions, frequencies, 1.5, h=h, cos=cos, sin=sin)
    expected = embed_rows.reference(tokens, table, positions, frequencies, 1.5)
    assert torch.equal(h, expected[0])
    torch.testing.assert_close(cos, expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, expected[2], atol=1e-5, rtol=0)


def _state(device: torch.device) -> StepState:
    table = torch.tensor(
        [[5, 2, 9], [7, 0, 0], [4, 3, 1], [6, 8, 11]], dtype=torch.int32, device=device
    )
    return StepState(
        torch.tensor([1, 2, 3, 4], device=device),
        torch.tensor([3, 0, 11, 6], device=device),  # end of a page, idle, end of the table, inside
        torch.tensor([4, 0, 12, 7], dtype=torch.int32, device=device),
        torch.tensor([23, 99, 7, 34], device=device),
        table,
        torch.tensor([41], device=device),
    )


def _pinned(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=torch.int64, pin_memory=torch.cuda.is_available())


def test_advance_matches_reference(device: torch.device) -> None:
    """Caught: an idle row that moves, a page boundary one token off, a slot past the page table."""
    state, ids = _state(device), torch.tensor([10, 20, 30, 40], device=device)
    expected = advance.reference(ids, state, 4, 1000)
    host_ids, word = _pinned(3, 4), _pinned(1)
    advance.advance(
        ids,
        torch.tensor([True, True, True, False], device=device),
        state,
        4,
        host_ids=host_ids,
        host_word=word,
        spare_slot=1000,
    )
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    for name in ("tokens", "positions", "kv_lens", "write_slots", "sequence"):
        assert torch.equal(getattr(state, name), getattr(expected, name)), name
    assert state.write_slots.tolist() == [8, 99, 1000, 35]
    assert word.tolist() == [42]
    assert host_ids.tolist() == [[10, 20, 30, -1], [-7] * 4, [-7] * 4]  # 42 % 3 == 0


def test_advance_step_by_step_crosses_pages(device: torch.device) -> None:
    """Caught: state that is right once and wrong when it feeds itself."""
    state, host_ids, word = _state(device), _pinned(2, 4), _pinned(1)
    sound = torch.ones(4, dtype=torch.bool, device=device)
    slots = []
    for step in range(6):
        advance.advance(
            torch.full((4,), step, device=device),
            sound,
            state,
            4,
            host_ids=host_ids,
            host_word=word,
            spare_slot=1000,
        )
        slots.append(int(state.write_slots[0]))
    assert slots == [8, 9, 10, 11, 36, 37]
    assert int(state.sequence) == 47
