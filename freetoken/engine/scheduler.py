"""Which tokens the next step computes. Pure: no torch, no clock, no text; plain functions, so
nothing can interrupt one.

Policy. Running sequences that decode come first, one token each. What is left of the step is
prefill, shared evenly by the sequences that still have prompt to compute, so that a long prompt
starves no short one. A waiting sequence is admitted in order of arrival once all pages of its
prompt are there; one whose beginning is being computed by a neighbour right now lets others pass
and waits for those pages instead of computing them twice. When decoding sequences run out of pages
and no step can be planned, the youngest gives its pages back and starts again later from what it
has: the oldest always proceeds, so nothing waits for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from freetoken.engine.neighbours import stands_behind
from freetoken.engine.request import Chunk, Sampled, Sequence
from freetoken.kvcache.pages import PageCache
from freetoken.types import Finish, TokenChunk


@dataclass(slots=True)
class Counters:
    """What happened since start. One writer: the scheduler."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Scheduler:
    """Owns the waiting and running sequences and their pages."""

    def __init__(
        self, pages: PageCache, page_tokens: int, max_running: int, eos_ids: frozenset[int]
    ) -> None:
        self.pages = pages
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._page_tokens = page_tokens
        self._free_slots = list(range(max_running))[::-1]
        self._eos_ids = eos_ids
        self._is_blocked = (
            False  # the first waiting sequence found no pages, and none came back since
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt and limit were checked against the context."""
        assert 0 < sequence.num_prompt == len(sequence.tokens)
        sequence.prefill_end = sequence.num_prompt
        self.waiting.append(sequence)
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.num_prompt

    def abort(self, sequence: Sequence, reason: Finish = "abort") -> None:
        """End a sequence now; its pages return once no launched step holds it."""
        if sequence.finish is None:
            self._end(sequence, reason)

    def plan(self, prefill_budget: int) -> list[Chunk]:
        """Plan the next step: at most `prefill_budget` prompt tokens beside every decoding
        sequence. [] if nothing can run.
        """
        while True:
            chunks = [c for s in self.running if (c := self._decode_chunk(s)) is not None]
            self._admit()
            chunks += self._prefill_chunks(prefill_budget)
            if chunks or not self._preempt():
                break
        for chunk in chunks:
            chunk.sequence.launched += chunk.length
            chunk.sequence.flights += 1
        return chunks

    def publish(
        self, chunks: list[Chunk], sampled: list[Sampled]
    ) -> list[tuple[Sequence, TokenChunk]]:
        """Take in a finished step (steps finish in the order they were planned); return what each
        live sequence gained.
        """
        news: list[tuple[Sequence, TokenChunk]] = []
        for chunk, result in zip(chunks, sampled, strict=True):
            sequence = chunk.sequence
            sequence.flights -= 1
            if not result.skipped:
                sequence.computed = chunk.start + chunk.length
                self._count(chunk, result)
            if sequence.finish is not None:
                self._release(sequence)
                continue
            if chunk.is_prefill:
                self._commit(sequence)
            if chunk.samples:
                news.append((sequence, self._extend(sequence, result)))
        return news

    @property
    def is_decoding(self) -> bool:
        """Whether some live sequence is past its prompt, so that a long step would hold up its next
        token.
        """
        return any(s.launched >= s.prefill_end and s.finish is None for s in self.running)

    # Planning -------------------------------------------------------------------------------------

    def _decode_chunk(self, sequence: Sequence) -> Chunk | None:
        if sequence.finish is not None or sequence.launched < sequence.prefill_end:
            return None
        # Each step that was launched and not published samples one token here, whose id only the
        # runner knows yet.
        in_flight = sequence.flights if sequence.launched >= len(sequence.tokens) else 0
        known = len(sequence.tokens)
        limit = sequence.params.max_tokens
        assert limit is not None
        if in_flight > 1 or sequence.num_generated + in_flight >= limit:
            return None
        if in_flight:
            return self._chunk(sequence, 1, tokens=[])
        return self._chunk(sequence, known - sequence.launched)

    def _chunk(
        self, sequence: Sequence, length: int, tokens: list[int] | None = None
    ) -> Chunk | None:
        start = sequence.launched
        end = start + length
        lease = sequence.lease
        assert lease is not None
        assert length > 0
        if not self.pages.grow(lease, end):
            return None
        if tokens is None:
            tokens = sequence.tokens[start:end]
        num_pages = -(-end // self._page_tokens)
        return Chunk(
            sequence, start, length, end >= len(sequence.tokens), tokens, lease.pages[:num_pages]
        )

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        todo = [s for s in self.running if s.finish is None and s.launched < s.prefill_end]
        todo.sort(
            key=lambda s: s.prefill_end - s.launched
        )  # shortest first: what it leaves over goes to the longer
        chunks: list[Chunk] = []
        for i, sequence in enumerate(todo):
            share = budget // (len(todo) - i) or min(budget, 1)
            length = min(sequence.prefill_end - sequence.launched, share)
            if length == 0:
                break
            chunk = self._chunk(sequence, length)
            if chunk is not None:
                chunks.append(chunk)
                budget -= length
        return chunks

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if not self._free_slots or self._is_blocked:
                return
            if sequence.is_behind:
                continue  # those after it need not wait too
            known = len(sequence.tokens)
            lease = self.pages.open(sequence.tokens, known - 1)
            cached = lease.num_cached_tokens
            if self.pages.reuse and stands_behind(
                sequence, self.running, cached, self._page_tokens
            ):
                self.pages.close(lease)
                continue
            if not self.pages.grow(lease, known):
                self.pages.close(lease)
                self._is_blocked = True
                return
            self.waiting.remove(sequence)
            sequence.lease = lease
            sequence.slot = self._free_slots.pop()
            sequence.launched = sequence.computed = lease.num_cached_tokens
            if not sequence.is_restarted:
                sequence.cached_tokens = lease.num_cached_tokens
                self.counters.cached_tokens += lease.num_cached_tokens
            self.running.append(sequence)

    def _preempt(self) -> bool:
        """Give back the youngest sequence's pages if every running one waits for pages. True if
        there was one to give.
        """
        stuck = [s for s in self.running if s.finish is None]
        if len(stuck) < 2 or any(s.flights for s in self.running):
            return False
        sequence = stuck[-1]
        self._commit(sequence)
        self._leave(sequence)
        sequence.prefill_end = len(sequence.tokens)
        sequence.launched = sequence.computed = 0
        sequence.is_restarted = True
        self.waiting.appendleft(sequence)
        self.counters.preempted += 1
        return True

    # Publishing -----------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, result: Sampled) -> TokenChunk:
        limit = sequence.params.max_tokens
        assert limit is not None
        room = limit - sequence.num_generated
        ids, finish = result.ids, result.finish
        if len(ids) > room:
            ids, finish = ids[:room], None
        for i, token in enumerate(ids):
            if self._is_end(sequence, token):
                ids, finish = ids[: i + 1], "stop"
                break
        else:
            if len(ids) == room and finish != "error":
                finish = finish if finish == "stop" else "length"
        sequence.tokens += ids
        logprobs = result.logprobs[: len(ids)] if result.logprobs is not None else None
        if finish is not None:
            self._end(sequence, finish)
        return TokenChunk(ids, logprobs, finish, sequence.cached_tokens)

    def _is_end(self, sequence: Sequence, token: int) -> bool:
        params = sequence.params
        return token in params.stop_token_ids or (not params.ignore_eos and token in self._eos_ids)

    def _end(self, sequence: Sequence, reason: Finish) -> None:
        sequence.finish = reason
        if reason == "abort":
            self.counters.aborted += 1
        elif reason == "error":
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        if sequence.lease is None:
            self.waiting.remove(sequence)
            self._is_blocked = False
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Return everything an ended sequence holds, as soon as no launched step can touch it.
        Aborted work is not cached.
        """
        if sequence.flights == 0 and sequence.lease is not None:
            if sequence.finish in {"stop", "length"}:
                self._commit(sequence)
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.pages.close(sequence.lease)
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.lease, sequence.slot = None, -1
        self._is_blocked = False

    def _commit(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        # A step launched ahead of the last token may have computed one position more than there are
        # tokens to name it.
        self.pages.commit(
            sequence.lease, sequence.tokens, min(sequence.computed, len(sequence.tokens))
        )

    def _count(self, chunk: Chunk, result: Sampled) -> None:
        if chunk.is_prefill:
            self.counters.prefill_tokens += chunk.length
        if chunk.sequence.finish is None:
            self.counters.decode_tokens += len(result.ids)
