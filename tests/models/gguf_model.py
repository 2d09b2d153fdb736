"""Writes a transformers model as a GGUF file, laid out as the public converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Compute the divisors that the converter bakes for Llama 3, written out as a loop."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            turns = rope["original_max_position_embeddings"] / wavelength
            smooth = (turns - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


def write(
    model: Any, path: Path, arch: str, quantization: gguf.GGMLQuantizationType | None = None
) -> None:
    """Write `model`; with a quantization, the model gets the values its matrices decode to."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor(
            "rope_freqs.weight", llama3_divisors(config.rope_parameters, head_dim).numpy()
        )
    for name, parameter in model.named_parameters():
        value = _stored(parameter, quantization)
        for gguf_name, piece in _pieces(name, value):
            if arch == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
                piece = piece.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)  # noqa: PLW2901
            _add(writer, gguf_name, piece, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(parameter: Tensor, quantization: gguf.GGMLQuantizationType | None) -> Tensor:
    """Round a parameter in place to what the file can hold. Routers stay, as in real files."""
    value = parameter.detach()
    if quantization is not None and _is_quantized(value):
        flat = value.flatten(0, -2).numpy()
        decoded = gguf.quants.dequantize(gguf.quants.quantize(flat, quantization), quantization)
        value.copy_(torch.from_numpy(decoded).view_as(value))
    return value


def _is_quantized(value: Tensor) -> bool:
    return value.dim() > 1 and value.shape[-2] > 8


def _pieces(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Rename one tensor; fused experts come apart into gate and up."""
    if name in TOP_NAMES:
        return [(TOP_NAMES[name], value)]
    layer, inner = name.removeprefix("model.layers.").split(".", 1)
    if inner == "mlp.experts.gate_up_proj":
        gate, up = value.chunk(2, dim=1)
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", gate),
            (f"blk.{layer}.ffn_up_exps.weight", up),
        ]
    return [(f"blk.{layer}.{LAYER_NAMES[inner]}", value)]


def _add(
    writer: gguf.GGUFWriter,
    name: str,
    value: Tensor,
    quantization: gguf.GGMLQuantizationType | None,
) -> None:
    array = np.ascontiguousarray(value.numpy())
    if quantization is None or not _is_quantized(value):
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, quantization), raw_dtype=quantization)
