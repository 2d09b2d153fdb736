"""One token for each row of logits, on the device and inside a graph: every setting is read from device memory.

Order: repetition, presence and frequency penalty, bias, allowed-token mask, temperature, top_k, top_p, min_p, draw with one
uniform number. Weights are integers (share * 2^44, the likeliest token's share being 1), so that no order of summation
changes a sum; tokens are ordered by value, equal ones by lowest id. Rows with top_k draw in that order, others in order of
ids. The meaning is that of `reference`.

Three launches. `_adjust` changes the logits and finds the likeliest token, which ends greedy rows. `_weigh` sums weights,
which ends rows without top_k and top_p by a draw in order of ids; for the others it counts and weighs tokens in bins of
distance from the likeliest, and the last program finds the bins that can matter. `sample_pick` (its own
file) gathers the tokens of those bins and draws. There is no sort of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.sample_pick import sample_pick
from freetoken.kernels.sample_weight import finish, is_drawn, share_of, target_of, weight_of
from freetoken.kernels.triton_import import early_launch, next_power_of_2, tl, tl_cuda, triton

BINS = 256
_BINS_A_NAT = 8
"""Bins reach 32 nats down; a token 30.5 nats under the likeliest weighs 0. Wider bins gather more tokens than needed."""
_UNIT = 2.0**44
_BLOCK = 1024
_SORTED = 1024
"""Gathered tokens that are sorted. At double, sorting costs more than twice as much and few draws need it."""
_TILE = 4096
"""Gathered tokens that bisection reads at once."""


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Settings of each row, on the device.

    temperature  [rows] float32; 0 is greedy
    top_k        [rows] int32; 0 is all
    top_p        [rows] float64; 1 is all
    min_p        [rows] float32
    uniforms     [rows] float64 in [0, 1)
    repetition   [rows] float32; 1 is none
    presence     [rows] float32
    frequency    [rows] float32
    slots        [rows] int32: the row of `outputs` and `in_prompt`; -1: no penalties, nothing counted
    bias_rows    [rows] int32: the row of `bias`; -1: none
    outputs      [slots, vocab] int32: how often each token was generated; the sampled one is added
    in_prompt    [slots, vocab] bool
    bias         [n, vocab] float32
    allowed      [rows, ceil(vocab / 32)] int32, bit i % 32 of word i / 32 allows token i; None allows all
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    slots: Tensor
    bias_rows: Tensor
    outputs: Tensor
    in_prompt: Tensor
    bias: Tensor
    allowed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Memory between the launches. `counters` is zero before the first step and after each."""

    adjusted: Tensor
    maxima: Tensor
    places: Tensor
    masses: Tensor
    greatest: Tensor
    counters: Tensor
    bin_counts: Tensor
    bin_masses: Tensor
    cut: Tensor
    totals: Tensor
    keys: Tensor


def make_scratch(rows: int, vocab: int, device: torch.device) -> SampleScratch:
    """Allocate for up to `rows` rows: 12 bytes a row and token."""
    blocks = -(-vocab // _BLOCK)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SampleScratch(
        adjusted=new(rows, vocab, dtype=torch.float32),
        maxima=new(rows, blocks, dtype=torch.float32),
        places=new(rows, blocks, dtype=torch.int32),
        masses=new(rows, blocks, dtype=torch.int64),
        greatest=new(rows, dtype=torch.float32),
        counters=new(rows, 4, dtype=torch.int32),
        bin_counts=new(rows, BINS, dtype=torch.int32),
        bin_masses=new(rows, BINS, dtype=torch.int64),
        cut=new(rows, dtype=torch.int32),
        totals=new(rows, dtype=torch.int64),
        keys=new(rows, vocab, dtype=torch.int64),
    )


def reference(logits: Tensor, settings: SampleSettings) -> tuple[Tensor, Tensor]:
    """Return ids [rows] int64 and soundness [rows] bool, row by row with a full sort. Counts nothing."""
    ids, sound = [], []
    for row in range(logits.shape[0]):
        x = _adjusted(logits[row].float(), settings, row)
        greatest, temperature = x.max(), float(settings.temperature[row])
        sound.append(bool(greatest.isfinite()) and not bool(x.isnan().any()))
        if temperature == 0 or not sound[-1]:
            ids.append(int(x.argmax()))
            continue
        top_k, top_p = int(settings.top_k[row]), float(settings.top_p[row])
        is_filtered = top_k > 0 or top_p < 1
        order = (
            x.sort(descending=True, stable=True).indices
            if is_filtered
            else torch.arange(x.shape[0], device=x.device)
        )
        shares = ((x - greatest) / temperature).exp()[order]
        weights = (shares * _UNIT).long()
        if top_k:
            weights[top_k:] = 0
        kept = shares >= settings.min_p[row]
        if is_filtered:
            kept &= (weights.cumsum(0) - weights).double() < top_p * float(weights.sum())
            kept[0] = True
        if not top_k:
            order, places = order.sort()
            kept, weights = kept[places], weights[places]
        sums = torch.where(kept, weights, 0).cumsum(0)
        target = min(int(float(settings.uniforms[row]) * float(sums[-1])), int(sums[-1]) - 1)
        ids.append(int(order[int((sums <= target).sum())]))
    return torch.tensor(ids, device=logits.device), torch.tensor(sound, device=logits.device)


def _adjusted(x: Tensor, settings: SampleSettings, row: int) -> Tensor:
    slot, bias_row = int(settings.slots[row]), int(settings.bias_rows[row])
    if slot >= 0:
        counts = settings.outputs[slot]
        seen = (counts > 0) | settings.in_prompt[slot]
        repetition = settings.repetition[row]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - settings.presence[row] * (counts > 0) - settings.frequency[row] * counts
    if bias_row >= 0:
        x = x + settings.bias[bias_row]
    if settings.allowed is not None:
        token = torch.arange(x.shape[0], device=x.device)
        bits = settings.allowed[row][token // 32] >> (token % 32)
        x = torch.where((bits & 1) == 1, x, float("-inf"))
    return x


@triton.jit
def _adjust(
    logits_ptr, adjusted_ptr, maxima_ptr, places_ptr, greatest_ptr, counters_ptr, bin_counts_ptr, bin_masses_ptr,
    temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, bias_rows_ptr, outputs_ptr, in_prompt_ptr,
    bias_ptr, allowed_ptr, ids_ptr, sound_ptr, vocab, words,
    ALLOWED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab
    x = tl.load(logits_ptr + row * vocab + token, mask=real, other=float("-inf"))
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        count = tl.load(outputs_ptr + slot * vocab + token, mask=real, other=0)
        seen = (count > 0) | (
            tl.load(in_prompt_ptr + slot * vocab + token, mask=real, other=0) != 0
        )
        repetition = tl.load(repetition_ptr + row)
        x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
        x = (
            x
            - tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
            - tl.load(frequency_ptr + row) * count
        )
    bias_row = tl.load(bias_rows_ptr + row).to(tl.int64)
    if bias_row >= 0:
        x = x + tl.load(bias_ptr + bias_row * vocab + token, mask=real, other=0.0)
    if ALLOWED:
        bits = tl.load(allowed_ptr + row * words + token // 32, mask=real, other=0) >> (token % 32)
        x = tl.where((bits & 1) == 1, x, float("-inf"))
    # NaN and +inf become +inf: the row's maximum tells.
    x = tl.where(real, tl.where(x == x, x, float("inf")), float("-inf"))
    tl.store(adjusted_ptr + row * vocab + token, x, mask=real)
    best = tl.max(x, 0)
    tl.store(maxima_ptr + row * blocks + block, best)
    tl.store(places_ptr + row * blocks + block, tl.min(tl.where(x == best, token, vocab), 0))
    tl.debug_barrier()
    done = tl.atomic_add(counters_ptr + row * 4, 1, sem="acq_rel", scope="gpu")
    if done == blocks - 1:
        tl.store(counters_ptr + row * 4, 0)
        each = tl.arange(0, BLOCKS_PAD)
        maxima = tl.load(
            maxima_ptr + row * blocks + each,
            mask=each < blocks,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        places = tl.load(
            places_ptr + row * blocks + each, mask=each < blocks, other=vocab, cache_modifier=".cg"
        )
        greatest = tl.max(maxima, 0)
        sound = (greatest < float("inf")) & (greatest > float("-inf"))
        tl.store(greatest_ptr + row, greatest)
        bins = tl.arange(0, BINS)
        tl.store(bin_counts_ptr + row * BINS + bins, tl.zeros([BINS], tl.int32))
        tl.store(bin_masses_ptr + row * BINS + bins, tl.zeros([BINS], tl.int64))
        tl.store(counters_ptr + row * 4 + 3, 0)
        if (tl.load(temperature_ptr + row) == 0.0) | (sound == 0):
            first = tl.min(tl.where(maxima == greatest, places, vocab), 0)
            finish(
                row,
                tl.where(sound, first, 0),
                sound,
                ids_ptr,
                sound_ptr,
                slots_ptr,
                outputs_ptr,
                vocab,
            )


@triton.jit
def _weigh(
    adjusted_ptr, masses_ptr, greatest_ptr, counters_ptr, bin_counts_ptr, bin_masses_ptr, cut_ptr, totals_ptr, temperature_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, uniforms_ptr, slots_ptr, outputs_ptr, ids_ptr, sound_ptr, vocab,
    BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr, BINS: tl.constexpr, BINS_A_NAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if is_drawn(row, temperature_ptr, greatest_ptr) == 0:
        return
    blocks = tl.num_programs(0)
    temperature, greatest = tl.load(temperature_ptr + row), tl.load(greatest_ptr + row)
    top_k, top_p, min_p = (
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
        tl.load(min_p_ptr + row),
    )
    is_plain = (top_k == 0) & (top_p >= 1.0)
    token = tl.arange(0, BLOCK)
    x = tl.load(
        adjusted_ptr + row * vocab + block * BLOCK + token,
        mask=block * BLOCK + token < vocab,
        other=float("-inf"),
    )
    weight = weight_of(share_of(x, greatest, temperature), tl.where(is_plain, min_p, 0.0))
    if is_plain:
        tl.store(masses_ptr + row * blocks + block, tl.sum(weight, 0))
    else:
        far = tl.minimum((greatest - x) / temperature * BINS_A_NAT, BINS - 1.0).to(tl.int32)
        tl.atomic_add(bin_counts_ptr + row * BINS + far, 1, mask=weight > 0, sem="relaxed")
        tl.atomic_add(bin_masses_ptr + row * BINS + far, weight, mask=weight > 0, sem="relaxed")
    tl.debug_barrier()
    done = tl.atomic_add(counters_ptr + row * 4 + 1, 1, sem="acq_rel", scope="gpu")
    if done == blocks - 1:
        tl.store(counters_ptr + row * 4 + 1, 0)
        if is_plain:
            each = tl.arange(0, BLOCKS_PAD)
            sums = tl.cumsum(
                tl.load(
                    masses_ptr + row * blocks + each,
                    mask=each < blocks,
                    other=0,
                    cache_modifier=".cg",
                ),
                0,
            )
            target = target_of(tl.load(uniforms_ptr + row), tl.max(sums, 0))
            chosen = tl.sum((sums <= target).to(tl.int32), 0)
            before = tl.max(tl.where(sums <= target, sums, 0), 0)
            place = chosen * BLOCK + token
            near = tl.load(
                adjusted_ptr + row * vocab + place, mask=place < vocab, other=float("-inf")
            )
            inside = before + tl.cumsum(weight_of(share_of(near, greatest, temperature), min_p), 0)
            picked = chosen * BLOCK + tl.sum((inside <= target).to(tl.int32), 0)
            finish(
                row,
                tl.minimum(picked, vocab - 1),
                picked >= 0,
                ids_ptr,
                sound_ptr,
                slots_ptr,
                outputs_ptr,
                vocab,
            )
        else:
            bins = tl.arange(0, BINS)
            counts = tl.cumsum(tl.load(bin_counts_ptr + row * BINS + bins, cache_modifier=".cg"), 0)
            mass = tl.cumsum(tl.load(bin_masses_ptr + row * BINS + bins, cache_modifier=".cg"), 0)
            # The first bin after which nothing can be kept, by each setting; all bins if none says so.
            enough = (top_k > 0) & (counts >= top_k)
            enough |= (top_k == 0) & (mass.to(tl.float64) >= top_p * tl.max(mass, 0).to(tl.float64))
            # One bin more than min_p needs, for the rounding of exp. top_p of a top_k counts tokens that min_p drops.
            enough |= ((top_k == 0) | (top_p >= 1.0)) & (tl.exp(-(bins - 0.0) / BINS_A_NAT) < min_p)
            tl.store(cut_ptr + row, tl.min(tl.where(enough, bins, BINS - 1), 0))
            tl.store(totals_ptr + row, tl.max(mass, 0))


def sample_rows(
    logits: Tensor,
    settings: SampleSettings,
    *,
    ids: Tensor,
    is_sound: Tensor,
    scratch: SampleScratch,
    draws: bool = True,
) -> None:
    """Choose a token for each row and count it in its slot.

    logits    [rows, vocab] float32 contiguous, not changed
    ids       [rows] int64, written
    is_sound  [rows] int8, written: 0 if the logits held NaN or +inf, or no token was left; the id then means nothing
    scratch   of `make_scratch` for at least as many rows
    draws     False leaves out the two launches that greedy rows do not need; rows with a temperature are then not written
    Reference: `reference`; the same token unless the uniform number falls within rounding (1e-6) of a boundary.
    """
    rows, vocab = logits.shape
    if (
        logits.dtype != torch.float32
        or not logits.is_contiguous()
        or scratch.adjusted.shape[0] < rows
        or scratch.adjusted.shape[1] != vocab
    ):
        raise ValueError(
            f"expected contiguous float32 logits and scratch of {vocab} tokens, got {list(logits.shape)} {logits.dtype}, {list(scratch.adjusted.shape)}"
        )
    if (
        ids.dtype != torch.int64
        or is_sound.dtype != torch.int8
        or ids.shape[0] != rows
        or is_sound.shape[0] != rows
    ):
        raise ValueError(
            f"expected int64 ids and int8 is_sound of {rows} rows, got {ids.dtype} {list(ids.shape)}, {is_sound.dtype}"
        )
    if rows == 0:
        return
    s, t = settings, scratch
    early = early_launch(logits.device)
    grid, blocks = (triton.cdiv(vocab, _BLOCK), rows), next_power_of_2(triton.cdiv(vocab, _BLOCK))
    options = {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}
    outcome = (s.slots, s.outputs, ids, is_sound, vocab)
    _adjust[grid](
        logits, t.adjusted, t.maxima, t.places, t.greatest, t.counters, t.bin_counts, t.bin_masses, s.temperature, s.repetition,
        s.presence, s.frequency, s.slots, s.bias_rows, s.outputs, s.in_prompt.view(torch.int8), s.bias,
        s.slots if s.allowed is None else s.allowed, ids, is_sound, vocab, triton.cdiv(vocab, 32),
        ALLOWED=s.allowed is not None, BLOCK=_BLOCK, BLOCKS_PAD=blocks, BINS=BINS, num_warps=4, **options,
    )  # fmt: skip
    if not draws:
        return
    _weigh[grid](
        t.adjusted, t.masses, t.greatest, t.counters, t.bin_counts, t.bin_masses, t.cut, t.totals, s.temperature, s.top_k, s.top_p,
        s.min_p, s.uniforms, *outcome,
        BLOCK=_BLOCK, BLOCKS_PAD=blocks, BINS=BINS, BINS_A_NAT=_BINS_A_NAT, num_warps=4, **options,
    )  # fmt: skip
    sample_pick[grid](
        t.adjusted, t.greatest, t.counters, t.cut, t.totals, t.keys, s.temperature, s.top_k, s.top_p, s.min_p, s.uniforms, *outcome,
        BLOCK=_BLOCK, BINS=BINS, BINS_A_NAT=_BINS_A_NAT, SORTED=_SORTED, TILE=_TILE,
        ID_BITS=max(1, (vocab - 1).bit_length()), num_warps=8, **options,
    )  # fmt: skip
