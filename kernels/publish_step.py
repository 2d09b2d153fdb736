"""Last launch of a step: sampled ids to their slots for the next step, and to the CPU, which is then told.

The CPU sees the ids in pinned memory and after them the step's number in a pinned word: whoever reads the word `n` may read
step n's ids. No host callback, no event: a thread that watches the word wakes the event loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.triton_import import INTERPRETED, next_power_of_2, tl, triton


def reference(ids: Tensor, is_sound: Tensor, slots: Tensor, last_ids: Tensor) -> Tensor:
    """Write ids to last_ids[slots] in place; return what the CPU gets: ids, -1 where the row is not sound."""
    last_ids[slots] = ids
    return torch.where(is_sound != 0, ids, -1)


@triton.jit(do_not_specialize=["number", "rows"])
def _kernel(
    ids_ptr,
    sound_ptr,
    slots_ptr,
    last_ptr,
    host_ids_ptr,
    word_ptr,
    number,
    rows,
    ROWS: tl.constexpr,
    SYSTEM: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < rows
    token = tl.load(ids_ptr + row, mask=real, other=0)
    is_sound = tl.load(sound_ptr + row, mask=real, other=0) != 0
    slot = tl.load(slots_ptr + row, mask=real, other=0)
    tl.store(last_ptr + slot, token, mask=real)
    tl.store(host_ids_ptr + row, tl.where(is_sound, token, -1), mask=real)
    # All threads' ids come before the word, also for a reader on the other side of the bus.
    tl.debug_barrier()
    if SYSTEM:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0;", "=r,l,l",
            [word_ptr.to(tl.int64), number.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(word_ptr, number)


def publish_step(
    ids: Tensor,
    is_sound: Tensor,
    slots: Tensor,
    last_ids: Tensor,
    *,
    number: int,
    host_ids: Tensor,
    host_word: Tensor,
) -> None:
    """Hand over a step's ids.

    ids        [rows] int64, sampled; may be empty
    is_sound   [rows] int8; a row with 0 publishes -1
    slots      [rows] int64, all different
    last_ids   [slots] int64, written at slots
    number     the step's number, at least 1
    host_ids   [rows or more] int64 in pinned memory
    host_word  [1] int64 in pinned memory; becomes `number` after host_ids is visible to the CPU
    Reference: `reference`, exact.
    """
    rows = ids.shape[0]
    if host_ids.shape[0] < rows or host_ids.dtype != torch.int64 or host_word.dtype != torch.int64:
        raise ValueError(
            f"expected int64 room for {rows} ids and a word, got {list(host_ids.shape)} {host_ids.dtype}"
        )
    _kernel[(1,)](
        ids, is_sound, slots, last_ids, host_ids, host_word, number, rows,
        ROWS=max(16, next_power_of_2(rows)), SYSTEM=not INTERPRETED, num_warps=1,
    )  # fmt: skip
