"""Filling a spec's slots from a checkpoint: all names and shapes first, then the data.

Knows tensor names and shapes, not how a file keeps its bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from freetoken.checkpoint.source import StoredTensor, TensorSource
from freetoken.errors import WeightError
from freetoken.models.slots import Slot, slots
from freetoken.models.spec import DecoderSpec, WeightMap

NUM_NAMED = 4
"""Names listed in an error; a wrong map has hundreds and the first few tell which."""

MAX_READERS = 8
"""Threads that read tensors. Each holds a tensor beside the weights: more cost memory too."""


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor and where it goes in its slot.

    tensor  name in the checkpoint
    expert  stacked experts: which one; None if the tensor spans the slot's experts, or it has none
    start   first row it fills
    rows    rows it fills
    """

    tensor: str
    slot: Slot
    expert: int | None
    start: int
    rows: int
    is_interleaved: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape the checkpoint tensor must have."""
        shape = list(self.slot.shape)
        shape[self.slot.row_axis] = self.rows
        return tuple(shape if self.expert is None else shape[1:])


def assign(
    spec: DecoderSpec, weight_map: WeightMap, tensors: Mapping[str, StoredTensor], path: Path
) -> list[Part]:
    """Find the tensors of every slot and check all names and shapes; no data is read.

    Raises WeightError for slots without a tensor, tensors without a slot, and shapes that differ.
    """
    parts: list[Part] = []
    for slot in slots(spec):
        parts += _parts_of(slot, weight_map, tensors)
    missing = [part for part in parts if part.tensor not in tensors]
    used = {part.tensor for part in parts}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in weight_map.ignored) or r"(?!)")
    unknown = [name for name in tensors if name not in used and ignored.fullmatch(name) is None]
    if spec.is_tied and weight_map.top["head"] in unknown:
        unknown.remove(weight_map.top["head"])
    if missing:
        raise WeightError(_gap_text(missing, unknown, len(tensors), path))
    if unknown:
        first = tensors[unknown[0]]
        raise WeightError(
            f"expected every tensor to have a place in the model, got {len(unknown)} without one:"
            f" {_listed(unknown)} in"
            f" {first.file}; check that config.json belongs to these weights"
        )
    for part in parts:
        found = tensors[part.tensor]
        if found.shape != part.shape:
            raise WeightError(
                f"expected {part.tensor} of shape {list(part.shape)} for {part.slot.name},"
                f" got {list(found.shape)} in"
                f" {found.file}; check that the config belongs to these weights"
            )
    return parts


def read_weights(
    source: TensorSource,
    parts: list[Part],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> dict[str, Tensor]:
    """Read all parts into slots of `dtype` on `device`; holds one tensor a reader beside them.

    `progress(done, total)` counts checkpoint bytes and is called in the calling thread. The first
    error of a reader is raised after the running reads have ended.
    """
    nbytes = {part.tensor: source.tensors[part.tensor].nbytes for part in parts}
    total, done = sum(nbytes.values()), 0
    weights = {
        part.slot.name: torch.empty(part.slot.shape, dtype=dtype, device=device) for part in parts
    }
    progress(0, total)
    with ThreadPoolExecutor(
        min(MAX_READERS, os.cpu_count() or 1), thread_name_prefix="weights"
    ) as readers:
        reads: dict[Future[None], Part] = {
            readers.submit(_read_part, source, part, weights[part.slot.name]): part
            for part in parts
        }
        try:
            for read in as_completed(reads):
                read.result()
                done += nbytes[reads[read].tensor]
                progress(done, total)
        finally:
            readers.shutdown(cancel_futures=True)
    return weights


def _read_part(source: TensorSource, part: Part, slot: Tensor) -> None:
    """Read one tensor and copy it to its rows. Parts never overlap, so readers need no lock."""
    read = source.read(part.tensor, slot.dtype)
    if part.is_interleaved:
        read = _halves(read, part.slot.head_dim)
    target = slot if part.expert is None else slot[part.expert]
    axis = part.slot.row_axis if part.expert is None else 0
    target.narrow(axis, part.start, part.rows).copy_(read)


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of each head from neighbouring rotary pairs to half-split ones."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _parts_of(slot: Slot, weight_map: WeightMap, tensors: Mapping[str, StoredTensor]) -> list[Part]:
    """Return the first spelling that the checkpoint uses, or the first one if it uses none."""
    spellings = _spellings(slot, weight_map)
    if not spellings:
        raise WeightError(
            f"expected the weight map to spell {slot.name}, got no name;"
            " this is a fault of the model file"
        )
    for parts in spellings:
        if any(part.tensor in tensors for part in parts):
            return parts
    return spellings[0]


def _spellings(slot: Slot, weight_map: WeightMap) -> list[list[Part]]:
    if slot.name in weight_map.top:
        return [_laid_out(slot, (weight_map.top[slot.name],), weight_map, "", None)]
    _, layer, inner = slot.name.split(".", 2)
    prefix = weight_map.prefix.replace("{layer}", layer)
    found: list[list[Part]] = []
    if inner in weight_map.stack:
        names = weight_map.stack[inner]
        experts = range(slot.shape[0])
        found.append(
            [part for e in experts for part in _laid_out(slot, names, weight_map, prefix, e)]
        )
    if inner in weight_map.fuse:
        found.append(_laid_out(slot, weight_map.fuse[inner], weight_map, prefix, None))
    if inner in weight_map.rename:
        found.append(_laid_out(slot, (weight_map.rename[inner],), weight_map, prefix, None))
    return found


def _laid_out(
    slot: Slot, names: tuple[str, ...], weight_map: WeightMap, prefix: str, expert: int | None
) -> list[Part]:
    """Lay the named tensors end to end along the slot's rows; one name alone is all rows."""
    rows = slot.parts if len(names) == len(slot.parts) else (sum(slot.parts),)
    found: list[Part] = []
    start = 0
    for name, num_rows in zip(names, rows, strict=True):
        tensor = prefix + (name if expert is None else name.replace("{expert}", str(expert)))
        found.append(Part(tensor, slot, expert, start, num_rows, name in weight_map.interleaved))
        start += num_rows
    return found


def _gap_text(missing: list[Part], unknown: list[str], num_tensors: int, path: Path) -> str:
    """Say what is missing, and whether the file looks like another layout."""
    first = missing[0]
    wanted = f"expected tensor {first.tensor} {list(first.shape)} for {first.slot.name}"
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    if unknown:
        return (
            f"unknown layout: {wanted}{others}, got none in {path}; {len(unknown)} of its"
            f" {num_tensors} tensors have no place in the model: {_listed(unknown)};"
            " the names or the config are of another kind of model"
        )
    return (
        f"{wanted}{others}, got none in {path} ({num_tensors} tensors);"
        " the checkpoint is incomplete, fetch it again"
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_NAMED])
    return shown if len(names) <= NUM_NAMED else f"{shown}, ..."
