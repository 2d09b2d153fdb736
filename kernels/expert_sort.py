"""Sort (token, rank) pairs by expert and cut each expert's run into row tiles for a grouped product.

order = stable argsort of ids over the pairs whose expert is in 0 .. experts - 1; other pairs belong to nobody here.
Stays on the device: sizes of the outputs, and of every grid after this one, depend on shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.device_limits import run_options
from freetoken.kernels.triton_import import next_power_of_2, tl, triton

ONE_PASS_PAIRS = 4096
"""Up to here each program counts all pairs by itself. Half: a second launch for 300 tokens; double: 2 us more in each program."""
CHUNK = 128
"""Pairs a program places. Rank within the chunk costs CHUNK^2 comparisons; half doubles the table of counts."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs grouped by expert; pair = token * top_k + rank.

    order    [pairs] int32     pair of each sorted row; rows from ends[-1] on are not written
    ends     [experts] int32   end row of each expert's run; empty runs allowed
    tiles    [3, tiles] int32  expert, first row and end row of each tile of at most block_m rows; expert -1: unused
    counts   [chunks, experts] int32, workspace
    block_m                    rows a tile
    """

    order: Tensor
    ends: Tensor
    tiles: Tensor
    counts: Tensor
    block_m: int


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Count the tiles that the worst split of `pairs` rows over `experts` needs."""
    used = min(pairs, experts)
    return (pairs + used * (block_m - 1)) // block_m


def empty_pairs(pairs: int, experts: int, block_m: int, device: torch.device | str) -> SortedPairs:
    """Allocate the outputs of `expert_sort`, once for a chunk size."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    chunks = -(-pairs // CHUNK) if pairs > ONE_PASS_PAIRS else 1
    return SortedPairs(
        empty(pairs),
        empty(experts),
        empty(3, max_tiles(pairs, experts, block_m)),
        empty(chunks, experts),
        block_m,
    )


def reference(ids: Tensor, experts: int, out: SortedPairs) -> SortedPairs:
    """Sort on the host, expert by expert."""
    flat = ids.reshape(-1).tolist()
    runs = [
        [pair for pair, expert in enumerate(flat) if expert == chosen] for chosen in range(experts)
    ]
    tiles: list[tuple[int, int, int]] = []
    start = 0
    for expert, run in enumerate(runs):
        end = start + len(run)
        tiles += [
            (expert, row, min(row + out.block_m, end)) for row in range(start, end, out.block_m)
        ]
        out.ends[expert] = start = end
    out.order[:start] = torch.tensor([pair for run in runs for pair in run], dtype=torch.int32)
    out.tiles[0] = -1
    out.tiles[1:] = 0
    out.tiles[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 3).t()
    return out


# Values that change from step to step must not make new variants of a kernel.
@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids, counts, pairs, experts, CHUNK_PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Count the experts of one chunk."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK_PAIRS + tl.arange(0, CHUNK_PAIRS)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
    real = (expert >= 0) & (expert < experts)
    lanes = tl.arange(0, EXPERTS)
    tl.store(
        counts + chunk * experts + lanes,
        tl.histogram(expert, EXPERTS, mask=real),
        mask=lanes < experts,
    )


@triton.jit(do_not_specialize=["pairs", "num_chunks", "num_tiles"])
def _place_kernel(
    ids, counts, order, ends, tiles, pairs, experts, num_chunks, num_tiles,
    ONE_PASS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK_PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
    SPAN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Programs below num_chunks place a chunk of pairs each; the others write TILES tiles each, and the ends."""
    program = tl.program_id(0)
    lanes = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], dtype=tl.int32)
    total = tl.zeros([EXPERTS], dtype=tl.int32)
    if ONE_PASS:
        for start in range(0, pairs, SPAN):
            pair = start + tl.arange(0, SPAN)
            expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
            real = (expert >= 0) & (expert < experts)
            total += tl.histogram(expert, EXPERTS, mask=real)
            before += tl.histogram(expert, EXPERTS, mask=real & (pair < program * CHUNK_PAIRS))
    else:
        for start in range(0, num_chunks, SPAN):
            chunk = start + tl.arange(0, SPAN)
            inside = (chunk < num_chunks)[:, None] & (lanes < experts)[None, :]
            part = tl.load(counts + chunk[:, None] * experts + lanes[None, :], mask=inside, other=0)
            total += tl.sum(part, 0)
            before += tl.sum(tl.where((chunk < program)[:, None], part, 0), 0)
    run_ends = tl.cumsum(total, 0)
    run_starts = run_ends - total
    if program < num_chunks:
        local = tl.arange(0, CHUNK_PAIRS)
        pair = program * CHUNK_PAIRS + local
        expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        real = (expert >= 0) & (expert < experts)
        expert = tl.where(real, expert, 0)
        earlier = (
            (expert[:, None] == expert[None, :]) & real[None, :] & (local[None, :] < local[:, None])
        )
        row = tl.gather(run_starts + before, expert, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + row, pair, mask=real)
    else:
        run_tiles = (total + BLOCK_M - 1) // BLOCK_M
        tile_ends = tl.cumsum(run_tiles, 0)
        tile = (program - num_chunks) * TILES + tl.arange(0, TILES)
        owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        used = owner < experts
        owner = tl.where(used, owner, 0)
        first = (
            tl.gather(run_starts, owner, 0)
            + (tile - tl.gather(tile_ends - run_tiles, owner, 0)) * BLOCK_M
        )
        end = tl.minimum(first + BLOCK_M, tl.gather(run_ends, owner, 0))
        inside = tile < num_tiles
        tl.store(tiles + tile, tl.where(used, owner, -1), mask=inside)
        tl.store(tiles + num_tiles + tile, tl.where(used, first, 0), mask=inside)
        tl.store(tiles + 2 * num_tiles + tile, tl.where(used, end, 0), mask=inside)
        if program == num_chunks:
            tl.store(ends + lanes, run_ends, mask=lanes < experts)


def expert_sort(ids: Tensor, experts: int, out: SortedPairs) -> SortedPairs:
    """Sort the pairs of a step by expert.

    ids  [tokens, top_k] int32 or int64, contiguous; an id outside 0 .. experts - 1 leaves its pair out
    out  of `empty_pairs(tokens * top_k, experts, block_m, device)`; all of ends and tiles, and order[: ends[-1]], written
    The order within an expert is that of the pairs: the result is the same each time.
    Raises ValueError if `out` is of another size. Reference: `reference`, exact.
    """
    pairs, num_tiles = ids.numel(), out.tiles.shape[1]
    one_pass = pairs <= ONE_PASS_PAIRS
    num_chunks = -(-pairs // CHUNK)
    fits = out.order.shape[0] == pairs and out.ends.shape[0] == experts
    if not fits or num_tiles != max_tiles(pairs, experts, out.block_m) or not ids.is_contiguous():
        raise ValueError(
            f"expected contiguous ids and outputs of {pairs} pairs, {experts} experts, got {tuple(ids.shape)}, "
            f"order {tuple(out.order.shape)}, ends {tuple(out.ends.shape)}, tiles {tuple(out.tiles.shape)}"
        )
    lanes = max(32, next_power_of_2(experts))
    if not one_pass:
        _count_kernel[(num_chunks,)](
            ids, out.counts, pairs, experts, CHUNK_PAIRS=CHUNK, EXPERTS=lanes, **run_options(4)
        )
    tiles_a_program = 32
    programs = num_chunks + max(1, -(-num_tiles // tiles_a_program))
    _place_kernel[(programs,)](
        ids, out.counts, out.order, out.ends, out.tiles, pairs, experts, num_chunks, num_tiles,
        ONE_PASS=one_pass, BLOCK_M=out.block_m, CHUNK_PAIRS=CHUNK, EXPERTS=lanes,
        SPAN=1024 if one_pass else 32, TILES=tiles_a_program, **run_options(4),
    )  # fmt: skip
    return out
