"""Writing a step's keys and values into their slots of the paged KV memory."""

from __future__ import annotations

from torch import Tensor


def reference(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Copy row by row."""
    for row, slot in enumerate(slots.tolist()):
        k_pool[slot] = k[row]
        v_pool[slot] = v[row]


def kv_store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write each token's key and value heads to its slot, in place.

    k, v            [tokens, kv_heads, head_dim]
    k_pool, v_pool  [num_slots, kv_heads, head_dim]; changed at `slots` only
    slots           [tokens] int64, all different
    Reference: `reference`, exact.
    """
    if k.shape[1:] != k_pool.shape[1:] or slots.shape[0] != k.shape[0]:
        raise ValueError(
            f"expected keys of {tuple(k_pool.shape[1:])} and a slot each, got {tuple(k.shape)}"
        )
    k_pool.index_copy_(0, slots, k.to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v.to(v_pool.dtype))
