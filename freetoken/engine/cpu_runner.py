"""Steps on the CPU: torch and native kernels in one named thread, finished steps announced through
a Completion.

The thread is the only one that touches the decoder, the KV tensors and the sampler. The loop hands
it planned steps through a queue and never waits for it but through the completion.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from freetoken.device.completion import Completion
from freetoken.engine.penalties import RowSettings
from freetoken.engine.request import Chunk, Sampled, StepResult
from freetoken.engine.sampler import Sampler
from freetoken.engine.step_input import build_step, warm_step
from freetoken.engine.step_thread import StepThread, StepWork
from freetoken.engine.uniform import uniform
from freetoken.errors import DeviceError
from freetoken.kvcache.pool import KvPool
from freetoken.layers.step import StepInput
from freetoken.models.decoder import Decoder

_STEP_LIMIT_S = 1800.0
"""No step takes longer: the largest prefill chunk of a 100B model on two old cores is under 10
minutes.
"""


class CpuRunner:
    """Owns the runner thread. Made inside the running loop; `close` joins the thread."""

    depth = 2

    def __init__(self, decoder: Decoder, kv: KvPool, max_running: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._sampler = Sampler(max_running, decoder.spec.vocab, torch.device("cpu"))
        self._last_ids = torch.zeros(max_running, dtype=torch.int64)
        self._settings: dict[int, RowSettings] = {}
        self._completion = Completion()
        self._results: dict[int, StepResult | Exception] = {}
        self._thread = StepThread(max_running, self._serve)

    def warm(self, max_prefill_tokens: int) -> None:
        """Compute a chunk and a token: torch prepares its products, weights are touched."""
        for tokens in (min(64, max_prefill_tokens), 1):
            step = warm_step(tokens, self._kv.page_tokens)
            self._thread.call(lambda step=step: self._forward(step))

    def _forward(self, step: StepInput) -> None:
        self._decoder.forward(step, self._kv)

    def launch(self, number: int, chunks: Seq[Chunk]) -> None:
        self._thread.put(number, chunks)

    async def wait(self, number: int) -> StepResult:
        try:
            await self._completion.wait(number, _STEP_LIMIT_S)
        except TimeoutError:
            raise DeviceError(
                f"step {number} did not end within {_STEP_LIMIT_S:.0f} s; the runner hangs"
            ) from None
        result = self._results.pop(number)
        if isinstance(result, Exception):
            raise DeviceError(f"step {number} failed in the runner: {result}") from result
        return result

    async def close(self) -> None:
        await self._thread.close()
        self._completion.close()

    # The runner thread from here on ---------------------------------------------------------------

    def _serve(self, work: StepWork) -> None:
        began = time.perf_counter()
        try:
            self._results[work.number] = StepResult(
                self._compute(work), time.perf_counter() - began
            )
        except Exception as error:  # noqa: BLE001 - the thread's edge: wait() raises it again
            self._results[work.number] = error
        self._completion.signal(work.number)

    @torch.inference_mode()
    def _compute(self, work: StepWork) -> list[Sampled]:
        for start in work.starts:
            row = RowSettings.of(start.params, self._decoder.spec.vocab, torch.device("cpu"))
            self._settings[start.slot] = row
            self._sampler.start(start.slot, row, start.prompt, start.said)
        # A client may leave between planning and now: what nobody wants is not computed.
        live = [c for c in work.chunks if c.sequence.finish is None]
        results = {id(c): Sampled([]) for c in live}
        if live:
            logits = self._decoder.forward(
                build_step(live, self._last_ids, self._kv.page_tokens), self._kv
            )
            rows = [c for c in live if c.samples]
            if rows:
                for chunk, sampled in zip(rows, self._sample(logits, rows), strict=True):
                    results[id(chunk)] = sampled
        return [results.get(id(c)) or Sampled([], skipped=True) for c in work.chunks]

    def _sample(self, logits: torch.Tensor, rows: list[Chunk]) -> list[Sampled]:
        slots = [c.sequence.slot for c in rows]
        settings = [self._settings[slot] for slot in slots]
        draws = [uniform(c.sequence.seed, c.start + c.length) for c in rows]
        uniforms = torch.tensor(draws, dtype=torch.float64)
        output = self._sampler.sample(logits, settings, slots, uniforms)
        output.check()
        self._last_ids[slots] = output.ids
        ids = [int(token) for token in output.ids]
        logprobs = output.token_logprobs(settings)
        return [
            Sampled([token], None if logprob is None else [logprob])
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
