"""What a decoder is, as data: all that the forward pass and the loader read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from freetoken.errors import ConfigError
from freetoken.layers.rope import Llama3Scaling, Rope

__all__ = ["Attention", "Block", "DecoderSpec", "Llama3Scaling", "Mlp", "Moe", "Rope", "WeightMap"]

QkNorm = Literal["none", "head", "whole"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention; scores are divided by the square root of head_dim."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: QkNorm = "none"
    """Norm of queries and keys before the rotation: of each head, or of all heads together."""
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    """Keys a row sees, its own included; None is all."""
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """Dense gated feed-forward."""

    inter: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Moe:
    """Softmax router over experts that are gated feed-forwards."""

    experts: int
    top_k: int
    inter: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: norm, mixer, norm, feed-forward, each half added to the residual stream."""

    mixer: Attention
    ffn: Mlp | Moe


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder. Building one checks that its numbers fit together (ConfigError)."""

    hidden: int
    vocab: int
    norm_eps: float
    blocks: tuple[Block, ...]
    context: int
    """Most tokens of prompt and reply together."""
    is_tied: bool = False
    """The output matrix is the embedding table."""

    def __post_init__(self) -> None:
        for name, value in (
            ("hidden", self.hidden),
            ("vocab", self.vocab),
            ("context", self.context),
        ):
            _expect(value > 0, name, "at least 1", value)
        _expect(len(self.blocks) > 0, "layers", "at least 1", 0)
        for layer, block in enumerate(self.blocks):
            _check_block(block, f"layers.{layer}")

    def kv_layers(self) -> list[tuple[int, int]]:
        """Return (kv_heads, head_dim) of each layer, as KvPool takes them."""
        return [(block.mixer.kv_heads, block.mixer.head_dim) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Which checkpoint tensors fill a slot (`models/slots.py`). A slot may have several spellings.

    Names are templates: {layer} and {expert} stand for numbers; those in `rename`, `fuse` and
    `stack` that belong to a
    layer are written without `prefix`. For each slot the first spelling of which the checkpoint has
    a tensor is used.
    """

    prefix: str
    """What stands before a layer's names, with {layer}."""
    top: Mapping[str, str] = field(default_factory=dict[str, str])
    """Slots outside the layers: one whole name each."""
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    """One tensor is the whole slot."""
    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Rows of several tensors laid end to end."""
    stack: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Tensors of each {expert}: their rows end to end, then the experts on top of each other."""
    interleaved: frozenset[str] = frozenset()
    """Names whose rotary rows are stored as pairs (0, 1), (2, 3), not as halves of the head."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of whole names that are not weights of the forward pass."""


def _expect(is_right: bool, key: str, wanted: str, got: object) -> None:
    if not is_right:
        raise ConfigError(
            f"expected {key} to be {wanted}, got {got};"
            " the model's config does not describe a decoder"
        )


def _check_block(block: Block, where: str) -> None:
    mixer, ffn = block.mixer, block.ffn
    _expect(mixer.kv_heads > 0, f"{where} key heads", "at least 1", mixer.kv_heads)
    _expect(mixer.heads > 0, f"{where} heads", "at least 1", mixer.heads)
    _expect(
        mixer.heads % mixer.kv_heads == 0,
        f"{where} heads",
        f"a multiple of {mixer.kv_heads} key heads",
        mixer.heads,
    )
    _expect(mixer.head_dim > 0, f"{where} head_dim", "at least 1", mixer.head_dim)
    is_even = mixer.rope.dim % 2 == 0 and 0 < mixer.rope.dim <= mixer.head_dim
    _expect(
        is_even, f"{where} rotary dimension", f"even and at most {mixer.head_dim}", mixer.rope.dim
    )
    num_divisors = len(mixer.rope.divisors)
    _expect(
        num_divisors in (0, mixer.rope.dim // 2),
        f"{where} rotary divisors",
        str(mixer.rope.dim // 2),
        num_divisors,
    )
    _expect(mixer.window is None or mixer.window > 0, f"{where} window", "at least 1", mixer.window)
    _expect(ffn.inter > 0, f"{where} feed-forward width", "at least 1", ffn.inter)
    if isinstance(ffn, Moe):
        _expect(
            0 < ffn.top_k <= ffn.experts,
            f"{where} experts per token",
            f"1 to {ffn.experts}",
            ffn.top_k,
        )
