"""Planning alone: what each step holds, and what happens to pages, with no loop and no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.engine.request import Chunk, Sampled, Sequence
from freetoken.engine.scheduler import Scheduler
from freetoken.kvcache.pages import PageCache
from freetoken.types import SamplingParams
from tests.engine.manual import EOS, expected, next_token

PAGE = 4


class Bench:
    """A scheduler, and a runner that finishes steps on demand."""

    def __init__(
        self, num_pages: int = 16, max_running: int = 4, *, reuse: bool = True, budget: int = 16
    ) -> None:
        self.pages = PageCache(num_pages, PAGE, reuse=reuse)
        self.scheduler = Scheduler(self.pages, PAGE, max_running, frozenset({EOS}))
        self.budget = budget
        self.in_flight: deque[list[Chunk]] = deque()
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def add(self, name: str, prompt: Seq[int], max_tokens: int = 4) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens)
        sequence = Sequence(name, list(prompt), len(prompt), params, seed=0)
        self.said[name] = []
        self.scheduler.add(sequence)
        return sequence

    def launch(self) -> list[Chunk]:
        chunks = self.scheduler.plan(self.budget)
        if chunks:
            self.in_flight.append(chunks)
        return chunks

    def finish(self) -> None:
        chunks = self.in_flight.popleft()
        sampled = [
            Sampled([], skipped=True)
            if c.sequence.finish
            else Sampled([next_token(c.start + c.length)] if c.samples else [])
            for c in chunks
        ]
        for sequence, chunk in self.scheduler.publish(chunks, sampled):
            self.said[sequence.request_id] += chunk.ids
            if chunk.finish:
                self.ended[sequence.request_id] = chunk.finish

    def run(self, steps: int = 500) -> None:
        for _ in range(steps):
            while len(self.in_flight) < 2 and self.launch():
                pass
            if not self.in_flight:
                return
            self.finish()
            self.pages.check()
        raise AssertionError("it does not end")


def lengths(chunks: list[Chunk]) -> dict[str, int]:
    """Tokens of a step by request."""
    return {c.sequence.request_id: c.length for c in chunks}


def test_long_prompt_shares_the_step_with_short_ones() -> None:
    """H08: one long prompt makes everybody behind it wait for the whole prefill."""
    bench = Bench()
    bench.add("long", range(100, 140), max_tokens=1)
    bench.add("short", range(3, 8), max_tokens=1)
    bench.add("shorter", range(50, 53), max_tokens=1)
    assert lengths(bench.launch()) == {"shorter": 3, "short": 5, "long": 8}


def test_decoding_sequences_are_in_every_step_beside_somebodys_prefill() -> None:
    """H08: a running stream stops while a long prompt is computed."""
    bench = Bench(num_pages=64)
    bench.add("stream", [1, 2, 3], max_tokens=30)
    bench.launch()
    bench.add("long", range(100, 200), max_tokens=1)
    for _ in range(7):
        step = lengths(bench.launch())
        assert step["stream"] == 1
        assert step["long"] > 0
        bench.finish()


def test_waiting_sequence_waits_for_a_page_that_a_neighbour_computes_now() -> None:
    """Concurrent chats with one system prompt compute it once each."""
    bench = Bench(num_pages=32)
    system = list(range(10, 30))
    bench.add("a", [*system, 1, 2], max_tokens=2)
    bench.add("b", [*system, 3, 4], max_tokens=2)
    bench.run()
    assert bench.scheduler.counters.cached_tokens == len(system)
    assert bench.scheduler.counters.prefill_tokens == 44 - len(system)
    assert bench.said == {"a": expected(22, 2), "b": expected(22, 2)}


def test_request_that_waits_for_a_neighbours_pages_holds_up_nobody() -> None:
    """H08: a second copy of a long prompt, waiting for the first's pages, makes a short chat behind
    it wait for the whole prefill.
    """
    bench = Bench(num_pages=64)
    bench.add("long", range(100, 200), max_tokens=1)
    bench.launch()
    bench.add("copy", range(100, 200), max_tokens=1)
    bench.add("short", [3, 4, 5], max_tokens=1)
    assert lengths(bench.launch())["short"] == 3
    assert [s.request_id for s in bench.scheduler.waiting] == ["copy"]
    bench.run()
    assert bench.said == {"long": expected(100, 1), "copy": expected(100, 1), "short": [103]}
    assert bench.scheduler.counters.cached_tokens == 96


def test_request_behind_a_neighbour_that_leaves_goes_on_from_what_is_there() -> None:
    """A copy of a prompt that waits for ever for pages whose request was aborted."""
    bench = Bench(num_pages=64)
    first = bench.add("first", range(100, 200), max_tokens=1)
    bench.launch()
    bench.add("copy", range(100, 200), max_tokens=1)
    bench.launch()
    bench.finish()
    bench.scheduler.abort(first)
    bench.run()
    assert bench.said["copy"] == expected(100, 1)
    assert bench.scheduler.counters.cached_tokens == 16


def test_naive_cache_reuses_nothing() -> None:
    """--cache-type naive that still shares pages."""
    bench = Bench(reuse=False)
    for name in "ab":
        bench.add(name, range(10, 30), max_tokens=2)
        bench.run()
    assert bench.scheduler.counters.cached_tokens == 0
    assert bench.pages.counts().free == 16


def test_next_turn_reuses_prompt_and_reply() -> None:
    """R09-like loss of reuse: cached tokens must grow by turn."""
    bench = Bench(num_pages=32)
    history = list(range(10, 20))
    cached: list[int] = []
    for turn in range(3):
        before = bench.scheduler.counters.cached_tokens
        bench.add(f"turn{turn}", history, max_tokens=6)
        bench.run()
        cached.append(bench.scheduler.counters.cached_tokens - before)
        history = [*history, *bench.said[f"turn{turn}"], 7, 8, 9]
    assert cached == [0, 12, 24]


def test_cost_of_a_cached_prompt_follows_its_new_tokens() -> None:
    """R27: with a cached prefix the prefill computes, or copies, the whole prompt again."""
    bench = Bench(num_pages=32, budget=64)
    bench.add("first", range(10, 58), max_tokens=1)
    bench.run()
    bench.add("next", [*range(10, 58), 1, 2, 3], max_tokens=1)
    assert [(c.start, c.length) for c in bench.launch()] == [(48, 3)]


def test_sequences_that_run_out_of_pages_take_turns_and_all_end_right() -> None:
    """Two replies that together need more pages than there are stop each other for ever."""
    bench = Bench(num_pages=8)
    for name, first in (("a", 10), ("b", 50), ("c", 90)):
        bench.add(name, range(first, first + 8), max_tokens=20)
    bench.run()
    assert bench.scheduler.counters.preempted > 0
    assert bench.said == {name: expected(8, 20) for name in "abc"}
    assert set(bench.ended.values()) == {"length"}
    counts = bench.pages.counts()
    assert counts.in_use == 0


def test_waiting_request_of_a_full_pool_is_tried_again_when_pages_return() -> None:
    """A queue that sleeps for ever once its head found no pages."""
    bench = Bench(num_pages=4)
    bench.add("big", range(10, 22), max_tokens=4)
    bench.launch()
    bench.add("next", range(50, 60), max_tokens=2)
    bench.run()
    assert bench.said == {"big": expected(12, 4), "next": expected(10, 2)}


def test_abort_of_the_waiting_head_lets_the_next_one_in() -> None:
    """A head that never fits keeps its place after its client left."""
    bench = Bench(num_pages=4, budget=64)
    bench.add("running", range(10, 18), max_tokens=8)
    bench.launch()
    head = bench.add("head", range(30, 44), max_tokens=1)
    bench.add("small", [3], max_tokens=1)
    bench.launch()
    bench.scheduler.abort(head)
    assert "small" in lengths(bench.launch())


@pytest.mark.parametrize("reuse", [True, False], ids=["radix", "naive"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_traffic_keeps_pages_whole_and_every_reply_right(
    reuse: bool, data: st.DataObject
) -> None:
    """H07: after minutes of concurrent chats with aborts one page has two owners, or is lost."""
    bench = Bench(
        num_pages=data.draw(st.integers(6, 14)),
        max_running=data.draw(st.integers(1, 4)),
        reuse=reuse,
        budget=9,
    )
    system = list(range(10, 18))
    live: dict[str, tuple[Sequence, list[int]]] = {}
    aborted: set[str] = set()
    for i in range(data.draw(st.integers(5, 40))):
        match data.draw(
            st.sampled_from(["add", "add", "launch", "launch", "finish", "finish", "abort"])
        ):
            case "add":
                tail = data.draw(st.lists(st.integers(20, 23), min_size=1, max_size=6))
                prompt = [*system[: data.draw(st.integers(0, 8))], *tail]
                sequence = bench.add(
                    str(i), prompt, max_tokens=data.draw(st.integers(1, 24 - len(prompt)))
                )
                live[str(i)] = (sequence, prompt)
            case "launch" if len(bench.in_flight) < 2:
                bench.launch()
            case "finish" if bench.in_flight:
                bench.finish()
            case "abort" if live:
                name = data.draw(st.sampled_from(sorted(live)))
                if name not in bench.ended:
                    bench.scheduler.abort(live[name][0])
                    aborted.add(name)
            case _:
                pass
        bench.pages.check()
        counts = bench.pages.counts()
        assert counts.free + counts.cached + counts.in_use == counts.capacity
    bench.run()
    assert bench.pages.counts().in_use == 0
    assert not bench.scheduler.running
    assert not bench.scheduler.waiting
    for name, (sequence, prompt) in live.items():
        limit = sequence.params.max_tokens
        assert limit is not None
        if name not in aborted:
            assert bench.said[name] == expected(len(prompt), limit)
