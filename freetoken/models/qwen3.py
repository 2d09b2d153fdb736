"""Qwen3 (dense): norm of each query and key head before the rotation; bias if configured.

Source: config.json and modeling code of Qwen/Qwen3-8B. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, WeightMap

ARCHITECTURES = ("Qwen3ForCausalLM",)

HEAD_DIM = 128
"""What a config without head_dim means in this family; hidden_size / heads would be wrong."""


class HfConfig(hf.DecoderConfig, frozen=True, kw_only=True):
    """Keys of this family alone."""

    head_dim: int | None = HEAD_DIM
    attention_bias: bool = False
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


def spec(c: HfConfig) -> DecoderSpec:
    """Describe the decoder of a config."""

    def block(window: int | None) -> Block:
        mixer = Attention(
            heads=c.num_attention_heads,
            kv_heads=c.kv_heads,
            head_dim=c.width,
            rope=hf.rope(c),
            qk_norm="head",
            qkv_bias=c.attention_bias,
            out_bias=c.attention_bias,
            window=window,
        )
        return Block(mixer, Mlp(c.intermediate_size))

    return DecoderSpec(
        hidden=c.hidden_size,
        vocab=c.vocab_size,
        norm_eps=c.rms_norm_eps,
        blocks=tuple(
            block(window) for window in hf.qwen_windows(c, c.layer_types, c.max_window_layers)
        ),
        context=c.max_position_embeddings,
        is_tied=c.tie_word_embeddings,
    )


WEIGHTS = WeightMap(
    prefix=names.PREFIX,
    top=names.TOP,
    rename=names.NORMS | names.OUT | names.MLP_DOWN | names.QK_NORM,
    fuse=names.QKV | names.MLP_UP,
    ignored=names.ROTARY_BUFFERS,
)
