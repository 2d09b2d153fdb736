"""Last node of a decode step: the state of each sequence moves on by the sampled token, and the CPU is told.

Everything the next step reads is on the device already, so it can be launched before this one's tokens are seen. The
CPU sees ids in pinned memory and then a sequence number in a pinned word: whoever reads the word `n` may read step n's ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.triton_import import (
    INTERPRETED,
    early_launch,
    next_power_of_2,
    tl,
    tl_cuda,
    triton,
)


@dataclass(frozen=True, slots=True)
class StepState:
    """Device state of the rows of a decode graph; one row a sequence. A row with kv_len 0 is idle and stays as it is.

    tokens       [batch] int64  token to embed next
    positions    [batch] int64  its position
    kv_lens      [batch] int32  keys that it sees, its own included
    write_slots  [batch] int64  where its key goes
    page_table   [batch, pages] int32
    sequence     [1] int64      number of the last step finished
    """

    tokens: Tensor
    positions: Tensor
    kv_lens: Tensor
    write_slots: Tensor
    page_table: Tensor
    sequence: Tensor


def reference(ids: Tensor, state: StepState, page_tokens: int, spare_slot: int) -> StepState:
    """Return the state after the step."""
    busy = state.kv_lens > 0
    positions = torch.where(busy, state.positions + 1, state.positions)
    pages = state.page_table.shape[1]
    page = state.page_table.long().gather(
        1, (positions // page_tokens).clamp(max=pages - 1)[:, None]
    )[:, 0]
    slots = torch.where(
        positions < pages * page_tokens, page * page_tokens + positions % page_tokens, spare_slot
    )
    return StepState(
        torch.where(busy, ids, state.tokens),
        positions,
        torch.where(busy & (positions < pages * page_tokens), state.kv_lens + 1, state.kv_lens),
        torch.where(busy, slots, state.write_slots),
        state.page_table,
        state.sequence + 1,
    )


@triton.jit
def _kernel(
    ids_ptr, sound_ptr, tokens_ptr, positions_ptr, lens_ptr, slots_ptr, table_ptr, pages, sequence_ptr, host_ids_ptr, ring,
    word_ptr, spare_slot, batch, BATCH_PAD: tl.constexpr, PAGE: tl.constexpr, SYSTEM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    row = tl.arange(0, BATCH_PAD)
    real = row < batch
    token = tl.load(ids_ptr + row, mask=real, other=0).to(tl.int64)
    is_sound = tl.load(sound_ptr + row, mask=real, other=0) != 0
    length = tl.load(lens_ptr + row, mask=real, other=0)
    busy = real & (length > 0)
    position = tl.load(positions_ptr + row, mask=real, other=0) + 1
    # A sequence at the end of its pages goes on harmlessly until the CPU stops it.
    in_pages = position < pages * PAGE
    page = tl.load(table_ptr + row * pages + position // PAGE, mask=busy & in_pages, other=0).to(
        tl.int64
    )
    slot = tl.where(in_pages, page * PAGE + position % PAGE, spare_slot)
    tl.store(tokens_ptr + row, token, mask=busy)
    tl.store(positions_ptr + row, position, mask=busy)
    tl.store(lens_ptr + row, length + 1, mask=busy & in_pages)
    tl.store(slots_ptr + row, slot, mask=busy)
    number = tl.load(sequence_ptr) + 1
    tl.store(host_ids_ptr + (number % ring) * batch + row, tl.where(is_sound, token, -1), mask=real)
    # All threads' ids come before the word, also for a reader on the other side of the bus.
    tl.debug_barrier()
    tl.store(sequence_ptr, number)
    if SYSTEM:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0;", "=r,l,l",
            [word_ptr.to(tl.int64), number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(word_ptr, number)


def advance(
    ids: Tensor,
    is_sound: Tensor,
    state: StepState,
    page_tokens: int,
    *,
    host_ids: Tensor,
    host_word: Tensor,
    spare_slot: int,
) -> None:
    """Move every busy row on by its sampled token and publish the step.

    ids        [batch] int64, sampled
    is_sound   [batch] int32 or bool; a row that is not publishes -1
    state      changed in place; a row at the end of its page table gets spare_slot and keeps its kv_len
    host_ids   [ring, batch] int64 in pinned memory; row `sequence % ring` is written. ring >= steps in flight + 1
    host_word  [1] int64 in pinned memory; becomes the step's sequence number after host_ids is visible to the CPU
    spare_slot a slot that no sequence reads
    Reference: `reference`, exact.
    """
    batch, pages = state.page_table.shape
    if ids.shape[0] != batch or host_ids.shape[1] != batch or not state.page_table.is_contiguous():
        raise ValueError(
            f"expected {batch} ids, host rows of as many and a contiguous page table, got {list(ids.shape)}, {list(host_ids.shape)}"
        )
    if host_word.dtype != torch.int64 or host_ids.dtype != torch.int64:
        raise ValueError(
            f"expected int64 in pinned memory, got {host_ids.dtype}, {host_word.dtype}"
        )
    early = early_launch(ids.device)
    _kernel[(1,)](
        ids, is_sound.view(torch.int8) if is_sound.dtype == torch.bool else is_sound, state.tokens, state.positions,
        state.kv_lens, state.write_slots, state.page_table, pages, state.sequence, host_ids, host_ids.shape[0], host_word,
        spare_slot, batch, BATCH_PAD=next_power_of_2(batch), PAGE=page_tokens, SYSTEM=not INTERPRETED, EARLY=early,
        num_warps=1, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
