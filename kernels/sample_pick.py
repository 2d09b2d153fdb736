"""Third launch of `sample_rows`: gather the tokens that top_k and top_p may keep, and draw one of those they do.

A token's key is its logit's bits in ascending order, then the id counted from the top: the greater key is the likelier
token, of equal ones that with the lowest id. Few gathered tokens are sorted by key; for many, the boundaries (k-th token,
top_p, the draw) are found by bisection over keys, summing all gathered tokens at each trial.
"""

from __future__ import annotations

from freetoken.kernels.sample_weight import finish, is_drawn, share_of, target_of, weight_of
from freetoken.kernels.triton_import import tl, tl_cuda, triton


@triton.jit
def _weight_of_key(key, greatest, temperature, min_p, ID_BITS: tl.constexpr):
    """Return the weight of a token by its key; an absent one's key is that of -inf, which weighs 0."""
    ordered = (key >> ID_BITS).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return weight_of(share_of(bits.to(tl.float32, bitcast=True), greatest, temperature), min_p)


@triton.jit
def _sum_from(
    keys_ptr, n, floor, place_floor, greatest, temperature, min_p, COUNT: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Count or weigh the gathered tokens whose key is at least `floor`, and the id's part of it at least `place_floor`."""
    total = tl.zeros([TILE], tl.int64)
    absent = tl.cast(-2139095041, tl.int64) << ID_BITS
    id_mask = (tl.cast(1, tl.int64) << ID_BITS) - 1
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys_ptr + at, mask=at < n, other=absent, cache_modifier=".cg")
        ok = (at < n) & (key >= floor) & ((key & id_mask) >= place_floor)
        if COUNT:
            total += ok.to(tl.int64)
        else:
            total += tl.where(ok, _weight_of_key(key, greatest, temperature, min_p, ID_BITS), 0)
    return tl.sum(total, 0)


@triton.jit
def _crossing(
    keys_ptr, n, target, low, high, floor, greatest, temperature, min_p,
    COUNT: tl.constexpr, BY_ID: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Return the greatest key from which on the sum exceeds `target`: that of the token that carries it over.

    From `low` on the sum exceeds it, from `high` on it does not. BY_ID: the id's part of the key, among keys from `floor` on.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        if BY_ID:
            total = _sum_from(
                keys_ptr, n, floor, middle, greatest, temperature, min_p, COUNT, TILE, ID_BITS
            )
        else:
            total = _sum_from(
                keys_ptr, n, middle, 0, greatest, temperature, min_p, COUNT, TILE, ID_BITS
            )
        if total > target:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _by_sorting(
    keys_ptr, n, all_mass, top_k, top_p, min_p, uniform, greatest, temperature, SORTED: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Draw from at most SORTED gathered tokens; return the id's part of the key."""
    place = tl.arange(0, SORTED)
    absent = tl.cast(-2139095041, tl.int64) << ID_BITS
    id_mask = (tl.cast(1, tl.int64) << ID_BITS) - 1
    key = tl.load(keys_ptr + place, mask=place < n, other=absent, cache_modifier=".cg")
    key = tl.sort(key, descending=True)
    within = (place < n) & ((top_k == 0) | (place < top_k))
    weight = tl.where(within, _weight_of_key(key, greatest, temperature, 0.0, ID_BITS), 0)
    sums = tl.cumsum(weight, 0)
    total = tl.where(top_k > 0, tl.max(sums, 0), all_mass)
    kept = within & (((sums - weight).to(tl.float64) < top_p * total.to(tl.float64)) | (place == 0))
    if top_k == 0:
        # In order of ids: the id's part in front, the value behind it; tokens that are not kept go last and weigh nothing.
        last = tl.cast(-1, tl.int64) << 40
        key = tl.sort(
            tl.where(kept, ((key & id_mask) << 32) | ((key >> ID_BITS) & 0xFFFFFFFF), last),
            descending=True,
        )
        kept = key != last
        key = ((key & 0xFFFFFFFF) << 32 >> 32 << ID_BITS) | ((key >> 32) & id_mask)
        key = tl.where(kept, key, absent)
    sums = tl.cumsum(
        tl.where(kept, _weight_of_key(key, greatest, temperature, min_p, ID_BITS), 0), 0
    )
    at = tl.sum((sums <= target_of(uniform, tl.max(sums, 0))).to(tl.int32), 0)
    return tl.sum(tl.where(place == at, key & id_mask, 0), 0)


@triton.jit
def _by_bisection(
    keys_ptr, n, all_mass, top_k, top_p, min_p, uniform, greatest, temperature, TILE: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Draw from any number of gathered tokens; return the id's part of the key."""
    low = tl.cast(-2139095041, tl.int64) << ID_BITS
    high = tl.cast(2139095041, tl.int64) << ID_BITS
    floor = low
    total = all_mass
    if top_k > 0:
        if top_k < n:
            floor = _crossing(
                keys_ptr,
                n,
                top_k - 1,
                low,
                high,
                low,
                greatest,
                temperature,
                0.0,
                True,
                False,
                TILE,
                ID_BITS,
            )
        total = _sum_from(keys_ptr, n, floor, 0, greatest, temperature, 0.0, False, TILE, ID_BITS)
    if top_p < 1.0:
        # The last token kept is the one before which less than top_p of the total lies.
        share = top_p * total.to(tl.float64)
        limit = share.to(tl.int64)
        limit = tl.maximum(tl.where(limit.to(tl.float64) < share, limit, limit - 1), 0)
        if (
            _sum_from(keys_ptr, n, floor, 0, greatest, temperature, 0.0, False, TILE, ID_BITS)
            > limit
        ):
            floor = _crossing(
                keys_ptr,
                n,
                limit,
                floor,
                high,
                low,
                greatest,
                temperature,
                0.0,
                False,
                False,
                TILE,
                ID_BITS,
            )
    mass = _sum_from(keys_ptr, n, floor, 0, greatest, temperature, min_p, False, TILE, ID_BITS)
    target = target_of(uniform, mass)
    chosen = low
    if top_k > 0:
        chosen = _crossing(
            keys_ptr,
            n,
            target,
            floor,
            high,
            low,
            greatest,
            temperature,
            min_p,
            False,
            False,
            TILE,
            ID_BITS,
        )
    else:
        end = tl.cast(1, tl.int64) << ID_BITS
        chosen = _crossing(
            keys_ptr,
            n,
            target,
            end - end,
            end,
            floor,
            greatest,
            temperature,
            min_p,
            False,
            True,
            TILE,
            ID_BITS,
        )
    return chosen & ((tl.cast(1, tl.int64) << ID_BITS) - 1)


@triton.jit
def sample_pick(
    adjusted_ptr, greatest_ptr, counters_ptr, cut_ptr, totals_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniforms_ptr,
    slots_ptr, outputs_ptr, ids_ptr, sound_ptr, vocab,
    BLOCK: tl.constexpr, BINS: tl.constexpr, BINS_A_NAT: tl.constexpr, SORTED: tl.constexpr, TILE: tl.constexpr,
    ID_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Gather the tokens up to the row's cut; the last program of a row draws."""
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (is_drawn(row, temperature_ptr, greatest_ptr) == 0) | ((top_k == 0) & (top_p >= 1.0)):
        return
    temperature, greatest = tl.load(temperature_ptr + row), tl.load(greatest_ptr + row)
    min_p, uniform = tl.load(min_p_ptr + row), tl.load(uniforms_ptr + row)
    keys_ptr += row * vocab
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(adjusted_ptr + row * vocab + token, mask=token < vocab, other=float("-inf"))
    far = tl.minimum((greatest - x) / temperature * BINS_A_NAT, BINS - 1.0).to(tl.int32)
    wanted = (
        (token < vocab)
        & (far <= tl.load(cut_ptr + row))
        & (weight_of(share_of(x, greatest, temperature), 0.0) > 0)
    )
    # + 0.0 makes -0.0 equal to 0.0; negative floats count downwards.
    id_mask = (tl.cast(1, tl.int64) << ID_BITS) - 1
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << ID_BITS) + (id_mask - token)
    num = tl.sum(wanted.to(tl.int32), 0)
    if num > 0:
        start = tl.atomic_add(counters_ptr + row * 4 + 3, num, sem="relaxed")
        tl.store(keys_ptr + start + tl.cumsum(wanted.to(tl.int32), 0) - 1, key, mask=wanted)
    tl.debug_barrier()
    done = tl.atomic_add(counters_ptr + row * 4 + 2, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(counters_ptr + row * 4 + 2, 0)
        n = tl.load(counters_ptr + row * 4 + 3, cache_modifier=".cg")
        all_mass = tl.load(totals_ptr + row)
        place = tl.cast(0, tl.int64)
        if n <= SORTED:
            place = _by_sorting(
                keys_ptr,
                n,
                all_mass,
                top_k,
                top_p,
                min_p,
                uniform,
                greatest,
                temperature,
                SORTED,
                ID_BITS,
            )
        else:
            place = _by_bisection(
                keys_ptr,
                n,
                all_mass,
                top_k,
                top_p,
                min_p,
                uniform,
                greatest,
                temperature,
                TILE,
                ID_BITS,
            )
        picked = id_mask - place
        finish(row, picked, picked >= 0, ids_ptr, sound_ptr, slots_ptr, outputs_ptr, vocab)
