"""Decode steps as CUDA graphs: one for each number of rows, with and without random draws, sampling
included, captured before the first request.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freetoken.engine.cuda_batch import DecodeBatch
from freetoken.engine.cuda_choice import RowChooser
from freetoken.kvcache.pool import KvPool
from freetoken.models.cuda_forward import MAX_BATCH, CudaForward

_WARM_RUNS = 2
"""Runs before capture: the first compiles kernels, the second takes the memory it will keep."""


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a decode step leaves on the device, valid until the next run.

    logits    [rows, vocab] float32
    ids       [rows] int64
    is_sound  [rows] int8
    """

    logits: Tensor
    ids: Tensor
    is_sound: Tensor


class DecodeGraphs:
    """Owns the graphs and their outputs. With `is_eager` it computes the same without graphs."""

    def __init__(
        self,
        forward: CudaForward,
        kv: KvPool,
        batch: DecodeBatch,
        chooser: RowChooser,
        *,
        is_eager: bool = False,
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._batch = batch
        self._chooser = chooser
        self._is_eager = is_eager
        self._scratch = forward.make_scratch()
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    def capture(self, max_rows: int) -> None:
        """Compile, warm and capture 1 to `max_rows` rows on the current stream."""
        pool: Any = None
        gc.collect()
        for rows in range(min(max_rows, MAX_BATCH), 0, -1):
            for draws in (False, True):
                for _ in range(_WARM_RUNS):
                    self._step(rows, draws=draws)
                if not self._is_eager:
                    graph, output = self._capture_step(rows, pool, draws=draws)
                    pool = pool or graph.pool()
                    self._graphs[rows, draws] = (graph, output)

    def _capture_step(
        self,
        rows: int,
        pool: Any,  # noqa: ANN401 - torch's own opaque handle
        *,
        draws: bool,
    ) -> tuple[torch.cuda.CUDAGraph, DecodeOutput]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of an embedding program may use the device meanwhile; garbage of this one,
        # such as an earlier engine's graphs, may not be freed: that ends the capture.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                output = self._step(rows, draws=draws)
        finally:
            if is_collecting:
                gc.enable()
        return graph, output

    def run(self, rows: int, *, draws: bool) -> DecodeOutput:
        """Run a filled and staged step."""
        if self._is_eager:
            return self._step(rows, draws=draws)
        graph, output = self._graphs[rows, draws]
        graph.replay()
        return output

    def _step(self, rows: int, *, draws: bool) -> DecodeOutput:
        logits = self._forward.decode(self._batch.rows(rows), self._kv, self._scratch)
        return DecodeOutput(logits, *self._chooser.sample(logits, draws=draws))
