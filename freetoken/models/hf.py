"""Hugging Face config.json: the keys that all our families share, read into the values of a spec.

Values that the forward pass would get wrong are refused with key, value and what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from freetoken.errors import ConfigError
from freetoken.models.spec import Llama3Scaling, Rope

DEFAULT_THETA = 10000.0
"""What files without rope_theta mean: the first Llama's value."""

ROPE_TYPES = ("default", "linear", "llama3")


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a decoder-only model. Those without a default are required, unknown ones allowed."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    """Spelling before transformers 5."""
    rope_parameters: dict[str, Any] | None = None
    """Spelling since transformers 5; it holds rope_theta too."""
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    """Only the families of Qwen have it; elsewhere a window that is set is used."""
    quantization_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.hidden_act != "silu":
            refuse("hidden_act", self.hidden_act, "'silu'")
        if self.quantization_config is not None:
            method = self.quantization_config.get("quant_method", "unknown")
            refuse(
                "quantization_config",
                f"quant_method {method!r}",
                "unquantized weights, or a GGUF file",
            )

    @property
    def kv_heads(self) -> int:
        """Key heads; as many as query heads if the file does not say."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width(self) -> int:
        """Elements a head."""
        return self.head_dim or self.hidden_size // max(1, self.num_attention_heads)


class MoeConfig(DecoderConfig, frozen=True, kw_only=True):
    """Adds the keys of models with experts; the number of them goes by two names."""

    num_experts_per_tok: int
    num_experts: int | None = None
    num_local_experts: int | None = None

    @property
    def experts(self) -> int:
        """Experts a layer. Raises ConfigError if neither name is there, or if they differ."""
        found = {count for count in (self.num_experts, self.num_local_experts) if count is not None}
        if len(found) != 1:
            refuse(
                "num_experts or num_local_experts",
                " and ".join(map(str, found)) or "neither",
                "one number",
            )
        return found.pop()


def refuse(key: str, value: object, accepted: str) -> NoReturn:
    """Raise the ConfigError of a value that the forward pass has no mathematics for."""
    raise ConfigError(
        f"expected {key} to be {accepted}, got {value} in the model's config;"
        " this variant is not supported"
    )


def rope(config: DecoderConfig, default_theta: float = DEFAULT_THETA) -> Rope:
    """Read the rotary embedding from either spelling.

    Raises ConfigError for a type other than `ROPE_TYPES` and for missing numbers of a type.
    """
    key = "rope_scaling" if config.rope_parameters is None else "rope_parameters"
    values = config.rope_scaling if config.rope_parameters is None else config.rope_parameters
    values = values or {}
    if values and all(isinstance(value, dict) for value in values.values()):
        refuse(key, f"one set for each of {', '.join(values)}", "one set for all layers")
    kind = values.get("rope_type", values.get("type", "default"))
    theta = _number(values, key, "rope_theta", config.rope_theta or default_theta)
    partial = _number(values, key, "partial_rotary_factor", config.partial_rotary_factor or 1.0)
    dim = int(config.width * partial)
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, linear_factor=_number(values, key, "factor"))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_number(values, key, "factor"),
            low_freq_factor=_number(values, key, "low_freq_factor"),
            high_freq_factor=_number(values, key, "high_freq_factor"),
            original_context=int(
                _number(
                    values, key, "original_max_position_embeddings", config.max_position_embeddings
                )
            ),
        )
        return Rope(theta, dim, llama3=scaling)
    return refuse(f"{key}.rope_type", repr(kind), " or ".join(map(repr, ROPE_TYPES)))


def qwen_windows(
    config: DecoderConfig, layer_types: tuple[str, ...] | None, max_window_layers: int
) -> list[int | None]:
    """Return each layer's window: by layer_types, or from max_window_layers on; all None if off."""
    window = config.sliding_window if config.use_sliding_window else None
    layers = config.num_hidden_layers
    if layer_types is None:
        return [window if layer >= max_window_layers else None for layer in range(layers)]
    if len(layer_types) != layers:
        refuse(
            "layer_types", f"{len(layer_types)} entries", f"one entry for each of {layers} layers"
        )
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            refuse("layer_types", repr(kind), "'full_attention' or 'sliding_attention'")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def _number(values: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        refuse(f"{key}.{name}", repr(value), "a positive number")
    return float(value)
