"""Small GGUF files for tests, written by gguf-py: a writer that is not ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

HIDDEN, INTER, LAYERS = 64, 256, 2


def random_blocks(format_name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random packed bytes [..., row bytes] of a tensor of `shape`; the scales are finite halves."""
    type_id = GGMLQuantizationType[format_name]
    elements, block_bytes = gguf.GGML_QUANT_SIZES[type_id]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, block_bytes), dtype=np.uint8)
    for start in half_places(format_name):
        # Clearing one exponent bit of a half keeps it from infinity and NaN.
        raw[..., start + 1] &= 0xBF
    return raw.reshape(*shape[:-1], -1)


def half_places(format_name: str) -> tuple[int, ...]:
    """Where a block keeps its float16 scale and minimum, in bytes."""
    if format_name == "Q6_K":
        return (208,)
    return (0, 2) if format_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, str]],
    metadata: Mapping[str, object] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write one file; a tensor is an array, or packed rows with the name of their format."""
    writer = GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        _add_value(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=GGMLQuantizationType[tensor[1]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense_model(path: Path, down: str = "Q4_1", seed: int = 0) -> Path:
    """A two-layer dense model as far as upcycling looks at it."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray | tuple[np.ndarray, str]] = {
        "token_embd.weight": rng.normal(size=(8, HIDDEN)).astype(np.float32)
    }
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        norm = rng.normal(1, 0.1, HIDDEN).astype(np.float32)
        tensors[name + "ffn_norm.weight"] = norm
        for part in ("gate", "up"):
            weights = rng.normal(size=(INTER, HIDDEN)).astype(np.float32)
            packed = gguf.quants.quantize(weights, GGMLQuantizationType.Q4_1)
            tensors[f"{name}ffn_{part}.weight"] = packed, "Q4_1"
        if down == "Q6_K":
            packed = random_blocks(down, (HIDDEN, INTER), seed + layer)
        else:
            weights = rng.normal(size=(HIDDEN, INTER)).astype(np.float32)
            packed = gguf.quants.quantize(weights, GGMLQuantizationType[down])
        tensors[name + "ffn_down.weight"] = packed, down
    metadata = {
        "general.name": "tiny",
        "general.size_label": "1K",
        "general.license": "apache-2.0",
        "llama.block_count": LAYERS,
        "tokenizer.ggml.tokens": ["a", "b", "é", "<|end|>"],
        "tokenizer.ggml.scores": [0.5, -1.0, 0.25, 0.0],
        "tokenizer.chat_template": "{{ messages }}",
    }
    return write_gguf(path, tensors, metadata)


def read_by_oracle(path: Path, name: str) -> np.ndarray:
    """One tensor in float32 by gguf-py's reader and formulas."""
    reader = gguf.GGUFReader(path)
    tensor = next(t for t in reader.tensors if t.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def _add_value(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, str(value))
