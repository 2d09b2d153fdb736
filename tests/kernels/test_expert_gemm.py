"""The grouped products against their references, alone and as a chain from sort to combine_rows."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from torch import Tensor

from bench.kernels_prefill import DOWN_CONFIGS, UP_CONFIGS
from freetoken.kernels import combine_rows, expert_gemm, expert_sort
from freetoken.kernels.triton_import import INTERPRETED
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.test_expert_sort import drawn_ids
from tests.kernels.test_experts import Bank
from tests.kernels.tolerance import assert_close, poisoned

# The interpreter keeps bf16 as integers and multiplies those: fp16 stands in for it there.
DTYPES = (
    [torch.float32, torch.float16]
    if INTERPRETED
    else [torch.float32, torch.float16, torch.bfloat16]
)


class Case(Bank):
    """Random experts at scattered addresses, tokens inside a wider tensor, poisoned outputs."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_m: int = 0,
    ) -> None:
        tokens, self.top_k, self.experts, hidden, inter = shape
        generator = torch.Generator(device=device).manual_seed(5)

        def drawn(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=generator, device=device) * scale).to(dtype)

        self.x = drawn(tokens, hidden + 16)[:, :hidden]
        super().__init__(
            drawn(self.experts, 2 * inter, hidden, scale=hidden**-0.5),
            drawn(self.experts, hidden, inter, scale=inter**-0.5),
        )
        self.ids = drawn_ids(tokens, self.top_k, self.experts, skew=0.3).to(device)
        self.weights = torch.rand(tokens, self.top_k, generator=generator, device=device)
        pairs = tokens * self.top_k
        self.block_m = block_m or expert_gemm.choose_block_m(pairs, self.experts)
        self.act = poisoned((pairs, inter), dtype, device)
        self.rows = poisoned((pairs, hidden), dtype, device)

    def sort(self) -> expert_sort.SortedPairs:
        """Sort the pairs."""
        pairs = expert_sort.empty_pairs(self.ids.numel(), self.experts, self.block_m, self.x.device)
        return expert_sort.expert_sort(self.ids, self.experts, pairs)

    def check(
        self, up: expert_gemm.GemmConfig | None = None, down: expert_gemm.GemmConfig | None = None
    ) -> None:
        """Run both products and compare act in sorted order and rows in the order of pairs."""
        pairs = self.sort()
        expert_gemm.expert_gemm_up(
            self.x, pairs, self.up_table, self.act, top_k=self.top_k, config=up
        )
        expert_gemm.expert_gemm_down(self.act, pairs, self.down_table, self.rows, config=down)
        act, rows = grouped_reference(self)
        used = pairs.order[: int(pairs.ends[-1])].long()
        assert_close(self.act[: used.shape[0]], act[used])
        assert_close(self.rows[used], rows[used])
        left = torch.ones(self.ids.numel(), dtype=torch.bool, device=self.x.device).index_fill_(
            0, used, False
        )
        assert self.rows[left].isnan().all()


def grouped_reference(case: Case) -> tuple[Tensor, Tensor]:
    """Do what the reference does, an expert at a time: fast enough for full size."""
    act, rows = torch.full_like(case.act, torch.nan), torch.full_like(case.rows, torch.nan)
    flat = case.ids.reshape(-1)
    for expert in range(case.experts):
        pairs = (flat == expert).nonzero()[:, 0]
        gate, up = (case.x[pairs // case.top_k].float() @ case.up[expert].float().t()).chunk(
            2, dim=-1
        )
        act[pairs] = (gate * torch.sigmoid(gate) * up).to(act.dtype)
        rows[pairs] = (act[pairs].float() @ case.down[expert].float().t()).to(rows.dtype)
    return act, rows


CASES = [  # tokens, top_k, experts, hidden, inter
    pytest.param((1, 2, 8, 64, 32), id="one-token"),
    pytest.param((37, 2, 5, 48, 40), id="ragged"),
    pytest.param((20, 8, 8, 32, 16), id="all-experts"),
    pytest.param((3, 2, 60, 80, 24), id="more-experts-than-pairs"),
    pytest.param((40, 1, 1, 64, 96), id="one-expert"),
    pytest.param((0, 2, 4, 32, 16), id="empty"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CASES)
def test_expert_gemm_named_shape(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """A row meets another expert's matrix, a foreign token, or a column past the end."""
    case = Case(shape, dtype, device)
    if shape[0] == 0:
        pairs = case.sort()
        tables = case.up_table, case.down_table
        assert expert_gemm.expert_gemm(
            case.x, pairs, *tables, case.act, case.rows, top_k=2
        ).shape == (0, 32)
        return
    case.check()


def test_expert_gemm_references_agree(device: torch.device) -> None:
    """The fast reference of these tests differs from the kernel file's own."""
    case = Case((9, 2, 4, 32, 16), torch.float32, device)
    for fast, plain in zip(
        grouped_reference(case),
        expert_gemm.reference(case.x, case.up, case.down, case.ids),
        strict=True,
    ):
        assert_close(fast, plain)


@pytest.mark.parametrize("block_m", [16, 64], ids=["tile-16", "tile-64"])
def test_expert_gemm_foreign_pairs_left_alone(block_m: int, device: torch.device) -> None:
    """Rows that somebody else computes (id -1) are overwritten."""
    case = Case((30, 3, 6, 32, 24), torch.float32, device, block_m=block_m)
    case.ids[::2, 1] = -1
    case.check()


def test_expert_gemm_neighbours_change_nothing(device: torch.device) -> None:
    """A token's bits depend on which tokens share its tile."""
    case = Case((24, 2, 4, 64, 32), torch.float32, device, block_m=16)
    tables = case.up_table, case.down_table
    together = expert_gemm.expert_gemm(
        case.x, case.sort(), *tables, case.act, case.rows, top_k=2
    ).clone()
    case.x, case.ids = case.x[7:8], case.ids[7:8]
    alone = expert_gemm.expert_gemm(
        case.x, case.sort(), *tables, case.act[:2], case.rows[:2], top_k=2
    )
    assert torch.equal(alone, together[14:16])


def test_expert_gemm_chain_is_the_layer(device: torch.device) -> None:
    """Sort, products and combine together are not the routed feed-forward."""
    case = Case((33, 2, 6, 48, 32), torch.float32, device)
    residual = torch.randn(33, 48, device=device)
    rows = expert_gemm.expert_gemm(
        case.x, case.sort(), case.up_table, case.down_table, case.act, case.rows, top_k=2
    )
    expected = residual + (
        grouped_reference(case)[1].view(33, 2, 48) * case.weights[..., None]
    ).sum(1)
    assert_close(
        combine_rows.combine_rows(rows, case.weights, residual, residual=residual), expected
    )


def test_expert_gemm_wrong_shapes_refused(device: torch.device) -> None:
    """Outputs or tables of another size are read or written past their end."""
    case = Case((5, 2, 4, 32, 16), torch.float32, device)
    pairs = case.sort()
    with pytest.raises(ValueError, match="sorted rows"):
        expert_gemm.expert_gemm_up(case.x, pairs, case.up_table, case.act[:8], top_k=2)
    for table in (case.up_table[:3], case.up_table.int()):
        with pytest.raises(ValueError, match="addresses"):
            expert_gemm.expert_gemm_up(case.x, pairs, table, case.act, top_k=2)
    with pytest.raises(ValueError, match="equal length"):
        expert_gemm.expert_gemm_down(case.act, pairs, case.down_table, case.rows[:4])


def test_pointer_table_points_at_each_matrix(device: torch.device) -> None:
    """A stack's stride in elements is taken for bytes."""
    stack = torch.zeros(5, 6, 8, dtype=torch.float16, device=device)[1:]
    assert expert_gemm.pointer_table(stack).tolist() == [matrix.data_ptr() for matrix in stack]


@pytest.mark.gpu
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(tokens, torch.bfloat16) for tokens in (83, 512, 2067, 8192)] + [(2067, torch.float16)],
    ids=str,
)
def test_expert_gemm_full_size(tokens: int, dtype: torch.dtype) -> None:
    """Compiled tiles differ from the interpreter's at the shape of the main checkpoint."""
    Case((tokens, 8, 128, 2048, 768), dtype, torch.device("cuda")).check()


@pytest.mark.gpu
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    "shape",
    [
        (700, 2, 8, 576, 1536),
        (300, 2, 8, 4096, 14336),
        (61, 2, 8, 576, 1536),
        (129, 4, 60, 1000, 1408),
    ],
    ids=["smollm2-moe", "mixtral", "smollm2-short", "uneven"],
)
def test_expert_gemm_other_models(shape: tuple[int, int, int, int, int]) -> None:
    """Widths that no tile divides are cut short or read past their end."""
    Case(shape, torch.bfloat16, torch.device("cuda")).check()


@pytest.mark.gpu
@pytest.mark.limit(60)
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_expert_gemm_fp32_tiles(block_m: int) -> None:
    """The slow exact path does not fit shared memory or differs."""
    Case((200, 4, 16, 320, 200), torch.float32, torch.device("cuda"), block_m=block_m).check()


@pytest.mark.gpu
@pytest.mark.limit(120)
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_expert_gemm_swept_configs(block_m: int) -> None:
    """A configuration that the bench may choose computes something else."""
    for up, down in zip_longest(
        UP_CONFIGS[block_m], DOWN_CONFIGS[block_m], fillvalue=(32, 64, 4, 3)
    ):
        case = Case((150, 4, 8, 2048, 768), torch.bfloat16, torch.device("cuda"), block_m=block_m)
        case.check(expert_gemm.GemmConfig(*up), expert_gemm.GemmConfig(*down))


@pytest.mark.gpu
@pytest.mark.limit(60)
def test_expert_gemm_rows_above_2_31_elements() -> None:
    """A row's address overflows 32 bits: 2^31 elements are 1,048,576 rows of 2048."""
    device, count = torch.device("cuda"), 2**20 + 40
    case = Case((40, 1, 2, 2048, 64), torch.bfloat16, device, block_m=64)
    # Only the last tokens are real: their pairs, and so their rows, lie past 2^31 elements.
    ids = torch.full((count, 1), -1, device=device)
    ids[-40:] = case.ids
    x = torch.zeros(count, 2048, dtype=torch.bfloat16, device=device)
    x[-40:] = case.x
    pairs = expert_sort.expert_sort(ids, 2, expert_sort.empty_pairs(count, 2, 64, device))
    act = poisoned((count, 64), torch.bfloat16, device)
    rows = poisoned((count, 2048), torch.bfloat16, device)
    expert_gemm.expert_gemm(x, pairs, case.up_table, case.down_table, act, rows, top_k=1)
    assert_close(rows[-40:], grouped_reference(case)[1])
    assert rows[:-40].isnan().all()
    ones = torch.ones(count, 1, device=device)
    out = combine_rows.combine_rows(rows, ones, torch.empty_like(rows))
    assert torch.equal(out[-40:], rows[-40:])
