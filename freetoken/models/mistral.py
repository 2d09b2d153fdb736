"""Mistral: as Llama, with a sliding window on every layer if the config sets one.

Source: config.json and modeling code of mistralai/Mistral-7B-v0.1. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, WeightMap

ARCHITECTURES = ("MistralForCausalLM",)


class HfConfig(hf.DecoderConfig, frozen=True, kw_only=True):
    """Has the common keys only."""


def spec(c: HfConfig) -> DecoderSpec:
    """Describe the decoder of a config."""
    mixer = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.kv_heads,
        head_dim=c.width,
        rope=hf.rope(c),
        window=c.sliding_window,
    )
    return DecoderSpec(
        hidden=c.hidden_size,
        vocab=c.vocab_size,
        norm_eps=c.rms_norm_eps,
        blocks=(Block(mixer, Mlp(c.intermediate_size)),) * c.num_hidden_layers,
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
