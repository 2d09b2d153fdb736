"""A dense GGUF model as a Mixture-of-Experts that computes the same function: exact sparse
upcycling.

Every expert is the dense feed-forward with its neurons in another order. Rows of gate and up and
blocks of columns of down move whole, so quantised values stay bit-identical. The chosen experts'
weights add up to one, hence any routing gives the dense result; but the gate of one expert with the
down of another does not, which makes the result a test of expert placement.

Same input and recipe give the same bytes on every machine: random numbers are raw PCG64 words,
whose stream numpy guarantees.
Source: upcycling is arXiv 2212.05055; permutation symmetry of hidden neurons is folklore.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.checkpoint.atomic import check_space, write_whole
from freetoken.checkpoint.dequant import FORMATS, dequantize
from freetoken.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from freetoken.checkpoint.gguf_write import OutputTensor, encode_header, encode_pair, write_tensor
from freetoken.checkpoint.weight_file import WeightFile
from freetoken.errors import WeightError

Bytes = NDArray[np.uint8]

_BLOCK = 32
"""Neurons that move together: the block of the small quantised formats, and for formats with larger
blocks those. A multiple hides fewer mistakes; less would cut a block in two."""

_FFN = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)\.weight")
_OTHER_FFN = re.compile(r"blk\.\d+\.ffn_(?!(gate|up|down|norm)\.weight).*")
_F32 = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make. `name` and `note`, which says whose weights they are, become metadata."""

    name: str
    note: str
    experts: int = 8
    top_k: int = 2
    seed: int = 0
    router_spread: float = 1.0
    """Standard deviation of a router logit. At a half routing is nearly even; at double one expert
    often takes all the weight."""


def upcycle(
    dense: Path, target: Path, recipe: Recipe, progress: Callable[[int, int], None]
) -> None:
    """Write `target`, whole or not at all; `progress` gets bytes done and in total.

    Raises WeightError: `dense` is no dense GGUF model, its width does not divide into blocks, or
    the disk is full.
    """
    file = WeightFile(dense)
    try:
        header = read_header(file)
        tensors = list(_plan(_Source(file, header), recipe))
        total = sum(tensor.nbytes for tensor in tensors)
        check_space(target.parent, total)
        with write_whole(target) as out:
            out.write(encode_header(_pairs(header, dense, recipe), tensors, header.alignment))
            done = 0
            progress(done, total)
            for tensor in tensors:
                write_tensor(out, tensor, header.alignment)
                done += tensor.nbytes
                progress(done, total)
    finally:
        file.close()


def permutation(seed: int, layer: int, expert: int, blocks: int) -> NDArray[np.int64]:
    """Order of an expert's blocks of neurons: its block i is the dense model's block out[i]."""
    return np.argsort(_words(seed, (1, layer, expert), blocks), kind="stable")


def router(seed: int, layer: int, experts: int, norm: NDArray[np.float32], spread: float) -> Bytes:
    """Random router rows as bytes of [experts, hidden] float32, uniform around zero.

    norm  [hidden] float32, the weight of the norm before the router: its square sum is that of a
          typical input, so `spread` becomes the standard deviation of a logit.
    """
    words = _words(seed, (2, layer), experts * len(norm))
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    energy = math.fsum(float(weight) ** 2 for weight in norm)
    rows = (uniform * (spread * math.sqrt(3.0 / energy))).astype("<f4")
    return rows.view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Source:
    file: WeightFile
    header: GgufHeader

    def read(self, tensor: GgufTensor) -> Bytes:
        return self.file.read_tensor(tensor.name, tensor.offset, tensor.nbytes).numpy()


def _plan(source: _Source, recipe: Recipe) -> Iterator[OutputTensor]:
    """The output's tensors in order; their bytes are read and permuted when they are written."""
    by_name = {tensor.name: tensor for tensor in source.header.tensors}
    units = _units(by_name, source.file.path)
    for tensor in source.header.tensors:
        match = _FFN.fullmatch(tensor.name)
        if match is None:
            parts = _whole(source, tensor)
            yield OutputTensor(tensor.name, tensor.shape, tensor.type_id, tensor.nbytes, parts)
            continue
        layer, part = int(match["layer"]), match["part"]
        if part == "gate":
            yield _router_tensor(source, by_name, layer, recipe)
        yield OutputTensor(
            f"blk.{layer}.ffn_{part}_exps.weight",
            (recipe.experts, *tensor.shape),
            tensor.type_id,
            tensor.nbytes * recipe.experts,
            _experts(source, tensor, units[layer], recipe),
        )


def _units(by_name: Mapping[str, GgufTensor], path: Path) -> dict[int, int]:
    """How many neurons move together, by layer; checks that each has one dense feed-forward."""
    other = next((name for name in by_name if _OTHER_FFN.fullmatch(name)), None)
    layers = sorted({int(match["layer"]) for name in by_name if (match := _FFN.fullmatch(name))})
    if other is not None or not layers:
        found = f"tensor {other!r}" if other is not None else "no feed-forward"
        raise WeightError(
            f"expected a dense model with blk.N.ffn_(gate, up, down), got {found} in {path}"
        )
    units: dict[int, int] = {}
    for layer in layers:
        for part in ("gate.weight", "up.weight", "down.weight", "norm.weight"):
            if f"blk.{layer}.ffn_{part}" not in by_name:
                raise WeightError(
                    f"expected a tensor 'blk.{layer}.ffn_{part}' in {path}, found none"
                )
        down = by_name[f"blk.{layer}.ffn_down.weight"]
        row = FORMATS.get(down.format)
        units[layer] = max(_BLOCK, row.elements if row is not None else 1)
        if down.shape[1] % units[layer]:
            raise WeightError(
                f"expected a multiple of {units[layer]} as width of {down.name!r} ({down.format})"
                f" in {path},"
                f" got {down.shape[1]}"
            )
    return units


def _whole(source: _Source, tensor: GgufTensor) -> Iterator[Bytes]:
    yield source.read(tensor)


def _experts(source: _Source, tensor: GgufTensor, unit: int, recipe: Recipe) -> Iterator[Bytes]:
    """Each expert's bytes: `unit` rows of gate and up, `unit` columns of down, move together."""
    match = _FFN.fullmatch(tensor.name)
    assert match is not None
    layer, is_down = int(match["layer"]), match["part"] == "down"
    rows, columns = tensor.shape
    blocks = (columns if is_down else rows) // unit
    dense = source.read(tensor).reshape(rows if is_down else 1, blocks, -1)
    for expert in range(recipe.experts):
        yield np.take(dense, permutation(recipe.seed, layer, expert, blocks), axis=1)


def _router_tensor(
    source: _Source, by_name: Mapping[str, GgufTensor], layer: int, recipe: Recipe
) -> OutputTensor:
    stored = by_name[f"blk.{layer}.ffn_norm.weight"]
    raw = source.file.read_tensor(stored.name, stored.offset, stored.nbytes)
    norm = dequantize(raw, stored.format, torch.float32).numpy()
    rows = router(recipe.seed, layer, recipe.experts, norm, recipe.router_spread)
    shape = recipe.experts, len(norm)
    return OutputTensor(f"blk.{layer}.ffn_gate_inp.weight", shape, _F32, rows.nbytes, (rows,))


def _pairs(header: GgufHeader, dense: Path, recipe: Recipe) -> list[bytes]:
    """The dense model's metadata byte for byte, but for its name and the experts' numbers."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise WeightError(
            f"expected a text as general.architecture in {dense}, got {architecture!r}"
        )
    changed: dict[str, str | int] = {
        "general.name": recipe.name,
        "general.description": recipe.note,
        f"{architecture}.expert_count": recipe.experts,
        f"{architecture}.expert_used_count": recipe.top_k,
    }
    label = header.metadata.get("general.size_label")
    if isinstance(label, str):
        changed["general.size_label"] = f"{recipe.experts}x{label}"
    kept = [pair for key, pair in header.pairs.items() if key not in changed]
    # The architecture must come first: readers look it up before they know any other key.
    added = [encode_pair(key, value) for key, value in changed.items()]
    return [*kept[:1], *added, *kept[1:]]


def _words(seed: int, stream: tuple[int, ...], count: int) -> NDArray[np.uint64]:
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))
    return generator.random_raw(count)
