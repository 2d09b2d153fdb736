"""Choosing one token a row from logits: argmax, or a draw by one uniform number. Tensors only; no
requests, no state.

Two things make a row's choice independent, bit for bit, of the rows beside it. Probabilities are
turned into integers before they are summed, so no order of summation can change a sum; and
candidates are ordered by one integer key made of value and token id, so no two are equal and no
sort can swap them. Each row needs nothing but its own logits and settings.

Shapes: R rows, V vocabulary, K candidates. logits [R, V] float32, settings [R, 1] float64 (top_k
int64), uniforms [R, 1] float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 128
"""Width of the blocks whose maxima narrow a search. At 64 the maxima, at 256 the chosen blocks take
longer to read (V = 152k).
"""
_UNIT = 2.0**44
"""Integer weight of probability 1. V < 2**19 of them stay below 2**63; a token under 2**-44 of the
likeliest is never drawn.
"""
_NUM_CANDIDATES = 64
"""Tokens tried for top_p before the whole row is looked at. Half misses more rows, double costs
every row more.
"""
_NUM_BINS = 1 << 16
"""Bins of logits for top_p, by their upper 16 bits: 128 to a factor of two, so that one bin holds
few of a row's tokens.
"""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Settings of the rows drawn together, each [R, 1]."""

    temperature: Tensor
    top_k: Tensor
    """int64; only rows that have one are drawn by draw_top_k()."""
    top_p: Tensor
    min_p: Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest id of the greatest logit, [R] int64, and whether each row is sound, [R]
    bool.

    A row with NaN or +inf, or with nothing but -inf, is not sound and its id means nothing.
    """
    blocks = _blocks(logits)
    # reads memory at full speed; torch.argmax over V takes 6 times as long on a CPU
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1, keepdim=True)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1)
    ids = block.squeeze(1) * _BLOCK + inside.argmax(-1)
    return ids, maxima.amax(-1).isfinite()


def draw(logits: Tensor, settings: DrawSettings, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by temperature and min_p from the whole vocabulary, in order of ids; returns as argmax()
    does.
    """
    shares = _shares(logits, settings)
    floor = settings.min_p.to(torch.float32) * shares.amax(-1, keepdim=True)
    weights = _weights(torch.where(shares < floor, 0.0, shares))
    return _pick(weights, uniforms).squeeze(1), ~shares[:, 0].isnan()


def draw_top_k(
    logits: Tensor, settings: DrawSettings, k: int, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from the top_k likeliest, of which top_p and min_p keep some. k: the largest top_k of
    the rows.
    """
    values, ids = top(logits, k)
    temperature = settings.temperature.to(torch.float32)
    shares = ((values - values[:, :1]) / temperature).exp()
    shares = torch.where(torch.arange(k, device=ids.device) < settings.top_k, shares, 0.0)
    weights = _weights(shares)
    kept = _keep(shares, weights, weights.sum(-1, keepdim=True), settings)
    places = _pick(torch.where(kept, weights, 0), uniforms)
    return ids.gather(1, places).squeeze(1), _blocks(logits).amax((1, 2)).isfinite()


def draw_top_p(logits: Tensor, settings: DrawSettings, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the likeliest tokens that reach top_p together, of which min_p keeps some, in order
    of ids.

    A few candidates are enough for most rows; whether they are is asked of the device, which waits
    for it.
    """
    shares = _shares(logits, settings)
    weights = _weights(shares)
    total = weights.sum(-1, keepdim=True)
    is_sound = ~shares[:, 0].isnan()
    ids = top(logits, min(_NUM_CANDIDATES, logits.shape[1]))[1]
    candidates = weights.gather(1, ids)
    kept = _keep(shares.gather(1, ids), candidates, total, settings)
    if ids.shape[1] == logits.shape[1] or not bool(kept[:, -1].any()):
        ids, order = ids.sort(-1)
        places = _pick(torch.where(kept, candidates, 0).gather(1, order), uniforms)
        return ids.gather(1, places).squeeze(1), is_sound
    limits = settings.top_p * total.to(torch.float64)
    floor = settings.min_p.to(torch.float32) * shares.amax(-1, keepdim=True)
    mask = torch.stack([_nucleus(x, w, p) for x, w, p in zip(logits, weights, limits, strict=True)])
    weights = torch.where(mask & (shares >= floor), weights, 0)
    return _pick(weights, uniforms).squeeze(1), is_sound


def top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k greatest of each row and their ids, [R, k] each, greatest first, equal ones by
    lowest id.
    """
    vocab = values.shape[1]
    if k * _BLOCK * 2 <= vocab:
        # The k best tokens are in the k blocks with the best maxima: each better block holds a
        # better token.
        blocks = _blocks(values)
        chosen = _key(blocks.amax(-1)).topk(k, sorted=False).indices.sort(-1).values
        inside = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1)
        places = _places(inside, k)
        ids = chosen.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
    else:
        ids = _places(values, k)
    return values.gather(1, ids), ids


def _places(values: Tensor, k: int) -> Tensor:
    key = _key(values)
    if k == values.shape[1]:
        return key.argsort(-1, descending=True)
    return key.topk(k, sorted=True).indices


def _nucleus(logits: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """Mark the tokens [V] of one row before which, by falling logit, less than `limit` [1] of
    weight stands.

    Sorts only the bin of logits in which the limit falls: sorting 152k logits takes 11 ms on a CPU,
    this 1.
    """
    bins = (_NUM_BINS // 2 - 1) - (_ordered(logits) >> 16).to(torch.int64)  # greatest logits first
    # exact: integers below 2**53
    sums = torch.bincount(bins, weights.to(torch.float64), _NUM_BINS).cumsum(0)
    last = torch.searchsorted(sums, limit).clamp(max=_NUM_BINS - 1)
    ids = (bins == last).nonzero().squeeze(1)
    ids = ids[logits[ids].argsort(descending=True, stable=True)]
    before = weights[ids].cumsum(0) - weights[ids]
    kept = bins < last
    kept[ids] = before + torch.where(kept, weights, 0).sum() < limit
    return kept


def _key(values: Tensor) -> Tensor:
    """Map floats [R, N] to int64 so that a greater value, or an equal one further left, has the
    greater key.
    """
    place = torch.arange(values.shape[1], device=values.device)
    return (_ordered(values).to(torch.int64) << 32) - place


def _ordered(values: Tensor) -> Tensor:
    """Map floats to int32 in the same order."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count downwards


def _blocks(logits: Tensor) -> Tensor:
    rest = -logits.shape[1] % _BLOCK
    if rest:
        logits = pad(logits, (0, rest), value=float("-inf"))
    return logits.view(logits.shape[0], -1, _BLOCK)


def _shares(logits: Tensor, settings: DrawSettings) -> Tensor:
    return (logits / settings.temperature.to(torch.float32)).softmax(-1)


def _weights(shares: Tensor) -> Tensor:
    return (shares * _UNIT).to(torch.int64)


def _keep(shares: Tensor, weights: Tensor, total: Tensor, settings: DrawSettings) -> Tensor:
    """Mark the candidates [R, K], likeliest first, that top_p and min_p keep: always the first."""
    before = weights.cumsum(-1) - weights
    kept = before.to(torch.float64) < settings.top_p * total.to(torch.float64)
    kept &= shares >= settings.min_p.to(torch.float32) * shares[:, :1]
    kept[:, 0] = True
    return kept


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first place [R, 1] whose running sum of weights exceeds uniform * total.

    A uniform number is at most 1 - 2**-53, so in float64 the product stays below the total.
    """
    sums = weights.cumsum(-1)
    target = (uniforms * sums[:, -1:].to(torch.float64)).to(torch.int64)
    places = torch.searchsorted(sums, target, right=True)
    return places.clamp(max=weights.shape[1] - 1)  # rows that are not sound may point anywhere
