"""OLMoE: norm over all query heads and all key heads, softmax top-k experts, plain weights.

Source: config.json and modeling code of allenai/OLMoE-1B-7B-0924. Parity: tests/models.
"""

from __future__ import annotations

from freetoken.models import hf, names
from freetoken.models.spec import Attention, Block, DecoderSpec, Moe, WeightMap

ARCHITECTURES = ("OlmoeForCausalLM",)


class HfConfig(hf.MoeConfig, frozen=True, kw_only=True):
    """Keys of this family alone. `intermediate_size` is the width of an expert."""

    norm_topk_prob: bool = False
    attention_bias: bool = False
    clip_qkv: float | None = None


def spec(c: HfConfig) -> DecoderSpec:
    """Describe the decoder of a config."""
    mixer = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.kv_heads,
        head_dim=c.width,
        rope=hf.rope(c),
        qk_norm="whole",
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
        clip=c.clip_qkv,
    )
    moe = Moe(c.experts, c.num_experts_per_tok, c.intermediate_size, renormalize=c.norm_topk_prob)
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
    rename=names.NORMS | names.OUT | names.QK_NORM | names.ROUTER | names.STACKED_EXPERTS,
    fuse=names.QKV,
    stack=names.EXPERTS,
    ignored=names.ROTARY_BUFFERS,
)
