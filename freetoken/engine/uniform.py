"""The random numbers of sampling: a pure function of a request's seed and a token's position.

No state and no device: the same seed and position give the same number on every machine, in any
batch, after any preemption. The hash is splitmix64 (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, OOPSLA 2014). The seed is mixed first, so that streams of
neighbouring seeds are unrelated; the position then counts in steps of the golden ratio, as
splitmix64 does itself.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), a multiple of 2**-53; seed and position count modulo 2**64."""
    start = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((start + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
