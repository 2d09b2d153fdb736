"""Decode attention over paged KV."""

from __future__ import annotations

import pytest
import torch

from freetoken.native import Attention, Native, NativeError, Type

PAGE_TOKENS = 16


class Paged:
    """Random paged KV for sequences of the given lengths, pages handed out in a shuffled order."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        num_heads, kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
        pages = [-(-length // PAGE_TOKENS) for length in lengths]
        order = torch.randperm(sum(pages) + 3, generator=generator)
        slots = len(order) * PAGE_TOKENS
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for row, count in enumerate(pages):
            self.table[row, :count] = order[sum(pages[:row]) :][:count]
        self.q = torch.randn(len(lengths), num_heads, head_dim, generator=generator) * 2
        self.keys = torch.randn(slots, kv_heads, head_dim, generator=generator).to(dtype)
        self.values = torch.randn(slots, kv_heads, head_dim, generator=generator).to(dtype)

    def row(self, index: int) -> Paged:
        """The same KV, one sequence only."""
        out = object.__new__(Paged)
        out.keys, out.values = self.keys, self.values
        one = slice(index, index + 1)
        out.q, out.table, out.lengths = (
            self.q[one].clone(),
            self.table[one].clone(),
            self.lengths[one],
        )
        return out

    def run(self, native: Native, window: int = 0) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"))
        call = Attention(
            type=Type.BF16 if self.keys.dtype == torch.bfloat16 else Type.F32,
            heads=self.q.shape[1],
            kv_heads=self.keys.shape[1],
            head_dim=self.q.shape[2],
            page_tokens=PAGE_TOKENS,
            window=window,
            sequences=self.q.shape[0],
            table_columns=self.table.shape[1],
            slots=self.keys.shape[0],
            scale=self.q.shape[2] ** -0.5,
            q=self.q.data_ptr(),
            keys=self.keys.data_ptr(),
            values=self.values.data_ptr(),
            page_table=self.table.data_ptr(),
            kv_lens=self.lengths.data_ptr(),
            out=out.data_ptr(),
        )
        native.attention(call)
        return out

    def reference(self, window: int = 0) -> torch.Tensor:
        """Gather the keys of one sequence and take a plain softmax in float64."""
        outs = []
        group = self.q.shape[1] // self.keys.shape[1]
        for q, table, length in zip(self.q, self.table, self.lengths, strict=True):
            positions = torch.arange(int(length))[-window if window else 0 :]
            slots = table[positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS
            keys = self.keys[slots].double().repeat_interleave(group, dim=1)
            values = self.values[slots].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,thd->ht", q.double(), keys) * self.q.shape[2] ** -0.5
            outs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
        return torch.stack(outs).float()


HEADS = [(9, 3, 64), (4, 4, 128), (16, 2, 80), (7, 1, 20), (2, 1, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("heads", HEADS, ids="heads={0[0]}-kv={0[1]}-dim={0[2]}".format)
@pytest.mark.parametrize("window", [0, 100], ids="window={}".format)
def test_attention_matches_float64(
    native: Native, heads: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    """Lost last page, wrong group of heads, a window off by one, pieces joined with wrong
    weights.
    """
    paged = Paged([1, 16, 17, 127, 128, 129, 700], heads, dtype)
    torch.testing.assert_close(
        paged.run(native, window), paged.reference(window), rtol=1e-5, atol=1e-5
    )


def test_attention_of_a_sequence_is_the_same_alone(native: Native) -> None:
    """Pieces cut by the batch instead of by the sequence."""
    paged = Paged([300, 5, 129], (9, 3, 64), torch.float32)
    together = paged.run(native)
    for index in range(3):
        assert torch.equal(paged.row(index).run(native)[0], together[index])


def test_attention_without_sequences_does_nothing(native: Native) -> None:
    """A step of prefills only."""
    paged = Paged([40], (4, 2, 16), torch.float32)
    paged.q, paged.table, paged.lengths = paged.q[:0], paged.table[:0], paged.lengths[:0]
    assert paged.run(native).shape == (0, 4, 16)


def test_attention_with_page_out_of_range_is_refused(native: Native) -> None:
    """A page table bug must not read foreign memory."""
    paged = Paged([40], (4, 2, 16), torch.float32)
    paged.table[0, 1] = 1000
    with pytest.raises(NativeError, match="got 1000 in sequence 0"):
        paged.run(native)


def test_attention_longer_than_its_table_is_refused(native: Native) -> None:
    """A sequence that grew without getting a page."""
    paged = Paged([40], (4, 2, 16), torch.float32)
    paged.lengths[0] = 49
    with pytest.raises(NativeError, match=r"kv_lens\[0\] in \[1, 48\], got 49"):
        paged.run(native)
