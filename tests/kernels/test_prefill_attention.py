"""prefill_attention against its reference: sequences, cached prefixes, windows, sinks, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from freetoken.kernels import prefill_attention as attention
from freetoken.kernels.triton_import import INTERPRETED
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import assert_close, poisoned

# The interpreter keeps bf16 as integers and multiplies those: fp16 stands in for it there.
DTYPES = (
    [torch.float32, torch.float16]
    if INTERPRETED
    else [torch.float32, torch.float16, torch.bfloat16]
)


@dataclass
class Case:
    """Random queries inside a wider qkv tensor, keys on shuffled pages among slots full of NaN."""

    rows: list[int]
    cached: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 16
    window: int | None = None
    sinks: bool = False
    spare_rows: int = 3
    first_page: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        generator = torch.Generator(device=self.device).manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(
                shape, generator=generator, device=self.device, dtype=torch.float32
            ).to(self.dtype)

        lens = [rows + cached for rows, cached in zip(self.rows, self.cached, strict=True)]
        pages = [-(-length // self.page_tokens) for length in lens]
        total = sum(pages)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1)) + self.first_page
        self.page_table = torch.zeros(len(lens), max(pages, default=0) + 1, dtype=torch.int32)
        slots = (self.first_page + total + 1) * self.page_tokens
        self.k = torch.empty(
            slots, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device
        )
        self.v = torch.empty_like(self.k)
        low = self.first_page * self.page_tokens
        self.k[low:], self.v[low:] = torch.nan, torch.nan
        self.k[: self.page_tokens], self.v[: self.page_tokens] = torch.nan, torch.nan
        start = 0
        for sequence, (length, count) in enumerate(zip(lens, pages, strict=True)):
            own = order[start : start + count]
            self.page_table[sequence, :count] = own
            keys = torch.arange(length)
            places = (
                own[keys // self.page_tokens] * self.page_tokens + keys % self.page_tokens
            ).to(self.device)
            self.k[places] = drawn(length, self.kv_heads, self.head_dim)
            self.v[places] = drawn(length, self.kv_heads, self.head_dim)
            start += count
        self.page_table = self.page_table.to(self.device)
        self.tokens = sum(self.rows)
        qkv = drawn(self.tokens + self.spare_rows, self.heads + 2 * self.kv_heads, self.head_dim)
        self.q = qkv[:, : self.heads]
        self.scale = self.head_dim**-0.5
        ends = (
            torch.tensor(self.rows, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
        )
        self.runs = attention.PagedRuns(
            ends,
            torch.tensor(lens, dtype=torch.int32, device=self.device),
            self.page_table,
            self.page_tokens,
        )
        self.sink = drawn(self.heads) if self.sinks else None

    def reference(self) -> Tensor:
        """Return the rows of the runs."""
        return attention.reference(
            self.q, self.k, self.v, self.runs, self.scale, window=self.window, sinks=self.sink
        )[: self.tokens]

    def run(self, config: attention.AttentionConfig | None = None) -> Tensor:
        """Return all rows; those outside the runs are still poisoned."""
        out = poisoned(self.q.shape, self.dtype, self.q.device)
        return attention.prefill_attention(
            self.q,
            self.k,
            self.v,
            self.runs,
            self.scale,
            out,
            window=self.window,
            sinks=self.sink,
            config=config,
        )


SHAPES = {
    "one-row": {"rows": [1], "cached": [0]},
    "one-row-cached": {"rows": [1], "cached": [40]},
    "ragged": {"rows": [37, 1, 70], "cached": [0, 33, 19]},
    "empty-run": {"rows": [0, 5, 0], "cached": [7, 16, 0]},
    "whole-pages": {"rows": [32, 64], "cached": [32, 0]},
    "long-prefix": {"rows": [3], "cached": [150]},
    "pages-of-64": {"rows": [50, 9], "cached": [70, 1], "page_tokens": 64},
    "no-group": {"rows": [20], "cached": [5], "kv_heads": 4},
    "window-below-tile": {"rows": [75], "cached": [30], "window": 5},
    "window-over-tiles": {"rows": [40, 90], "cached": [100, 0], "window": 50},
    "window-longer-than-keys": {"rows": [40], "cached": [3], "window": 1000},
    "window-of-one": {"rows": [40], "cached": [50], "window": 1},
    "sinks": {"rows": [33, 2], "cached": [10, 60], "sinks": True},
    "window-and-sinks": {"rows": [70], "cached": [64], "sinks": True, "window": 20},
    "head-dim-64": {"rows": [17], "cached": [18], "head_dim": 64},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_prefill_attention_named_shape(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """A row attends to a key it must not see, misses one, or reads memory that nobody wrote."""
    case = Case(**SHAPES[name], dtype=dtype, device=device)
    out = case.run()
    assert_close(out[: case.tokens], case.reference())
    assert out[case.tokens :].isnan().all()


def test_prefill_attention_tile_wider_than_block(device: torch.device) -> None:
    """Tiles of keys wider than the block of rows leave the diagonal's mask out."""
    case = Case([45, 3], [21, 40], device=device)
    for block_m, block_n in ((16, 64), (64, 16)):
        out = case.run(attention.AttentionConfig(block_m, block_n, 4, 1))
        assert_close(out[: case.tokens], case.reference())


def test_prefill_attention_neighbours_change_nothing(device: torch.device) -> None:
    """A row's bits depend on the sequences beside it."""
    together = Case([37, 21], [5, 40], device=device)
    out = together.run()
    runs = together.runs
    alone = attention.PagedRuns(
        runs.q_ends[1:] - runs.q_ends[:1], runs.kv_lens[1:], runs.page_table[1:], runs.page_tokens
    )
    q = together.q[37:58]
    single = attention.prefill_attention(
        q, together.k, together.v, alone, together.scale, poisoned(q.shape, q.dtype, q.device)
    )
    assert torch.equal(single, out[37:58])


def test_prefill_attention_nothing_to_do(device: torch.device) -> None:
    """A step without rows launches a grid of zero programs."""
    case = Case([0], [9], spare_rows=0, device=device)
    assert case.run().shape == (0, 4, 16)


def test_prefill_attention_wrong_shapes_refused(device: torch.device) -> None:
    """Heads that share no whole group, or a head_dim no tile has, read foreign memory."""
    case = Case([4], [0], device=device)
    for q in (case.q[:, :3], case.q[:, :, :8]):
        with pytest.raises(ValueError, match="expected heads"):
            attention.prefill_attention(q, case.k, case.v, case.runs, 1.0, torch.empty_like(q))
    with pytest.raises(ValueError, match="expected unit strides"):
        attention.prefill_attention(case.q, case.k, case.v, case.runs, 1.0, case.q[:2])
    with pytest.raises(ValueError, match="above 0"):
        attention.prefill_attention(
            case.q, case.k, case.v, case.runs, 1.0, torch.empty_like(case.q), window=0
        )


FULL = {
    "qwen3-2067": {"rows": [2067], "cached": [0]},
    "qwen3-83": {"rows": [83], "cached": [0]},
    "chunk-of-30k": {"rows": [2048], "cached": [30001]},
    "five-sequences": {"rows": [1, 700, 0, 83, 1301], "cached": [5000, 0, 16, 4096, 1]},
    "window-4096": {"rows": [3000], "cached": [6000], "window": 4096},
    "sinks-window-128": {
        "rows": [1500, 40],
        "cached": [0, 900],
        "window": 128,
        "sinks": True,
        "head_dim": 64,
    },
    "head-dim-256": {"rows": [515], "cached": [1000], "heads": 8, "head_dim": 256},
    "smollm2": {"rows": [999], "cached": [50], "heads": 9, "kv_heads": 3, "head_dim": 64},
    "pages-of-64": {"rows": [1000], "cached": [777], "page_tokens": 64},
}


@pytest.mark.gpu
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in FULL]
    + [
        ("five-sequences", torch.float16),
        ("five-sequences", torch.float32),
        ("window-4096", torch.float32),
    ],
    ids=str,
)
def test_prefill_attention_full_size(name: str, dtype: torch.dtype) -> None:
    """Compiled tiles, masks or pipelines differ from the interpreter's."""
    shape = {"heads": 32, "kv_heads": 4, "head_dim": 128} | FULL[name]
    case = Case(**shape, dtype=dtype, device=torch.device("cuda"))
    assert_close(case.run()[: case.tokens], case.reference())


@pytest.mark.gpu
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    "config",
    [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2),
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (32, 64, 4, 2),
    ],
    ids=str,
)  # fmt: skip
def test_prefill_attention_swept_config(config: tuple[int, int, int, int]) -> None:
    """A configuration that the bench may choose computes something else."""
    case = Case(
        [300, 77],
        [513, 0],
        heads=32,
        kv_heads=4,
        head_dim=128,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    out = case.run(attention.AttentionConfig(*config))
    assert_close(out[: case.tokens], case.reference())


@pytest.mark.gpu
@pytest.mark.limit(60)
def test_prefill_attention_slots_above_2_31_elements() -> None:
    """A slot's address overflows 32 bits: 2^31 elements are 4.2 million slots of 4 x 128."""
    case = Case(
        [130], [70], heads=32, kv_heads=4, head_dim=128, first_page=2**31 // 512 // 16 + 5,
        dtype=torch.bfloat16, device=torch.device("cuda"),
    )  # fmt: skip
    assert_close(case.run()[: case.tokens], case.reference())
