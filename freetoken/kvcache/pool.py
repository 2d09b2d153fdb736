"""The KV tensors: one pair a layer, cut in pages. Knows no requests and no page owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KvPool:
    """Owns the key and value memory of all layers; the decoder is the only writer.

    k, v  a layer each: [num_pages * page_tokens, kv_heads, head_dim]; slot = page * page_tokens +
          offset
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate for `layers` of (kv_heads, head_dim)."""
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.dtype = dtype
        # Zeros and not empty: on a CPU the system hands out zero pages when they are first touched,
        # so it costs nothing.
        shapes = [(num_pages * page_tokens, kv_heads, head_dim) for kv_heads, head_dim in layers]
        self.k: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.v: list[Tensor] = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def num_slots(self) -> int:
        """Token positions that fit."""
        return self.num_pages * self.page_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(tensor.nbytes for tensor in (*self.k, *self.v))


def bytes_per_token(layers: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over `layers` of (kv_heads, head_dim)."""
    return sum(2 * kv_heads * head_dim for kv_heads, head_dim in layers) * dtype.itemsize
