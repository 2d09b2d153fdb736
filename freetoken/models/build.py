"""Putting a decoder's layers together from the tensors of its slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.layers.attention import GroupedAttention, HeadNorm, WholeNorm
from freetoken.layers.cpu import CpuKernels
from freetoken.layers.linear import Linear
from freetoken.layers.mlp import GatedMlp
from freetoken.layers.moe import SparseMoe
from freetoken.layers.norm import RmsNorm
from freetoken.layers.rope import Rope
from freetoken.models.spec import Attention, DecoderSpec, Mlp, Moe


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block with its weights."""

    mixer_norm: RmsNorm
    mixer: GroupedAttention
    ffn_norm: RmsNorm
    ffn: GatedMlp | SparseMoe
    rope: Rope
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Makes layers of `weights`, which holds a tensor for each of `slots(spec)`."""

    spec: DecoderSpec
    weights: Mapping[str, Tensor]
    cpu: CpuKernels | None

    def layer(self, index: int) -> DecoderLayer:
        """Build one block."""
        where, block = f"layers.{index}.", self.spec.blocks[index]
        return DecoderLayer(
            mixer_norm=self.norm(where + "mixer.norm"),
            mixer=self._attention(block.mixer, where + "mixer."),
            ffn_norm=self.norm(where + "ffn.norm"),
            ffn=self._ffn(block.ffn, where + "ffn."),
            rope=block.mixer.rope,
            window=block.mixer.window,
        )

    def norm(self, name: str) -> RmsNorm:
        """Build a norm over the hidden dimension."""
        return RmsNorm(self.weights[name], self.spec.norm_eps)

    def linear(self, weight: str, bias: str = "") -> Linear:
        """Build a matrix; a bias that has no tensor is none."""
        return Linear(self.weights[weight], self.weights.get(bias), self.cpu)

    def _attention(self, mixer: Attention, where: str) -> GroupedAttention:
        return GroupedAttention(
            qkv=self.linear(where + "qkv.weight", where + "qkv.bias"),
            out=self.linear(where + "out.weight", where + "out.bias"),
            qk_norm=self._qk_norm(mixer, where),
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.head_dim**-0.5,
            clip=mixer.clip,
            cpu=self.cpu,
        )

    def _qk_norm(self, mixer: Attention, where: str) -> HeadNorm | WholeNorm | None:
        if mixer.qk_norm == "none":
            return None
        q, k = self.weights[where + "q_norm"], self.weights[where + "k_norm"]
        if mixer.qk_norm == "whole":
            return WholeNorm(q, k, self.spec.norm_eps)
        each = torch.cat([q.expand(mixer.heads, -1), k.expand(mixer.kv_heads, -1)])
        return HeadNorm(each, self.spec.norm_eps)

    def _ffn(self, ffn: Mlp | Moe, where: str) -> GatedMlp | SparseMoe:
        if isinstance(ffn, Mlp):
            return GatedMlp(
                up=self.linear(where + "up.weight", where + "up.bias"),
                down=self.linear(where + "down.weight", where + "down.bias"),
            )
        return SparseMoe(
            # Torch: a router is too small to be worth waking threads for.
            router=Linear(self.weights[where + "router.weight"]),
            up=self.weights[where + "up"],
            down=self.weights[where + "down"],
            top_k=ffn.top_k,
            renormalize=ffn.renormalize,
            cpu=self.cpu,
        )
