"""Llama (and SmolLM2): grouped-query attention, dense gated feed-forward.

Source: config.json and modeling code of meta-llama/Llama-3.1-8B. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, WeightMap

ARCHITECTURES = ("LlamaForCausalLM",)


class HfConfig(hf.DecoderConfig, frozen=True, kw_only=True):
    """Keys of this family alone."""

    attention_bias: bool = False
    mlp_bias: bool = False


def spec(c: HfConfig) -> DecoderSpec:
    """Describe the decoder of a config."""
    mixer = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.kv_heads,
        head_dim=c.width,
        rope=hf.rope(c),
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
    )
    block = Block(mixer, Mlp(c.intermediate_size, bias=c.mlp_bias))
    return DecoderSpec(
        hidden=c.hidden_size,
        vocab=c.vocab_size,
        norm_eps=c.rms_norm_eps,
        blocks=(block,) * c.num_hidden_layers,
        context=c.max_position_embeddings,
        is_tied=c.tie_word_embeddings,
    )


WEIGHTS = WeightMap(
    prefix=names.PREFIX,
    top=names.TOP,
    rename=names.NORMS | names.OUT | names.MLP_DOWN,
    fuse=names.QKV | names.MLP_UP,
    ignored=names.ROTARY_BUFFERS,
)
