"""GGUF: metadata keys to the config of a family, and the tensor names of each architecture.

Knows the converter's habits (permuted rotary rows, baked rope scaling); not its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from freetoken.checkpoint.source import StoredTensor, TensorSource
from freetoken.errors import ConfigError
from freetoken.models.registry import BY_ARCHITECTURE
from freetoken.models.spec import DecoderSpec, WeightMap

TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}

ROPE_DIVISORS = "rope_freqs.weight"
"""Llama 3's scaling, computed by the converter: the frequencies are divided by it."""

QKV = {
    "mixer.qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "mixer.qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
}

RENAME = {
    "mixer.norm": "attn_norm.weight",
    "mixer.out.weight": "attn_output.weight",
    "mixer.out.bias": "attn_output.bias",
    "mixer.q_norm": "attn_q_norm.weight",
    "mixer.k_norm": "attn_k_norm.weight",
    "ffn.norm": "ffn_norm.weight",
    "ffn.down.weight": "ffn_down.weight",
    "ffn.down.bias": "ffn_down.bias",
    "ffn.router.weight": "ffn_gate_inp.weight",
    "ffn.up": "ffn_gate_up_exps.weight",
    "ffn.down": "ffn_down_exps.weight",
}

FUSE = QKV | {
    "ffn.up.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "ffn.up.bias": ("ffn_gate.bias", "ffn_up.bias"),
    "ffn.up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
}

STACK = {
    "ffn.up": ("ffn_gate.{expert}.weight", "ffn_up.{expert}.weight"),
    "ffn.down": ("ffn_down.{expert}.weight",),
}
"""Mixtral files from before 2024-04 keep each expert by itself."""

PLAIN = WeightMap(
    prefix="blk.{layer}.",
    top=TOP,
    rename=RENAME,
    fuse=FUSE,
    stack=STACK,
    ignored=(r"rope_freqs\.weight",),
)

PERMUTED = replace(
    PLAIN, interleaved=frozenset({"attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias"})
)
"""The converter turns query and key rows of Llama-like models to neighbouring rotary pairs."""

KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
}
"""GGUF key without the architecture -> key of config.json."""

NEEDED = (
    "block_count",
    "embedding_length",
    "context_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)

END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
"""End of text, of a turn, of a message: each ends a reply."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How one `general.architecture` is read, without and with experts; None: not supported."""

    dense: str | None
    moe: str | None
    weights: WeightMap


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "MixtralForCausalLM", PERMUTED),
    "qwen2": GgufFamily("Qwen2ForCausalLM", None, PLAIN),
    "qwen3": GgufFamily("Qwen3ForCausalLM", None, PLAIN),
    "qwen3moe": GgufFamily(None, "Qwen3MoeForCausalLM", PLAIN),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a GGUF header says: what config.json and a model file say together."""

    spec: DecoderSpec
    config: Mapping[str, Any]
    weights: WeightMap


def describe(source: TensorSource, metadata: Mapping[str, Any]) -> GgufModel:
    """Make spec and weight map of an open GGUF file. Reads one small tensor: baked rope scaling.

    Raises ConfigError: architecture or variant not supported, a key missing.
    """
    config = hf_config(metadata, source.tensors, source.path)
    architecture = str(config["architectures"][0])
    spec = BY_ARCHITECTURE[architecture].describe(config)
    if ROPE_DIVISORS in source.tensors:
        values = [float(value) for value in source.read(ROPE_DIVISORS, torch.float32).flatten()]
        blocks = [
            replace(
                block,
                mixer=replace(block.mixer, rope=replace(block.mixer.rope, divisors=tuple(values))),
            )
            for block in spec.blocks
        ]
        spec = replace(spec, blocks=tuple(blocks))
    return GgufModel(spec, config, FAMILIES[str(metadata["general.architecture"])].weights)


def hf_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], path: Path
) -> dict[str, Any]:
    """Translate metadata to keys of config.json; tied head and biases come from the tensors."""
    name = str(metadata.get("general.architecture", ""))
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"GGUF architecture {name!r} is not supported ({path.name});"
            f" supported: {', '.join(sorted(FAMILIES))}"
        )
    for key in NEEDED:
        if f"{name}.{key}" not in metadata:
            raise ConfigError(
                f"expected key {name}.{key} in the GGUF header, got none in {path};"
                " convert the model again"
            )
    config: dict[str, Any] = {
        target: _plain(metadata[f"{name}.{key}"], f"{name}.{key}", path)
        for key, target in KEYS.items()
        if f"{name}.{key}" in metadata
    }
    num_experts = int(metadata.get(f"{name}.expert_count", 0))
    architecture = family.moe if num_experts else family.dense
    if architecture is None:
        raise ConfigError(
            f"expected {name}.expert_count to be {'0' if num_experts else 'set'},"
            f" got {num_experts} in {path}"
        )
    config["architectures"] = [architecture]
    config["num_experts"] = config["num_local_experts"] = num_experts
    config["norm_topk_prob"] = bool(metadata.get(f"{name}.expert_weights_norm", True))
    config["tie_word_embeddings"] = TOP["head"] not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if "vocab_size" not in config and TOP["embed"] in tensors:
        config["vocab_size"] = tensors[TOP["embed"]].shape[0]
    if num_experts:
        # Files of Mixtral give the experts' width under either key; a file without dense layers may
        # lack the first.
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    _add_rope(config, metadata, name)
    return config


def end_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Collect every id that ends a reply."""
    return frozenset(int(metadata[key]) for key in END_KEYS if key in metadata)


def _add_rope(config: dict[str, Any], metadata: Mapping[str, Any], name: str) -> None:
    kind = str(metadata.get(f"{name}.rope.scaling.type", "none"))
    if kind != "none":
        config["rope_scaling"] = {
            "rope_type": kind,
            "factor": metadata.get(f"{name}.rope.scaling.factor"),
        }
    width = config.get("head_dim") or config["hidden_size"] // max(1, config["num_attention_heads"])
    config["partial_rotary_factor"] = (
        int(metadata.get(f"{name}.rope.dimension_count", width)) / width
    )


def _plain(value: object, key: str, path: Path) -> object:
    """Return one number for all layers; GGUF may give a list, one a layer."""
    if not isinstance(value, list | tuple):
        return value
    different = set(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if len(different) != 1:  # pyright: ignore[reportUnknownArgumentType]
        raise ConfigError(
            f"expected one {key} for all layers, got {value} in {path};"
            " this variant is not supported"
        )
    return different.pop()  # pyright: ignore[reportUnknownVariableType]
