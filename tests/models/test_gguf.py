"""GGUF files written by gguf-py from a transformers model: loaded by us, answered by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from freetoken.errors import ConfigError, WeightError
from freetoken.models.load import open_checkpoint
from tests.models import gguf_model
from tests.models.oracle import NEW, Oracle, answered, build
from tests.models.paged import Loop, Sequence, opened

SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "sliding_window": None,
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0

FILES = {
    "llama": ("llama", "llama", {"head_dim": 16}, None),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}, None),
    "mixtral": ("mixtral", "llama", {}, None),
    "mixtral-q8": ("mixtral", "llama", {"num_local_experts": 5}, Q8_0),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False}, None),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"use_sliding_window": False, "attention_bias": False, "layer_types": None},
        None,
    ),
    "qwen3moe": ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}, None),
    "qwen3moe-q8": (
        "qwen3_moe",
        "qwen3moe",
        {"mlp_only_layers": [], "moe_intermediate_size": 32, "head_dim": 32},
        Q8_0,
    ),
}


def written(case: str, folder: Path) -> tuple[Oracle, Path]:
    """Build the model of a case and its GGUF file."""
    family, arch, settings, quantization = FILES[case]
    oracle = build(family, folder / "hf", **(SHAPES | settings))
    path = folder / f"{case}.gguf"
    gguf_model.write(oracle.model, path, arch, quantization)
    return (answered(case, folder, oracle.model) if quantization else oracle), path


@pytest.mark.parametrize("case", list(FILES))
def test_gguf_logits_and_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    """Catches permuted query rows, swapped gate and up, baked rope scaling, a tied head."""
    oracle, path = written(case, tmp_path)
    decoder = opened(path)
    (logits,) = Loop(decoder).step([(Sequence(), oracle.prompt)], every_row=True)
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0.0)
    assert Loop(decoder).greedy([oracle.prompt], NEW) == [oracle.greedy]


def test_gguf_header_gives_context_and_end_ids(tmp_path: Path) -> None:
    """H23: catches a reply that runs past its turn because only one of the end ids was read."""
    _, path = written("llama", tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.end_ids == {3, 4}
    assert checkpoint.context == 128
    assert checkpoint.kind == "gguf"
    assert checkpoint.folder == tmp_path
    assert checkpoint.metadata["general.architecture"] == "llama"
    checkpoint.close()


def test_gguf_of_unsupported_architecture_is_one_line(tmp_path: Path) -> None:
    """R21: catches a raw traceback for a GGUF of an architecture that we do not have."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", torch.zeros(8, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"'mamba' is not supported .*supported: llama, qwen2, qwen3, qwen3moe"
    ) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def rewritten(path: Path, target: Path, arch: str, renamed: dict[str, str]) -> None:
    """Copy a GGUF file with other tensor names; an empty new name drops the tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, arch)
    for key, value in reader.fields.items():
        if key.startswith((f"{arch}.", "tokenizer.")):
            content = value.contents()
            writer.add_float32(key, content) if isinstance(content, float) else writer.add_uint32(
                key, content
            )
    for tensor in reader.tensors:
        name = renamed.get(tensor.name, tensor.name)
        if name:
            writer.add_tensor(name, tensor.data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_with_experts_only_is_not_called_truncated(tmp_path: Path) -> None:
    """R20: catches a complete MoE file called truncated because a dense name is absent."""
    _, path = written("mixtral", tmp_path)
    checkpoint = open_checkpoint(path)
    assert not any("ffn_gate.weight" in name for name in checkpoint.source.tensors)
    checkpoint.close()


def test_gguf_of_other_layout_says_unknown_layout(tmp_path: Path) -> None:
    """R20: catches a complete file with foreign expert names reported as short."""
    _, path = written("mixtral", tmp_path)
    other = tmp_path / "other.gguf"
    rewritten(path, other, "llama", {"blk.0.ffn_down_exps.weight": "blk.0.experts_out.weight"})
    with pytest.raises(
        WeightError, match=r"unknown layout: .*blk\.0\.ffn_down_exps\.weight|unknown layout"
    ) as error:
        open_checkpoint(other)
    assert "blk.0.experts_out.weight" in str(error.value)
    assert "truncated" not in str(error.value)


def test_gguf_without_a_tensor_names_it(tmp_path: Path) -> None:
    """Catches a gap that is found at the first request and not at the start."""
    _, path = written("qwen3moe", tmp_path)
    other = tmp_path / "other.gguf"
    rewritten(path, other, "qwen3moe", {"blk.1.attn_k_norm.weight": ""})
    with pytest.raises(
        WeightError, match=r"expected tensor blk\.1\.attn_k_norm\.weight \[20\] .*other\.gguf"
    ):
        open_checkpoint(other)


def test_gguf_with_one_tensor_an_expert_equals_stacked(tmp_path: Path) -> None:
    """Catches old Mixtral files, whose experts are tensors of their own, being refused."""
    oracle, path = written("mixtral", tmp_path)
    other = tmp_path / "old.gguf"
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(other, "llama")
    for key, value in reader.fields.items():
        if key.startswith("llama."):
            content = value.contents()
            writer.add_float32(key, content) if isinstance(content, float) else writer.add_uint32(
                key, content
            )
    for tensor in reader.tensors:
        if "_exps." not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data.copy())
            continue
        for expert, data in enumerate(tensor.data):
            writer.add_tensor(tensor.name.replace("_exps.", f".{expert}."), data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (logits,) = Loop(opened(other)).step([(Sequence(), oracle.prompt)], every_row=True)
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0.0)
