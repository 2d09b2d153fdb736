"""The tensors a spec needs: name, shape, and runs of rows that checkpoints may keep apart."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.models.spec import Attention, Block, DecoderSpec, Moe


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the forward pass.

    name      `embed`, `head`, `norm`, or `layers.N.` + `mixer.qkv.weight`, `ffn.up.weight`, ...
    shape     as the layer holds it; matrices [out, in], stacked experts [experts, out, in]
    parts     rows (second last dimension, or the only one) of each piece that may be a tensor of
              its own
    head_dim  of rows that belong to rotary heads; 0 elsewhere
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    head_dim: int = 0

    @property
    def row_axis(self) -> int:
        """Dimension that pieces are laid along."""
        return max(0, len(self.shape) - 2)


def slots(spec: DecoderSpec) -> list[Slot]:
    """List every slot of the spec, in the order of the forward pass."""
    found = [_matrix("embed", spec.vocab, spec.hidden)]
    for layer, block in enumerate(spec.blocks):
        found += _block_slots(f"layers.{layer}.", block, spec.hidden)
    found.append(_vector("norm", spec.hidden))
    if not spec.is_tied:
        found.append(_matrix("head", spec.vocab, spec.hidden))
    return found


def _block_slots(where: str, block: Block, hidden: int) -> list[Slot]:
    found = [
        _vector(where + "mixer.norm", hidden),
        *_attention_slots(where + "mixer.", block.mixer, hidden),
    ]
    found.append(_vector(where + "ffn.norm", hidden))
    ffn = block.ffn
    if isinstance(ffn, Moe):
        found += [
            _matrix(where + "ffn.router.weight", ffn.experts, hidden),
            Slot(where + "ffn.up", (ffn.experts, 2 * ffn.inter, hidden), (ffn.inter, ffn.inter)),
            Slot(where + "ffn.down", (ffn.experts, hidden, ffn.inter), (hidden,)),
        ]
        return found
    up = (ffn.inter, ffn.inter)
    found += [
        Slot(where + "ffn.up.weight", (2 * ffn.inter, hidden), up),
        _matrix(where + "ffn.down.weight", hidden, ffn.inter),
    ]
    if ffn.bias:
        found += [
            Slot(where + "ffn.up.bias", (2 * ffn.inter,), up),
            _vector(where + "ffn.down.bias", hidden),
        ]
    return found


def _attention_slots(where: str, mixer: Attention, hidden: int) -> list[Slot]:
    q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    parts = (q, kv, kv)
    found = [
        Slot(where + "qkv.weight", (q + 2 * kv, hidden), parts, mixer.head_dim),
        _matrix(where + "out.weight", hidden, q),
    ]
    if mixer.qkv_bias:
        found.append(Slot(where + "qkv.bias", (q + 2 * kv,), parts, mixer.head_dim))
    if mixer.out_bias:
        found.append(_vector(where + "out.bias", hidden))
    if mixer.qk_norm == "head":
        found += [
            _vector(where + "q_norm", mixer.head_dim),
            _vector(where + "k_norm", mixer.head_dim),
        ]
    elif mixer.qk_norm == "whole":
        found += [_vector(where + "q_norm", q), _vector(where + "k_norm", kv)]
    return found


def _matrix(name: str, rows: int, columns: int) -> Slot:
    return Slot(name, (rows, columns), (rows,))


def _vector(name: str, width: int) -> Slot:
    return Slot(name, (width,), (width,))
