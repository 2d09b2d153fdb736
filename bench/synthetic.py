"""A model with true shapes and random weights, made in memory: for speed and memory only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from freetoken.models.decoder import Decoder
from freetoken.models.registry import family_of
from freetoken.models.slots import slots
from freetoken.models.spec import DecoderSpec

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""The public checkpoint's config values; layers can be fewer."""

_ROUTER_SKEW = 0.5
"""Log-normal spread of the router's rows: some experts are picked far more often, as in trained
models."""


def qwen3_spec(layers: int) -> DecoderSpec:
    """Qwen3-30B-A3B with `layers` layers."""
    config = QWEN3_30B | {"num_hidden_layers": layers}
    return family_of(config).describe(config)


def random_decoder(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Weights with the spread of a trained model's, the same each time."""
    draw = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for slot in slots(spec):
        if slot.name.endswith("norm"):
            weights[slot.name] = torch.ones(slot.shape, dtype=dtype, device=device)
            continue
        spread = 1.0 if slot.name == "embed" else slot.shape[-1] ** -0.5
        tensor = torch.empty(slot.shape, dtype=dtype, device=device)
        for part in tensor if tensor.dim() == 3 else [tensor]:
            part.normal_(0.0, spread, generator=draw)
        if slot.name.endswith("router"):
            rows = torch.randn(slot.shape[0], 1, generator=draw, device=device)
            tensor *= 2.0 * torch.exp(_ROUTER_SKEW * rows).to(dtype)
        weights[slot.name] = tensor
    return Decoder(spec, weights)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer with filler words up to `vocab`: every sampled id decodes to text."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120w{i}" for i in range(vocab - len(letters) - len(special))]
    entries = {piece: i for i, piece in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
