"""Our forward pass against transformers and in other cuts. Tolerance: fp32, 1e-4 on logits."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from freetoken.models.decoder import Decoder
from tests.models.oracle import NEW, Oracle
from tests.models.paged import PAGE_TOKENS, Loop, Sequence

TOLERANCE = 1e-4


def close(ours: Tensor, theirs: Tensor) -> None:
    """Fail unless all logits are finite and within the tolerance."""
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0.0)


def test_prompt_logits_equal_transformers(oracle: Oracle, decoder: Decoder) -> None:
    """Catches any wrong norm, bias, rotation, mask, routing or name map: every position counts."""
    (logits,) = Loop(decoder).step([(Sequence(), oracle.prompt)], every_row=True)
    close(logits, oracle.logits)


def test_greedy_tokens_equal_transformers(oracle: Oracle, decoder: Decoder) -> None:
    """Catches errors of decode steps: wrong position, wrong slot, a window that never moves."""
    assert Loop(decoder).greedy([oracle.prompt], NEW) == [oracle.greedy]


def test_chunked_prefill_equals_whole(oracle: Oracle, decoder: Decoder) -> None:
    """Catches masks that are aligned to the wrong corner when a chunk has keys before it."""
    loop, sequence = Loop(decoder), Sequence()
    cuts = [0, 5, 6, 17, len(oracle.prompt)]
    parts = [
        loop.step([(sequence, oracle.prompt[start:end])], every_row=True)[0]
        for start, end in pairwise(cuts)
    ]
    close(torch.cat(parts), oracle.logits)


def test_one_token_at_a_time_equals_whole(oracle: Oracle, decoder: Decoder) -> None:
    """Catches a decode path that differs from prefill."""
    loop, sequence = Loop(decoder), Sequence()
    close(
        torch.cat([loop.step([(sequence, [token])])[0] for token in oracle.prompt]), oracle.logits
    )


def test_mixed_batch_equals_alone(oracle: Oracle, decoder: Decoder) -> None:
    """Catches rows that see their neighbours: prefill, chunk and decode rows in one step."""
    loop = Loop(decoder)
    prompt = oracle.prompt
    first, second, third, fourth = (Sequence() for _ in range(4))
    loop.step([(first, prompt[:11]), (second, prompt[:23]), (fourth, prompt[3:5])])
    logits = loop.step(
        [(first, prompt[11:12]), (third, prompt[:9]), (second, prompt[23:]), (fourth, prompt[5:9])],
        every_row=True,
    )
    close(logits[0], oracle.logits[11:12])
    close(logits[1], oracle.logits[:9])
    close(logits[2], oracle.logits[23:])
    close(logits[3], oracle.logits_of(prompt[3:9])[2:])


def test_batched_greedy_equals_alone(oracle: Oracle, decoder: Decoder) -> None:
    """Catches a batch whose lengths differ: each text must be what it is alone."""
    prompts = [oracle.prompt, oracle.prompt[:3], oracle.prompt[::-1], [7], oracle.prompt[4:20]]
    together = Loop(decoder).greedy(prompts, NEW)
    assert together == [Loop(decoder).greedy([prompt], NEW)[0] for prompt in prompts]


def test_shared_prefix_pages_equal_cold(oracle: Oracle, decoder: Decoder) -> None:
    """Catches a prefix hit that differs from computing it: two sequences on the same pages."""
    loop, first = Loop(decoder), Sequence()
    loop.step([(first, oracle.prompt)])
    shared = 4 * PAGE_TOKENS
    other = [*oracle.prompt[:shared], 11, 12, 13, 14, 15]
    second = loop.fork(first, shared)
    logits = loop.step([(second, other[shared:]), (first, [9])], every_row=True)
    close(logits[0], oracle.logits_of(other)[shared:])
    close(logits[1], oracle.logits_of([*oracle.prompt, 9])[-1:])


def test_no_sampled_rows_still_write_keys(oracle: Oracle, decoder: Decoder) -> None:
    """Catches a chunk in the middle of a prompt being skipped because nobody wants its logits."""
    loop, sequence = Loop(decoder), Sequence()
    (nothing,) = loop.step([(sequence, oracle.prompt[:-1])], no_row=True)
    assert nothing.shape == (0, decoder.spec.vocab)
    (logits,) = loop.step([(sequence, oracle.prompt[-1:])])
    close(logits, oracle.logits[-1:])
