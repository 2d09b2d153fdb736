"""Whether a waiting sequence should wait for what a running one computes. Token ids only."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from freetoken.engine.request import Sequence


def stands_behind(
    sequence: Sequence, running: Seq[Sequence], cached_tokens: int, page_tokens: int
) -> bool:
    """Find a running prefill that will soon share the page after `cached_tokens`; note it and how
    far it is worth waiting for, so that the next look costs nothing.
    """
    sequence.behind = None
    end = cached_tokens + page_tokens
    if end >= len(sequence.tokens):
        return False
    wanted = sequence.tokens[:end]
    for first in running:
        is_early = first.finish is None and first.computed < end <= first.prefill_end
        if is_early and first.tokens[:end] == wanted:
            most = min(first.prefill_end, len(sequence.tokens) - 1)  # one is left to compute
            sequence.behind = first
            sequence.behind_tokens = _count_equal(
                sequence.tokens, first.tokens, end, most, page_tokens
            )
            return True
    return False


def _count_equal(a: list[int], b: list[int], known: int, most: int, page_tokens: int) -> int:
    """Count the tokens that both begin with, in whole pages; `known` or more, at most `most`.

    By halving: slices compare several times faster than a loop over tokens.
    """
    low, high = known // page_tokens, most // page_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        start, end = low * page_tokens, middle * page_tokens
        if a[start:end] == b[start:end]:
            low = middle
        else:
            high = middle
    return low * page_tokens
