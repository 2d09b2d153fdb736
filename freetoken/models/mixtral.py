"""Mixtral: softmax top-k experts on every layer, weights of the chosen divided by their sum.

Source: config.json and modeling code of mistralai/Mixtral-8x7B-v0.1. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Moe, WeightMap

ARCHITECTURES = ("MixtralForCausalLM",)

DEFAULT_THETA = 1e6


class HfConfig(hf.MoeConfig, frozen=True, kw_only=True):
    """Has the common keys only. `intermediate_size` is the width of an expert."""


def spec(c: HfConfig) -> DecoderSpec:
    """Describe the decoder of a config."""
    mixer = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.kv_heads,
        head_dim=c.width,
        rope=hf.rope(c, DEFAULT_THETA),
        window=c.sliding_window,
    )
    moe = Moe(c.experts, c.num_experts_per_tok, c.intermediate_size, renormalize=True)
    return DecoderSpec(
        hidden=c.hidden_size,
        vocab=c.vocab_size,
        norm_eps=c.rms_norm_eps,
        blocks=(Block(mixer, moe),) * c.num_hidden_layers,
        context=c.max_position_embeddings,
        is_tied=c.tie_word_embeddings,
    )


WEIGHTS = WeightMap(
    prefix=names.PREFIX,
    top=names.TOP,
    rename=names.NORMS | names.OUT | names.ROUTER | names.STACKED_EXPERTS,
    fuse=names.QKV | {"ffn.router.weight": ("block_sparse_moe.gate.weight",)},
    stack={
        "ffn.up": (
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        "ffn.down": ("block_sparse_moe.experts.{expert}.w2.weight",),
    },
    ignored=names.ROTARY_BUFFERS,
)
