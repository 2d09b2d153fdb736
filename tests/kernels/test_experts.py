"""router_gate, expert_up and expert_down against their references, and as one chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.kernels import expert_down, expert_up, router_gate
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import assert_close, poisoned

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = [  # batch, hidden, experts, top_k, inter
    pytest.param(1, 64, 8, 2, 96, id="one-token"),
    pytest.param(3, 80, 9, 3, 33, id="ragged"),
    pytest.param(1, 96, 8, 8, 16, id="all-experts"),
    pytest.param(8, 64, 4, 1, 7, id="shared-experts"),
]
GPU_SHAPES = [
    pytest.param(1, 2048, 128, 8, 768, id="qwen3"),
    pytest.param(8, 2048, 128, 8, 768, id="qwen3-batch-8"),
    pytest.param(2, 576, 8, 2, 1536, id="smollm2-moe"),
    pytest.param(2, 4096, 8, 2, 14336, id="mixtral"),
]


class Bank:
    """Random experts, and copies of them at odd places behind pointer tables.

    A kernel that computes an address from a stacked tensor shows.
    """

    def __init__(self, up: Tensor, down: Tensor) -> None:
        self.up, self.down = up, down
        self.up_copies = [expert.clone() for expert in up]
        self.down_copies = [expert.clone() for expert in reversed(down)][::-1]
        self.up_table = torch.tensor([c.data_ptr() for c in self.up_copies], device=up.device)
        self.down_table = torch.tensor([c.data_ptr() for c in self.down_copies], device=up.device)


class Case:
    """A step's inputs and its buffers full of poison."""

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        batch, hidden, experts, self.top_k, inter = shape
        generator = torch.Generator().manual_seed(5)

        def drawn(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=generator) * scale).to(device, dtype)

        self.h, self.norm = drawn(batch, hidden, scale=2.0), drawn(hidden)
        self.router = drawn(experts, hidden, scale=hidden**-0.5)
        self.bank = Bank(
            drawn(experts, 2 * inter, hidden, scale=hidden**-0.5),
            drawn(experts, hidden, inter, scale=inter**-0.5),
        )
        self.ids = poisoned((batch, self.top_k), torch.int32, device)
        self.weights = poisoned((batch, self.top_k), torch.float32, device)
        self.logits = poisoned((batch, experts), torch.float32, device)
        self.counters = torch.zeros(8, dtype=torch.int32, device=device)
        self.inner = poisoned((batch * self.top_k, inter), dtype, device)

    def route(self, *, renormalize: bool = True) -> None:
        """Fill ids and weights."""
        router_gate.router_gate(
            self.h,
            self.norm,
            self.router,
            EPS,
            renormalize=renormalize,
            ids=self.ids,
            weights=self.weights,
            logits=self.logits,
            counters=self.counters,
        )


def _check_chain(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(shape, dtype, device)
    ids, weights = router_gate.reference(
        case.h, case.norm, case.router, EPS, case.top_k, renormalize=True
    )
    case.route()
    assert torch.equal(case.ids.long(), ids)
    torch.testing.assert_close(case.weights, weights, atol=1e-5, rtol=1e-4)
    assert not case.counters.any()
    expert_up.expert_up(case.h, case.norm, EPS, case.ids, case.bank.up_table, out=case.inner)
    assert_close(case.inner, expert_up.reference(case.h, case.norm, EPS, ids, case.bank.up))
    expected = expert_down.reference(case.inner, ids, weights, case.bank.down, case.h)
    expert_down.expert_down(case.inner, case.ids, case.weights, case.bank.down_table, case.h)
    assert_close(case.h, expected)


@pytest.mark.parametrize("shape", [pytest.param(p.values, id=p.id) for p in SHAPES])
@DTYPES
def test_expert_chain_matches_references(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Caught: a wrong expert's rows, a weight of another rank, ragged ends, an unwritten output, a counter left standing."""
    _check_chain(shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.limit(120)
@pytest.mark.parametrize("shape", [pytest.param(p.values, id=p.id) for p in GPU_SHAPES])
def test_expert_chain_full_size(
    shape: tuple[int, int, int, int, int], device: torch.device
) -> None:
    """Caught: what only shows compiled, at the sizes that are served."""
    _check_chain(shape, torch.bfloat16, device)


@pytest.mark.parametrize("experts", [5, 64, 130])
def test_router_gate_ties_go_to_lowest(experts: int, device: torch.device) -> None:
    """Caught: texts that differ between devices because equal experts are taken in another order."""
    case = Case((2, 32, experts, 4, 8), torch.float32, device)
    case.router[:] = case.router[:1]
    case.route(renormalize=False)
    assert case.ids.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(case.weights.cpu(), torch.full((2, 4), 1 / experts))


def test_router_gate_nan_gives_valid_ids(device: torch.device) -> None:
    """Caught: a NaN in one sequence that makes the next kernel follow a wild address."""
    case = Case((2, 32, 16, 4, 8), torch.float32, device)
    case.h[0, 3] = float("nan")
    case.route()
    assert case.ids[0].tolist() == [0, 1, 2, 3]
    assert bool(case.weights[1].isfinite().all())


def test_router_gate_twice_same_result(device: torch.device) -> None:
    """Caught: a counter that is not reset, so that the second launch chooses early or never."""
    case = Case((2, 48, 12, 3, 8), torch.float32, device)
    case.route()
    first = case.ids.clone()
    case.ids.fill_(-1)
    case.route()
    assert torch.equal(case.ids, first)


def test_expert_chain_alone_and_in_batch_same_bits(device: torch.device) -> None:
    """Caught: a token's result that depends on its neighbours' experts."""
    case = Case((3, 64, 4, 2, 12), torch.bfloat16, device)
    case.route()
    expert_up.expert_up(case.h, case.norm, EPS, case.ids, case.bank.up_table, out=case.inner)
    together = expert_down.expert_down(
        case.inner, case.ids, case.weights, case.bank.down_table, case.h.clone()
    )
    for row in range(3):
        ids, weights, h = (
            case.ids[row : row + 1],
            case.weights[row : row + 1],
            case.h[row : row + 1].clone(),
        )
        inner = expert_up.expert_up(
            h, case.norm, EPS, ids, case.bank.up_table, out=torch.empty_like(case.inner[:2])
        )
        assert torch.equal(
            expert_down.expert_down(inner, ids, weights, case.bank.down_table, h)[0], together[row]
        )


def test_expert_up_wrong_table_refused(device: torch.device) -> None:
    """Caught: addresses cut to 32 bits."""
    case = Case((1, 32, 4, 2, 8), torch.float32, device)
    case.route()
    with pytest.raises(ValueError, match="int64 addresses"):
        expert_up.expert_up(
            case.h, case.norm, EPS, case.ids, case.bank.up_table.int(), out=case.inner
        )
