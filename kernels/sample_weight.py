"""The arithmetic that the launches of `sample_rows` share: shares, integer weights, and how a row ends."""

from __future__ import annotations

from freetoken.kernels.triton_import import tl, triton


@triton.jit
def share_of(x, greatest, temperature):
    """Return each token's probability relative to the likeliest's."""
    return tl.exp((x - greatest) / temperature)


@triton.jit
def weight_of(share, min_p):
    """Return shares as integers, 2^44 for 1; 0 for those under min_p."""
    return tl.where(share >= min_p, (share * 17592186044416.0).to(tl.int64), 0)


@triton.jit
def is_drawn(row, temperature_ptr, greatest_ptr):
    """Whether the row is left for the later launches: not greedy, and sound."""
    greatest = tl.load(greatest_ptr + row)
    return (
        (tl.load(temperature_ptr + row) > 0.0)
        & (greatest < float("inf"))
        & (greatest > float("-inf"))
    )


@triton.jit
def target_of(uniform, total):
    """Which unit of weight the uniform number names; rounding may carry the product up to the total itself."""
    target = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(target, 0), tl.maximum(total - 1, 0))


@triton.jit
def finish(row, token, sound, ids_ptr, sound_ptr, slots_ptr, outputs_ptr, vocab):
    """Write a row's result and count it."""
    tl.store(ids_ptr + row, token.to(tl.int64))
    tl.store(sound_ptr + row, sound.to(tl.int8))
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot >= 0) & sound:
        place = outputs_ptr + slot * vocab + token
        tl.store(place, tl.load(place) + 1)
