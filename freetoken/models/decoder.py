"""The forward pass: one for every model, driven by its spec. Knows no requests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.kernels.paged_attention import plan_attention
from freetoken.kvcache.pool import KvPool
from freetoken.layers.attention import AttentionStep
from freetoken.layers.cpu import cpu_kernels
from freetoken.layers.linear import Embedding
from freetoken.layers.rope import RopeAngles
from freetoken.layers.step import StepInput
from freetoken.models.build import LayerBuilder
from freetoken.models.spec import DecoderSpec
from freetoken.native import Native


class Decoder:
    """Owns the weights of a model. Keeps nothing between steps; used from one thread."""

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Tensor], native: Native | None = None
    ) -> None:
        """Take the tensors named by `slots(spec)`, all of one dtype on one device.

        `native` speeds up decode steps on a CPU; the caller keeps it open while the decoder lives.
        """
        self.spec = spec
        self.embed = Embedding(weights["embed"])
        self.dtype = self.embed.weight.dtype
        self.device = self.embed.weight.device
        self._cpu = cpu_kernels(native, self.dtype, self.device)
        build = LayerBuilder(spec, weights, self._cpu)
        self.layers = [build.layer(index) for index in range(len(spec.blocks))]
        self.norm = build.norm("norm")
        self.head = build.linear("embed" if spec.is_tied else "head")
        self._angles = {layer.rope: RopeAngles(layer.rope, self.device) for layer in self.layers}
        self._windows = {layer.window for layer in self.layers}

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KvPool) -> Tensor:
        """Run one step: write its keys and values to `kv`, return logits.

        out  [sample rows, vocab] float32
        A row's logits depend on its own sequence only, up to fp32 rounding.
        """
        about = self._about(step, kv)
        residual = self.embed(step.tokens)
        x = self.layers[0].mixer_norm(residual)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer.mixer(x, about[index])
            if index == last:
                # Nothing after the last keys and values matters for rows that nobody samples.
                x = x.index_select(0, step.sample_rows)
                residual = residual.index_select(0, step.sample_rows)
            x = layer.ffn(layer.ffn_norm.add(x, residual))
            x = (self.norm if index == last else self.layers[index + 1].mixer_norm).add(x, residual)
        return self.head(x).float()

    def _about(self, step: StepInput, kv: KvPool) -> list[AttentionStep]:
        """Tell each layer its part; what layers share is worked out once a step."""
        has_decode_kernel = self._cpu is not None and self._cpu.has_attention(kv.dtype)
        angles = {rope: turn(step.positions) for rope, turn in self._angles.items()}
        plans = {
            window: plan_attention(
                step.q_ends,
                step.kv_lens,
                step.page_table,
                step.page_tokens,
                window=window,
                has_decode_kernel=has_decode_kernel,
            )
            for window in self._windows
        }
        return [
            AttentionStep(*angles[layer.rope], step.write_slots, k, v, plans[layer.window])
            for layer, k, v in zip(self.layers, kv.k, kv.v, strict=True)
        ]
