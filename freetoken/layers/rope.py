"""Rotary frequencies: which angle each pair of a head turns by at a position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.rope import angles


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `dim` elements of each head, half-split pairs."""

    theta: float
    dim: int
    linear_factor: float = 1.0
    """Positions are divided by it."""
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] = ()
    """dim / 2 numbers that the frequencies are divided by, as GGUF bakes scaling; empty: none."""
    attention_scale: float = 1.0

    def frequencies(self) -> Tensor:
        """Compute the angle a position, [dim / 2] float32."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        frequencies = 1.0 / (self.theta**steps) / self.linear_factor
        if self.llama3 is not None:
            frequencies = _stretched(frequencies, self.llama3)
        if self.divisors:
            frequencies = frequencies / torch.tensor(self.divisors, dtype=torch.float32)
        return frequencies


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Apply Llama 3.1's scaling. Source: arXiv 2407.21783 and its published code."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class RopeAngles:
    """Cosines and sines of a step's positions, shared by all layers with the same `Rope`."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self._frequencies = rope.frequencies().to(device)
        self._attention_scale = rope.attention_scale

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [tokens, dim / 2] float32."""
        return angles(positions, self._frequencies, self._attention_scale)
