"""Safetensors checkpoints: one file, or a folder with an index, with shards, or with neither.

One resolver serves every caller. Headers are read and checked when a checkpoint is opened; data
only in `read`. Format: 8 bytes little-endian header length, that many bytes of JSON, then the data
which the JSON's offsets point into.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from freetoken.checkpoint.dequant import PLAIN
from freetoken.checkpoint.source import StoredTensor, TensorSource
from freetoken.checkpoint.weight_file import WeightFile, describe_start
from freetoken.errors import WeightError

INDEX = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own library. Less refuses real files of many experts; more lets junk
eat memory."""

_SHARD = re.compile(r"(?P<family>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_UNFINISHED = (".part", ".partial", ".incomplete", ".crdownload", ".aria2", ".tmp", ".download")


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Place:
    file: WeightFile
    offset: int


class SafetensorsCheckpoint:
    """Owns the open shards. Reads are safe from several threads."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self._places: dict[str, _Place] = {}
        self._files: list[WeightFile] = []
        try:
            for file in files:
                self._add(file)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor cast to `dtype`, see TensorSource."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise WeightError(f"expected a tensor {name!r} in {self.path}, found none of that name")
        stored = PLAIN.get(tensor.format)
        if stored is None:
            raise WeightError(
                f"tensor {name!r} in {tensor.file} is stored as {tensor.format}, which cannot be"
                " read yet;"
                f" readable: {', '.join(PLAIN)}; use the model's BF16 files"
            )
        place = self._places[name]
        raw = place.file.read_tensor(name, place.offset, tensor.nbytes)
        return raw.view(stored).to(dtype).view(tensor.shape)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _add(self, path: Path) -> None:
        file = WeightFile(path)
        self._files.append(file)
        for tensor, offset in _read_header(file):
            known = self.tensors.get(tensor.name)
            if known is not None:
                raise WeightError(
                    f"tensor {tensor.name!r} is in two shards, {known.file} and {path.name};"
                    " remove the file"
                    " that does not belong to this checkpoint"
                )
            self.tensors[tensor.name] = tensor
            self._places[tensor.name] = _Place(file, offset)


def open_safetensors(path: Path) -> TensorSource:
    """Open a folder (index, shards, one file, no index) or one file and check every header.

    Raises WeightError naming file and tensor: nothing found, a shard missing, a file cut short or
    not safetensors, a tensor twice, offsets out of bounds, an index that contradicts its shards.
    """
    if path.is_file():
        if path.name.endswith(".safetensors.index.json"):
            return _open_indexed(path.parent, path)
        return SafetensorsCheckpoint(path, [path])
    if not path.is_dir():
        raise WeightError(f"expected a folder or a .safetensors file, found nothing at {path}")
    index = path / INDEX
    if index.is_file():
        return _open_indexed(path, index)
    return SafetensorsCheckpoint(path, _find_shards(path))


def _open_indexed(folder: Path, index: Path) -> SafetensorsCheckpoint:
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and len(missing) == len(names):
        raise WeightError(
            f"none found of the {len(names)} shards that {index} names ({_list(names)}); download"
            " them into"
            f" {folder}{_unfinished(folder)}"
        )
    if missing:
        lost = sum(shard in set(missing) for shard in weight_map.values())
        raise WeightError(
            f"{len(missing)} of {len(names)} shards missing that {index} names: {_list(missing)}"
            f" ({lost} tensors,"
            f" the first {_first_tensor(weight_map, missing)!r}); download"
            f" again{_unfinished(folder)}"
        )
    checkpoint = SafetensorsCheckpoint(folder, [folder / name for name in names])
    for tensor, shard in weight_map.items():
        held = checkpoint.tensors.get(tensor)
        if held is None or held.file.name != shard:
            checkpoint.close()
            found = f"it is in {held.file.name}" if held is not None else "no shard holds it"
            raise WeightError(
                f"{index} puts tensor {tensor!r} into {shard}, but {found}; index and shards are of"
                " different downloads"
            )
    return checkpoint


def _read_index(index: Path) -> dict[str, str]:
    content = index.read_bytes()
    try:
        weight_map = msgspec.json.decode(content, type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise WeightError(
            f"expected a shard index, got {describe_start(content[:64])} at {index}: {error};"
            " download it again,"
            " or delete it and the shards' own headers are used"
        ) from error
    for shard in weight_map.values():
        if Path(shard).name != shard:
            raise WeightError(f"expected file names without folders in {index}, got {shard!r}")
    if not weight_map:
        raise WeightError(f"expected tensors in {index}, got an empty weight_map")
    return weight_map


def _find_shards(folder: Path) -> list[Path]:
    """Every safetensors file of a folder without an index; numbered families must be whole."""
    files = sorted(
        f for f in folder.glob("*.safetensors") if f.is_file() and not f.name.startswith(".")
    )
    if not files:
        raise WeightError(
            "none found: no *.safetensors file in"
            f" {folder}{_other_weights(folder)}{_unfinished(folder)}"
        )
    families: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match is not None:
            key = match["family"], int(match["count"])
            families.setdefault(key, set()).add(int(match["number"]))
    for (family, count), numbers in families.items():
        lost = sorted(set(range(1, count + 1)) - numbers)
        # Some writers count from zero.
        if lost and numbers != set(range(count)):
            names = [f"{family}-{number:05d}-of-{count:05d}.safetensors" for number in lost]
            raise WeightError(
                f"{len(lost)} of {count} shards missing in {folder}: {_list(names)}; download"
                f" again{_unfinished(folder)}"
            )
    return files


def _read_header(file: WeightFile) -> list[tuple[StoredTensor, int]]:
    """Return each tensor with the file offset of its data, all bounds checked."""
    header_bytes = _header_length(file)
    content = file.read_bytes(8, header_bytes)
    try:
        entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise WeightError(
            f"expected a safetensors header in the first {header_bytes} bytes of {file.path}, got"
            " no valid"
            f" JSON: {error}; download the file again"
        ) from error
    entries.pop("__metadata__", None)
    decoder = msgspec.json.Decoder(_Entry)
    data_start = 8 + header_bytes
    data_bytes = file.size_bytes - data_start
    found: list[tuple[StoredTensor, int]] = []
    cut: tuple[str, int] | None = None
    last_end = 0
    for name, raw in entries.items():
        try:
            entry = decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise WeightError(
                f"bad header entry of tensor {name!r} in {file.path}: {error}"
            ) from error
        begin, end = entry.data_offsets
        _check_entry(name, entry, file.path)
        if end > data_bytes and (cut is None or begin < cut[1]):
            cut = name, begin
        last_end = max(last_end, end)
        tensor = StoredTensor(name, entry.shape, entry.dtype, end - begin, file.path)
        found.append((tensor, data_start + begin))
    if cut is not None:
        raise WeightError(
            f"{file.path} is cut short: expected {data_start + last_end} bytes, got"
            f" {file.size_bytes},"
            f" {last_end - data_bytes} bytes are missing, from tensor {cut[0]!r} on; download it"
            " again"
        )
    return found


def _header_length(file: WeightFile) -> int:
    head = file.read_bytes(0, 64)
    length = int.from_bytes(head[:8], "little")
    is_plausible = len(head) > 8 and length <= _MAX_HEADER_BYTES and head[8:9] == b"{"
    if not is_plausible:
        raise WeightError(
            f"expected a safetensors file, got {describe_start(head)} ({file.size_bytes} bytes) at"
            f" {file.path};"
            " download it again"
        )
    if 8 + length > file.size_bytes:
        raise WeightError(
            f"{file.path} is cut short inside its header: expected {8 + length} header bytes, got"
            f" {file.size_bytes}, {8 + length - file.size_bytes} and all tensor data are missing;"
            " download it again"
        )
    return length


def _check_entry(name: str, entry: _Entry, path: Path) -> None:
    begin, end = entry.data_offsets
    if begin < 0 or end < begin or any(size < 0 for size in entry.shape):
        raise WeightError(
            f"bad header of {path}: tensor {name!r} has offsets {begin}..{end} and shape"
            f" {list(entry.shape)}"
        )
    stored = PLAIN.get(entry.dtype)
    if stored is not None and end - begin != math.prod(entry.shape) * stored.itemsize:
        raise WeightError(
            f"bad header of {path}: tensor {name!r} of shape {list(entry.shape)} in {entry.dtype}"
            " needs"
            f" {math.prod(entry.shape) * stored.itemsize} bytes, its offsets span {end - begin}"
        )


def _first_tensor(weight_map: Mapping[str, str], shards: Sequence[str]) -> str:
    return next(tensor for tensor, shard in weight_map.items() if shard in shards)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _unfinished(folder: Path) -> str:
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(_UNFINISHED))
    return f" (unfinished downloads lie there: {_list(names)})" if names else ""


def _other_weights(folder: Path) -> str:
    names = sorted(f.name for f in folder.iterdir() if f.suffix in (".gguf", ".bin", ".pth", ".pt"))
    if any(name.endswith(".gguf") for name in names):
        return f"; give the GGUF file itself: {_list([n for n in names if n.endswith('.gguf')])}"
    return f"; pickled weights are not read: {_list(names)}" if names else ""
