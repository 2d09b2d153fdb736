"""Opening a model on disk: headers and config first, weights later. Knows no requests, no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from freetoken.checkpoint.gguf import open_gguf
from freetoken.checkpoint.safetensors import open_safetensors
from freetoken.checkpoint.source import TensorSource
from freetoken.errors import ConfigError
from freetoken.kvcache.pool import bytes_per_token
from freetoken.models import gguf
from freetoken.models.decoder import Decoder
from freetoken.models.registry import family_of
from freetoken.models.spec import DecoderSpec
from freetoken.models.weights import Part, assign, read_weights
from freetoken.native import Native

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose headers fit its config; weights are on disk. Owns open files until `close`."""

    path: Path
    kind: Literal["safetensors", "gguf"]
    spec: DecoderSpec
    config: Mapping[str, Any]
    """config.json, or what a GGUF header says in the same keys."""
    source: TensorSource
    parts: list[Part]
    end_ids: frozenset[int]
    """Every id that ends a reply, from all places that name one."""
    generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The author's sampling defaults; empty if there are none."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """GGUF metadata, the tokenizer's too; empty for safetensors."""

    @property
    def folder(self) -> Path:
        """Where the files beside the weights are (tokenizer, chat template)."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def context(self) -> int:
        """Most tokens of prompt and reply that the model was made for."""
        return self.spec.context

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return bytes_per_token(self.spec.kv_layers(), dtype)

    def close(self) -> None:
        """Close the files. Closing twice does nothing."""
        self.source.close()


def open_checkpoint(path: Path, native: Native | None = None) -> Checkpoint:
    """Open a folder (config.json and safetensors, or one GGUF) or a GGUF file; read headers only.

    Raises ConfigError if it is no model that we can run, WeightError if tensors and config do not
    fit or a file is damaged. Blocks on files: call it in a thread. `native` reads packed GGUF
    tensors faster; it must stay open as long as the checkpoint.
    """
    if not path.exists():
        raise ConfigError(
            f"expected a model folder or a GGUF file, got {path}, which does not exist;"
            " check --model"
        )
    if path.is_dir() and not (path / CONFIG).is_file():
        return _open_gguf(_only_gguf(path), native)
    if path.suffix == ".gguf":
        return _open_gguf(path, native)
    if path.is_file() and path.suffix not in {".safetensors", ".json"}:
        raise ConfigError(
            f"expected a model folder, a GGUF file or a safetensors file, got {path}; check --model"
        )
    return _open_safetensors(path)


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
    native: Native | None = None,
) -> Decoder:
    """Read all weights; `progress(done, total)` gets checkpoint bytes. Blocks: call it in a thread.

    `native` speeds up decode steps on a CPU and must stay open while the decoder is used.
    Raises WeightError if a file cannot be read.
    """
    weights = read_weights(checkpoint.source, checkpoint.parts, dtype, device, progress)
    return Decoder(checkpoint.spec, weights, native)


def _open_safetensors(path: Path) -> Checkpoint:
    folder = path if path.is_dir() else path.parent
    config = _read_json(folder / CONFIG)
    generation = (
        _read_json(folder / GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else {}
    )
    family = family_of(config)
    spec = family.describe(config)
    ends = _ids(config.get("eos_token_id"), CONFIG) | _ids(
        generation.get("eos_token_id"), GENERATION_CONFIG
    )
    source = open_safetensors(path)
    try:
        parts = assign(spec, family.weights, source.tensors, path)
    except BaseException:
        source.close()
        raise
    return Checkpoint(path, "safetensors", spec, config, source, parts, ends, generation)


def _open_gguf(path: Path, native: Native | None) -> Checkpoint:
    source = open_gguf(path, native)
    try:
        model = gguf.describe(source, source.metadata)
        parts = assign(model.spec, model.weights, source.tensors, path)
    except BaseException:
        source.close()
        raise
    ends = gguf.end_ids(source.metadata)
    return Checkpoint(
        path, "gguf", model.spec, model.config, source, parts, ends, metadata=source.metadata
    )


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    what = f"{len(files)} GGUF files; name one of them" if files else "neither"
    raise ConfigError(f"expected {CONFIG} or one GGUF file in {folder}, got {what}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise ConfigError(
            f"expected {path.name} beside the weights, got none in {path.parent}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"expected JSON in {path}, got damaged text: {error}; fetch the file again"
        ) from error


def _ids(value: object, file: str) -> frozenset[int]:
    """Read one id, a list of them, or none."""
    values = [] if value is None else [value] if isinstance(value, int) else value
    try:
        return frozenset(msgspec.convert(values, list[int]))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"expected eos_token_id in {file} to be a number or a list, got {value!r}"
        ) from error
