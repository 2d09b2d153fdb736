"""Decode steps as CUDA graphs: one for each number of rows, greedy sampling inside, captured before
the first request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.engine.cuda_batch import DecodeBatch
from freetoken.kvcache.pool import KvPool
from freetoken.models.cuda_forward import MAX_BATCH, CudaForward

_WARM_RUNS = 2
"""Runs before capture: the first compiles kernels, the second takes the memory it will keep."""


class DecodeGraphs:
    """Owns the graphs and their outputs. `is_eager` computes the same without graphs."""

    def __init__(
        self, forward: CudaForward, kv: KvPool, batch: DecodeBatch, *, is_eager: bool = False
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._batch = batch
        self._is_eager = is_eager
        self._scratch = forward.make_scratch()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def capture(self, max_rows: int) -> None:
        """Compile, warm and capture 1 to `max_rows` rows on the current stream."""
        pool = None
        for rows in range(min(max_rows, MAX_BATCH), 0, -1):
            for _ in range(_WARM_RUNS):
                self._step(rows)
            if self._is_eager:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                outputs = self._step(rows)
            pool = pool or graph.pool()
            self._graphs[rows] = (graph, *outputs)

    def run(self, rows: int) -> tuple[Tensor, Tensor]:
        """Run a filled step. Out: logits [rows, vocab] float32, their likeliest ids [rows] int64;
        valid until the next run.
        """
        if self._is_eager:
            return self._step(rows)
        graph, logits, ids = self._graphs[rows]
        graph.replay()
        return logits, ids

    def _step(self, rows: int) -> tuple[Tensor, Tensor]:
        logits = self._forward.decode(self._batch.rows(rows), self._kv, self._scratch)
        ids = logits.argmax(-1)
        self._batch.last_ids[self._batch.slots(rows)] = ids
        return logits, ids
