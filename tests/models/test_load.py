"""Opening and loading: what is refused before reading, what other spellings come to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from freetoken import footprint
from freetoken.checkpoint.source import StoredTensor
from freetoken.errors import ConfigError, WeightError
from freetoken.models.load import load_decoder, open_checkpoint
from freetoken.models.slots import slots
from freetoken.models.weights import Part, read_weights
from tests.models.oracle import Oracle
from tests.models.paged import Loop, Sequence, opened

Oracles = Callable[[str], Oracle]
CPU = torch.device("cpu")


def copied(oracle: Oracle, folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """Copy a checkpoint and change its config: a value of None removes the key."""
    target = folder / "model"
    shutil.copytree(oracle.folder, target)
    values = json.loads((target / "config.json").read_text()) | dict(config or {})
    (target / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if v is not None})
    )
    return target


def with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Rewrite the weights file of a folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return folder


def check_same_logits(folder: Path, oracle: Oracle) -> None:
    """Fail unless a changed folder answers as the original."""
    (logits,) = Loop(opened(folder)).step([(Sequence(), oracle.prompt)], every_row=True)
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0.0)


def test_leftover_tensor_is_refused_with_name_and_file(oracles: Oracles, tmp_path: Path) -> None:
    """Catches a checkpoint of a larger model served as if the rest did not matter."""
    folder = copied(oracles("llama"), tmp_path)
    with_tensors(
        folder,
        lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}),
    )
    with pytest.raises(
        WeightError,
        match=r"1 without one: model\.layers\.9\.mlp\.up_proj\.weight .*model\.safetensors",
    ):
        open_checkpoint(folder)


def test_missing_tensor_is_refused_with_name_shape_and_file(
    oracles: Oracles, tmp_path: Path
) -> None:
    """Catches a gap that a default value would fill silently."""
    folder = copied(oracles("qwen3_moe"), tmp_path)
    with_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    with pytest.raises(
        WeightError,
        match=r"layers\.2\.mlp\.experts\.5\.up_proj\.weight \[24, 48\] for layers\.2\.ffn\.up",
    ):
        open_checkpoint(folder)


def test_foreign_names_are_called_unknown_layout(oracles: Oracles, tmp_path: Path) -> None:
    """R20: catches a complete file with other names reported as incomplete."""
    folder = copied(oracles("llama"), tmp_path)
    with_tensors(
        folder,
        lambda tensors: tensors.update(
            {"transformer.wte": tensors.pop("model.embed_tokens.weight")}
        ),
    )
    with pytest.raises(
        WeightError, match=r"unknown layout: .*model\.embed_tokens\.weight.*transformer\.wte"
    ):
        open_checkpoint(folder)


def test_wrong_shape_is_refused_before_reading(oracles: Oracles, tmp_path: Path) -> None:
    """Catches a config of another size found only in the middle of the first request."""
    folder = copied(oracles("mixtral"), tmp_path, {"intermediate_size": 56})
    with pytest.raises(
        WeightError,
        match=r"experts\.0\.w1\.weight of shape \[56, 48\].*got \[40, 48\] in .*\.safetensors",
    ):
        open_checkpoint(folder)


def test_head_beside_tied_embedding_is_ignored(oracles: Oracles, tmp_path: Path) -> None:
    """Catches tied checkpoints refused, or their stray head used."""
    oracle = oracles("llama-biased-tied")
    folder = with_tensors(
        copied(oracle, tmp_path),
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 48)}),
    )
    check_same_logits(folder, oracle)


def test_rotary_buffers_are_ignored(oracles: Oracles, tmp_path: Path) -> None:
    """Catches old checkpoints refused for a table that the config gives too."""
    oracle = oracles("mistral")
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(6) for layer in range(3)
    }
    check_same_logits(
        with_tensors(copied(oracle, tmp_path), lambda tensors: tensors.update(extra)), oracle
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_stacked_experts_load_like_single_ones(name: str, oracles: Oracles, tmp_path: Path) -> None:
    """Catches files with fused experts, as transformers 5 may write them, being refused."""
    oracle = oracles(name)

    def stack(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if ".experts." in key or "block_sparse_moe.gate" in key]:
            del tensors[key]
        state = oracle.model.state_dict()
        stacked = [key for key in state if ".experts." in key or key.endswith("mlp.gate.weight")]
        tensors.update({key: state[key] for key in stacked})

    check_same_logits(with_tensors(copied(oracle, tmp_path), stack), oracle)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_rope_spelling_equals_new(key: str, oracles: Oracles, tmp_path: Path) -> None:
    """Catches configs of transformers 4 read with the default theta or without scaling."""
    oracle = oracles("llama")
    new = json.loads((oracle.folder / "config.json").read_text())["rope_parameters"]
    scaling = {
        name: value for name, value in new.items() if name not in ("rope_theta", "rope_type")
    } | {key: "llama3"}
    old = {"rope_parameters": None, "rope_theta": new["rope_theta"], "rope_scaling": scaling}
    check_same_logits(copied(oracle, tmp_path, old), oracle)


def test_integer_theta_and_absent_kv_heads_are_read(oracles: Oracles, tmp_path: Path) -> None:
    """Catches a strict reader that refuses 10000, and head counts taken from elsewhere."""
    folder = copied(
        oracles("olmoe"),
        tmp_path,
        {"rope_parameters": None, "rope_theta": 10000, "num_key_value_heads": None},
    )
    with pytest.raises(WeightError, match=r"k_proj\.weight of shape \[48, 48\]"):
        open_checkpoint(folder)


REFUSED = {
    "activation": ("llama", {"hidden_act": "gelu"}, r"hidden_act to be 'silu', got gelu"),
    "quantized": (
        "llama",
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config .*'fp8'",
    ),
    "rope-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        r"rope_parameters\.rope_type to be 'default' or 'linear' or 'llama3', got 'yarn'",
    ),
    "rope-dynamic": (
        "qwen2",
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        r"rope_scaling\.rope_type .*'dynamic'",
    ),
    "rope-by-layer": (
        "qwen3",
        {"rope_parameters": {"full": {"rope_type": "default"}}},
        r"rope_parameters .*one set for each",
    ),
    "rope-no-factor": (
        "llama",
        {"rope_parameters": {"rope_type": "linear"}},
        r"rope_parameters\.factor .*got None",
    ),
    "layer-types": (
        "qwen3",
        {"layer_types": ["full_attention", "chunked", "full_attention"]},
        r"layer_types .*'chunked'",
    ),
    "layer-types-length": (
        "qwen2",
        {"layer_types": ["full_attention"]},
        r"one entry for each of 3 layers",
    ),
    "missing-key": (
        "qwen3_moe",
        {"num_experts_per_tok": None},
        r"missing required field `num_experts_per_tok`",
    ),
    "missing-experts": (
        "mixtral",
        {"num_local_experts": None},
        r"num_experts or num_local_experts .*neither",
    ),
    "wrong-type": (
        "llama",
        {"hidden_size": "48"},
        r"Expected `int`, got `str` - at `\$\.hidden_size`",
    ),
    "top-k": (
        "mixtral",
        {"num_experts_per_tok": 9},
        r"layers\.0 experts per token to be 1 to 5, got 9",
    ),
    "heads": ("llama", {"num_key_value_heads": 3}, r"heads to be a multiple of 3 key heads, got 4"),
    "no-heads": (
        "llama",
        {"num_attention_heads": 0, "num_key_value_heads": 1},
        r"heads to be at least 1, got 0",
    ),
    "window": ("mistral", {"sliding_window": 0}, r"window to be at least 1, got 0"),
    "architecture": (
        "llama",
        {"architectures": ["FalconForCausalLM"]},
        r"FalconForCausalLM is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Mix",
    ),
    "no-architecture": (
        "llama",
        {"architectures": None, "model_type": "bert"},
        r"none \(model_type bert\) is not supported",
    ),
    "damaged-ends": ("llama", {"eos_token_id": "</s>"}, r"eos_token_id in config\.json"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_unsupported_config_is_refused_in_one_line(
    case: str, oracles: Oracles, tmp_path: Path
) -> None:
    """Catches a variant served with the wrong mathematics instead of refused with key and value."""
    name, change, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text) as error:
        open_checkpoint(copied(oracles(name), tmp_path, change))
    assert "\n" not in str(error.value)


def test_end_ids_are_the_union_of_both_files(oracles: Oracles, tmp_path: Path) -> None:
    """H23: catches a model that plays the user because one file of end ids replaced the other."""
    folder = copied(oracles("llama"), tmp_path, {"eos_token_id": 5})
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.6}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.end_ids == {5, 7, 9}
    assert checkpoint.generation_config["temperature"] == 0.6
    checkpoint.close()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, r"expected config\.json or one GGUF file in .*, got neither"),
        ({"a.gguf": "", "b.gguf": ""}, r"got 2 GGUF files; name one"),
        ({"config.json": "{"}, r"expected JSON in .*config\.json"),
    ],
    ids=["empty", "two-gguf", "damaged-config"],
)
def test_folder_without_a_model_says_what_is_there(
    files: dict[str, str], text: str, tmp_path: Path
) -> None:
    """Catches a traceback for a path that is no model."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=text):
        open_checkpoint(tmp_path)


def test_absent_path_is_named(tmp_path: Path) -> None:
    """Catches a traceback for a mistyped path."""
    with pytest.raises(ConfigError, match=r"no-such, which does not exist"):
        open_checkpoint(tmp_path / "no-such")


def test_progress_counts_bytes_to_the_total(oracles: Oracles) -> None:
    """Catches a bar that stops short, runs over, or goes back."""
    checkpoint = open_checkpoint(oracles("qwen3_moe").folder)
    seen: list[tuple[int, int]] = []
    load_decoder(checkpoint, torch.float32, CPU, lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(tensor.nbytes for tensor in checkpoint.source.tensors.values())
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    checkpoint.close()


def test_byte_counts_match_the_loaded_model(oracles: Oracles) -> None:
    """Catches a memory plan that is not what loading takes."""
    oracle = oracles("mixtral")
    checkpoint = open_checkpoint(oracle.folder)
    expected = sum(parameter.numel() for parameter in oracle.model.parameters())
    for size in (2, 4):
        held = footprint.weights(checkpoint.spec, size)
        assert held.dense_bytes + held.expert_bytes == size * expected
    assert checkpoint.kv_bytes_per_token(torch.float32) == 3 * 2 * 2 * 12 * 4
    assert checkpoint.context == 128
    checkpoint.close()


def test_bfloat16_stays_close_to_float32(oracles: Oracles) -> None:
    """Catches a dtype that only some tensors have: the pass fails, or the logits are noise."""
    oracle = oracles("qwen3")
    (logits,) = Loop(opened(oracle.folder, torch.bfloat16)).step(
        [(Sequence(), oracle.prompt)], every_row=True
    )
    assert logits.dtype == torch.float32
    assert torch.cosine_similarity(logits, oracle.logits).min() > 0.99


class FailingSource:
    """A source whose second tensor cannot be read."""

    path = Path("broken")

    def __init__(self, names: list[str]) -> None:
        self.tensors = {name: StoredTensor(name, (48,), "F32", 192, self.path) for name in names}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name == "b":
            raise WeightError("expected 192 bytes of b, got 10 in broken")
        return torch.zeros(48, dtype=dtype)

    def close(self) -> None: ...


def test_failed_read_reaches_the_caller(oracles: Oracles) -> None:
    """Catches a reader thread that dies alone and leaves a tensor unwritten."""
    checkpoint = open_checkpoint(oracles("llama").folder)
    norms = [slot for slot in slots(checkpoint.spec) if slot.name.endswith("norm")][:3]
    checkpoint.close()
    names = ["a", "b", "c"]
    parts = [Part(name, slot, None, 0, 48, False) for name, slot in zip(names, norms, strict=True)]
    with pytest.raises(WeightError, match="got 10 in broken"):
        read_weights(FailingSource(names), parts, torch.float32, CPU, lambda _done, _total: None)


def test_many_parts_load_in_linear_time(oracles: Oracles) -> None:
    """Catches a loader that looks at every open read again for each one that ends."""
    checkpoint = open_checkpoint(oracles("llama").folder)
    norm = next(slot for slot in slots(checkpoint.spec) if slot.name == "norm")
    checkpoint.close()
    names = [f"n{index}" for index in range(20_000)]
    parts = [Part(name, norm, None, 0, 48, is_interleaved=False) for name in names]
    source = FailingSource(names)
    read_weights(source, parts, torch.float32, CPU, lambda _done, _total: None)
