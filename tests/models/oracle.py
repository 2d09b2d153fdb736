"""Tiny random checkpoints of each family, made and answered by transformers in fp32.

All matrices are drawn from N(0, 0.15) and norms and biases are perturbed: the default
initialisation hides wrong norms, unused biases and constant routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 97
PROMPT = 24
NEW = 32

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """One model: its transformers classes and what differs from `COMMON`."""

    config: Callable[..., Any]
    model: Callable[..., Any]
    settings: dict[str, Any]


T = transformers
CASES = {
    "llama": Case(T.LlamaConfig, T.LlamaForCausalLM, {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-biased-tied": Case(
        T.LlamaConfig,
        T.LlamaForCausalLM,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    "mistral": Case(
        T.MistralConfig, T.MistralForCausalLM, {"sliding_window": 7, "rope_parameters": PLAIN_ROPE}
    ),
    "qwen2": Case(
        T.Qwen2Config,
        T.Qwen2ForCausalLM,
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "qwen3": Case(
        T.Qwen3Config,
        T.Qwen3ForCausalLM,
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "qwen3_moe": Case(
        T.Qwen3MoeConfig,
        T.Qwen3MoeForCausalLM,
        {
            "head_dim": 20,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "mixtral": Case(
        T.MixtralConfig,
        T.MixtralForCausalLM,
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "olmoe": Case(
        T.OlmoeConfig,
        T.OlmoeForCausalLM,
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "clip_qkv": 1.0,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
}


@dataclass
class Oracle:
    """A saved checkpoint and what transformers says of it."""

    name: str
    folder: Path
    model: Any
    prompt: list[int]
    logits: Tensor
    """[prompt, vocab]"""
    greedy: list[int]
    """`NEW` tokens after the prompt."""

    def logits_of(self, tokens: list[int]) -> Tensor:
        """Answer any sequence: [tokens, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]


def build(name: str, folder: Path, **settings: Any) -> Oracle:
    """Make, save and run one tiny model."""
    case = CASES[name]
    torch.manual_seed(20)
    model = case.model(
        case.config(**(COMMON | case.settings | settings), attn_implementation="eager")
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model = model.float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                noise * 0.15 if parameter.dim() > 1 or "bias" in parameter_name else 1 + noise * 0.3
            )
    model.save_pretrained(folder)
    return answered(name, folder, model)


def answered(name: str, folder: Path, model: Any) -> Oracle:
    """Ask a model for its logits and its greedy continuation of a seeded prompt."""
    prompt = torch.randint(0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    oracle = Oracle(name, folder, model, prompt, torch.empty(0), [])
    oracle.logits = oracle.logits_of(prompt)
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(oracle.logits_of(tokens)[-1].argmax()))
    oracle.greedy = tokens[PROMPT:]
    return oracle
