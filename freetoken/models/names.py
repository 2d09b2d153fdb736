"""Tensor names that most Hugging Face decoders share; a model file joins the groups it has."""

from __future__ import annotations

PREFIX = "model.layers.{layer}."

TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}

NORMS = {"mixer.norm": "input_layernorm.weight", "ffn.norm": "post_attention_layernorm.weight"}

OUT = {"mixer.out.weight": "self_attn.o_proj.weight", "mixer.out.bias": "self_attn.o_proj.bias"}

QK_NORM = {"mixer.q_norm": "self_attn.q_norm.weight", "mixer.k_norm": "self_attn.k_norm.weight"}

QKV = {
    "mixer.qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "mixer.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
}

MLP_UP = {
    "ffn.up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
}

MLP_DOWN = {"ffn.down.weight": "mlp.down_proj.weight", "ffn.down.bias": "mlp.down_proj.bias"}

ROUTER = {"ffn.router.weight": "mlp.gate.weight"}

EXPERTS = {
    "ffn.up": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "ffn.down": ("mlp.experts.{expert}.down_proj.weight",),
}

STACKED_EXPERTS = {"ffn.up": "mlp.experts.gate_up_proj", "ffn.down": "mlp.experts.down_proj"}
"""Spelling of files whose experts are stacked already."""

ROTARY_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Old files carry a table that the config gives too."""
