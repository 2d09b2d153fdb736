"""Qwen2 and Qwen2.5: bias on query, key and value; perhaps a window on the upper layers.

Source: config.json and modeling code of Qwen/Qwen2.5-7B. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, WeightMap

ARCHITECTURES = ("Qwen2ForCausalLM",)


class HfConfig(hf.DecoderConfig, frozen=True, kw_only=True):
    """Keys of this family alone."""

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
            qkv_bias=True,
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
    rename=names.NORMS | names.OUT | names.MLP_DOWN,
    fuse=names.QKV | names.MLP_UP,
    ignored=names.ROTARY_BUFFERS,
)
