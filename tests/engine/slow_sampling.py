"""Sampling once more, slowly: numpy in double precision, one row, one full sort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freetoken.types import SamplingParams

Row = NDArray[np.float64]


def adjusted(raw: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Row:
    """Apply penalties and bias token by token."""
    logits = raw.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        times = list(output).count(token)
        logits[token] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


def distribution(logits: Row, params: SamplingParams) -> Row:
    """Return each token's probability of being drawn."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if params.temperature == 0:
        return np.eye(len(logits))[order[0]]
    z = logits / params.temperature
    p = np.exp(z - z.max())
    if 0 < params.top_k < len(logits):
        for token in order[params.top_k :]:
            p[token] = 0
    p /= p.sum()
    before, kept = 0.0, []
    for token in order:
        if kept and before >= params.top_p:
            break
        kept.append(token)
        before += p[token]
    kept = [t for t in kept if p[t] >= params.min_p * p[order[0]] * (1 - 1e-7)]
    out = np.zeros(len(logits))
    out[kept] = p[kept]
    return out / out.sum()
