"""The hash behind seeded sampling."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from freetoken.engine.uniform import _mix, uniform


def test_mix_equals_published_splitmix64() -> None:
    """A wrong constant or shift: the paper's generator gives these for seed 1234567."""
    state, got = 1234567, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        got.append(_mix(state))
    assert got == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_same_seed_and_position_give_same_number() -> None:
    """A reply with a seed could not be had again."""
    assert uniform(7, 3) == uniform(7, 3)
    assert uniform(7, 3) == uniform(7 + 2**64, 3)
    assert len({uniform(s, p) for s in range(-50, 50) for p in range(50)}) == 5000


@pytest.mark.parametrize("axis", ["position", "seed", "diagonal", "antidiagonal", "high-bits"])
def test_numbers_are_spread_evenly(axis: str) -> None:
    """Numbers were uneven along positions of one seed, seeds at one position, or where the two
    change together.
    """
    count, bins = 20000, 100
    draw = {
        "position": lambda i: uniform(42, i),
        "seed": lambda i: uniform(i, 17),
        "diagonal": lambda i: uniform(i, i),
        "antidiagonal": lambda i: uniform(count - i, i),
        "high-bits": lambda i: uniform(i << 44, 0),
    }[axis]
    numbers = [draw(i) for i in range(count)]
    assert all(0 <= x < 1 for x in numbers)
    hits = [0] * bins
    for x in numbers:
        hits[int(x * bins)] += 1
    chi2 = sum((h - count / bins) ** 2 / (count / bins) for h in hits)
    # 99 degrees of freedom: mean 99, deviation 14; 4.5 deviations either way.
    assert 36 < chi2 < 162
    mean = sum(numbers) / count
    products = pairwise(numbers)
    correlation = sum((a - mean) * (b - mean) for a, b in products) / count * 12
    assert abs(correlation) < 4.5 / math.sqrt(count)
