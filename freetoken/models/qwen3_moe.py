"""Qwen3-MoE: norm of each query and key head, softmax top-k experts, perhaps some dense layers.

Source: config.json and modeling code of Qwen/Qwen3-30B-A3B. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Mlp, Moe, WeightMap

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


class HfConfig(hf.MoeConfig, frozen=True, kw_only=True):
    """Keys of this family alone."""

    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    attention_bias: bool = False

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward instead of experts."""
        return (
            layer in (self.mlp_only_layers or ())
            or (layer + 1) % max(1, self.decoder_sparse_step) != 0
        )


def spec(c: HfConfig) -> DecoderSpec:
    """Describe the decoder of a config."""
    mixer = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.kv_heads,
        head_dim=c.width,
        rope=hf.rope(c),
        qk_norm="head",
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
        window=c.sliding_window if c.use_sliding_window else None,
    )
    dense = Block(mixer, Mlp(c.intermediate_size))
    moe = Moe(
        c.experts, c.num_experts_per_tok, c.moe_intermediate_size, renormalize=c.norm_topk_prob
    )
    sparse = Block(mixer, moe)
    return DecoderSpec(
        hidden=c.hidden_size,
        vocab=c.vocab_size,
        norm_eps=c.rms_norm_eps,
        blocks=tuple(
            dense if c.is_dense(layer) else sparse for layer in range(c.num_hidden_layers)
        ),
        context=c.max_position_embeddings,
        is_tied=c.tie_word_embeddings,
    )


WEIGHTS = WeightMap(
    prefix=names.PREFIX,
    top=names.TOP,
    rename=names.NORMS
    | names.OUT
    | names.MLP_DOWN
    | names.QK_NORM
    | names.ROUTER
    | names.STACKED_EXPERTS,
    fuse=names.QKV | names.MLP_UP,
    stack=names.EXPERTS,
    ignored=names.ROTARY_BUFFERS,
)
