"""Steps on a GPU. One named thread enqueues them on one stream; a word in pinned memory, written
after each step, tells the loop through the native watcher that it is done.

A step's decoding sequences run as one captured graph; its prompt chunks run eagerly behind it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from freetoken.engine.cuda_batch import (
    DecodeBatch,
    prefill_rows,
    warm_lengths,
    warm_rows,
)
from freetoken.engine.cuda_choice import ChoiceTables, Chosen, RowChooser
from freetoken.engine.cuda_graphs import DecodeGraphs
from freetoken.engine.cuda_signal import CudaSignal
from freetoken.engine.request import Chunk, Sampled, Sequence, StepResult
from freetoken.engine.step_thread import SlotStart, StepThread, StepWork
from freetoken.errors import DeviceError
from freetoken.kvcache.pool import KvPool
from freetoken.models.cuda_forward import MAX_BATCH, CudaForward
from freetoken.models.decoder import Decoder
from freetoken.types import SamplingParams, TokenLogprob

_STEP_LIMIT_S = 60.0
"""No step takes longer on a GPU: 8k prompt tokens of a resident model are under a second. At half a
slow card with a long chunk might be taken for lost; at double a lost one is noticed a minute later.
"""


@dataclass(slots=True)
class _Launched:
    chunks: Seq[Chunk]
    sampling: list[Chunk]
    """Chunks that sample, in the order of the result row."""
    logprobs: list[TokenLogprob | None]
    skipped: set[int]


class CudaRunner:
    """Owns stream, graphs, sampler and the runner thread. Made inside the running loop."""

    depth = 2

    def __init__(
        self,
        decoder: Decoder,
        kv: KvPool,
        max_running: int,
        max_pages: int,
        *,
        is_eager: bool = False,
    ) -> None:
        self._kv = kv
        self._forward = CudaForward(decoder)
        self._stream = torch.cuda.Stream(decoder.device)
        self._batch = DecodeBatch(max_running, max_pages, kv.page_tokens, decoder.device)
        self._tables = ChoiceTables(max_running, decoder.spec.vocab, decoder.device)
        self._decoding = RowChooser(self._tables, max_running)
        self._prompts = RowChooser(self._tables, max_running)
        self._graphs = DecodeGraphs(
            self._forward, kv, self._batch, self._decoding, is_eager=is_eager
        )
        self._signal = CudaSignal(max_running, decoder.device)
        self._launched: dict[int, _Launched | Exception] = {}
        self._ended_at = 0.0
        self._thread = StepThread(max_running, self._serve)

    def warm(self, max_prefill_tokens: int) -> None:
        """Compile every kernel and capture every graph; blocks. Before the first launch only."""
        self._thread.call(lambda: self._warm(max_prefill_tokens))

    def _warm(self, max_prefill_tokens: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._graphs.capture(self._batch.last_ids.shape[0])
            for tokens in warm_lengths(max_prefill_tokens):
                rows = warm_rows(tokens, self._batch)
                logits = self._forward.prefill(rows, self._kv)
                for draws in (False, True):
                    self._prompts.sample(logits, draws=draws)
            self._rehearse()
            self._batch.last_ids.zero_()
            self._stream.synchronize()

    def _rehearse(self) -> None:
        """Run a made-up request the whole way, as step 0, which nobody waits for."""
        params = SamplingParams(max_tokens=2, temperature=1.0)
        page_tokens = self._kv.page_tokens
        room = self._batch.slot_pages.shape[1] * page_tokens
        count = max(1, min(2 * page_tokens + 3, room - 1))
        tokens = [0] * count
        pages = [i % self._kv.num_pages for i in range(-(-(count + 1) // page_tokens))]
        sequence = Sequence("rehearsal", tokens, count, params, seed=0, slot=0, prefill_end=count)
        prompt = Chunk(sequence, 0, count, samples=True, tokens=tokens, pages=pages)
        token = Chunk(sequence, count, 1, samples=True, tokens=[], pages=pages)
        self._enqueue(StepWork(0, [prompt], [SlotStart(0, params, tokens, [])]))
        self._enqueue(StepWork(0, [token], []))
        self._launched.clear()
        self._batch.forget(0)

    def launch(self, number: int, chunks: Seq[Chunk]) -> None:
        self._signal.expect(number)
        self._thread.put(number, chunks)

    async def wait(self, number: int) -> StepResult:
        began = max(self._ended_at, time.perf_counter() - _STEP_LIMIT_S)
        try:
            await self._signal.wait(number, _STEP_LIMIT_S)
        except TimeoutError:
            raise DeviceError(
                f"step {number} did not end within {_STEP_LIMIT_S:.0f} s: the GPU hangs"
            ) from None
        launched = self._launched.pop(number)
        if isinstance(launched, Exception):
            raise DeviceError(f"step {number} failed on the GPU: {launched}") from launched
        self._ended_at = time.perf_counter()
        ids = self._signal.ids(number, len(launched.sampling))
        return StepResult(_results(launched, ids), self._ended_at - began)

    def wake_ups_us(self) -> list[float]:
        """How long the loop took to go on after the device was done, of the last steps."""
        return list(self._signal.wake_ups_us)

    async def close(self) -> None:
        await self._thread.close()
        self._signal.close()

    # The runner thread from here on ---------------------------------------------------------------

    def _serve(self, work: StepWork) -> None:
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._enqueue(work)
        except Exception as error:  # noqa: BLE001 - the thread's edge: wait() raises it again
            self._launched[work.number] = error
            self._signal.fail(work.number)

    def _enqueue(self, work: StepWork) -> None:
        for start in work.starts:
            self._batch.forget(start.slot)
            self._tables.start(start)
        live = [c for c in work.chunks if c.sequence.finish is None]
        skipped = {id(c) for c in work.chunks} - {id(c) for c in live}
        decoding = [c for c in live if c.length == 1 and c.samples][:MAX_BATCH]
        rest = [c for c in live if c not in decoding]
        chosen: list[Chosen] = []
        if decoding:
            self._batch.fill(decoding)
            output = self._graphs.run(len(decoding), draws=self._decoding.stage(decoding))
            chosen.append(
                self._decoding.chosen(decoding, output.logits, output.ids, output.is_sound)
            )
        if rest:
            chosen += self._prefill(rest)
        sampling = decoding + [c for c in rest if c.samples]
        logprobs = [p for part in chosen for p in part.logprobs]
        # Before the hand-over: the device may be done with it before this thread goes on.
        self._launched[work.number] = _Launched(work.chunks, sampling, logprobs, skipped)
        self._signal.send(work.number, chosen, self._batch.last_ids)

    def _prefill(self, chunks: list[Chunk]) -> list[Chosen]:
        rows = prefill_rows(chunks, self._batch)
        logits = self._forward.prefill(rows, self._kv)
        sampling = [c for c in chunks if c.samples]
        if not sampling:
            return []
        draws = self._prompts.stage(sampling)
        return [self._prompts.chosen(sampling, logits, *self._prompts.sample(logits, draws=draws))]


def _results(launched: _Launched, ids: list[int]) -> list[Sampled]:
    """Give each chunk of the step what it sampled. Raises DeviceError if a row was not sound."""
    by_chunk: dict[int, Sampled] = {}
    for chunk, token, logprob in zip(launched.sampling, ids, launched.logprobs, strict=True):
        if token < 0:
            raise DeviceError(
                f"expected finite logits for request {chunk.sequence.request_id!r}, got NaN or"
                " infinity; the weights or a kernel are broken"
            )
        by_chunk[id(chunk)] = Sampled([token], None if logprob is None else [logprob])
    return [
        Sampled([], skipped=True)
        if id(chunk) in launched.skipped
        else by_chunk.get(id(chunk)) or Sampled([])
        for chunk in launched.chunks
    ]
