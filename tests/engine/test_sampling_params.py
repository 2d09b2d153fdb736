"""What settings mean, asked in one place by both samplers."""

from __future__ import annotations

import pytest

from freetoken.types import SamplingParams


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=9e-6), True),
        (SamplingParams(temperature=1e-5), False),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_k=2), False),
    ],
    ids=["zero", "under", "edge", "one", "two"],
)
def test_settings_that_leave_no_choice_are_greedy(params: SamplingParams, is_greedy: bool) -> None:
    """A draw where the CPU takes the likeliest, or the other way round on a GPU."""
    assert params.is_greedy is is_greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_needs_the_counts(name: str) -> None:
    """A penalty that is never applied because nobody counted."""
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 0.5}).has_penalties
