"""Random traces of the page cache against the slow model in slow.py, compared after every
operation.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kvcache.slow import SlowCache, SlowLease

TOKENS = st.lists(st.integers(0, 1), max_size=5)


class PageTraces(RuleBasedStateMachine):
    """Chats over a two-letter vocabulary, so that prefixes meet and part inside pages and at their
    borders all the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache: SlowCache
        self.past: list[list[int]] = [[]]

    @initialize(num_pages=st.integers(2, 14), page_tokens=st.integers(1, 3))
    def start(self, num_pages: int, page_tokens: int) -> None:
        """A small pool."""
        self.cache = SlowCache(num_pages, page_tokens)

    @rule(data=st.data(), tail=TOKENS, slack=st.integers(0, 2))
    def open(self, data: st.DataObject, tail: list[int], slack: int) -> None:
        """A new chat, or the next turn of an old one."""
        tokens = data.draw(st.sampled_from(self.past)) + tail
        self.past.append(tokens)
        self.cache.open(tokens, len(tokens) - slack if len(tokens) >= slack else 0)

    @precondition(lambda self: self.cache.leases)
    @rule(data=st.data(), more=TOKENS, ahead=st.integers(0, 3))
    def grow(self, data: st.DataObject, more: list[int], ahead: int) -> None:
        """Tokens are generated, and pages for them and a few more are asked for."""
        lease = self._lease(data)
        lease.tokens += more
        self.past.append(list(lease.tokens))
        self.cache.grow(lease, len(lease.tokens) + ahead)

    @precondition(lambda self: self.cache.leases)
    @rule(data=st.data(), short=st.integers(0, 4))
    def commit(self, data: st.DataObject, short: int) -> None:
        """KV up to some position is in memory."""
        lease = self._lease(data)
        room = len(lease.pages) * self.cache.page_tokens
        self.cache.commit(lease, max(0, min(len(lease.tokens), room) - short))

    @precondition(lambda self: self.cache.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """A chat ends or is aborted."""
        self.cache.close(self._lease(data))

    @rule()
    def clear(self) -> None:
        """The owner empties the cache."""
        self.cache.clear()

    @invariant()
    def same(self) -> None:
        """Everything equals the slow model."""
        if hasattr(self, "cache"):
            self.cache.compare()

    def _lease(self, data: st.DataObject) -> SlowLease:
        return self.cache.leases[data.draw(st.integers(0, len(self.cache.leases) - 1))]


PageTraces.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
test_trace_equals_slow_model = PageTraces.TestCase


class Chats:
    """Multi-turn chats with a shared system prompt over a small pool: what a scheduler does to the
    cache, in random order.
    """

    def __init__(self, seed: int, num_pages: int, page_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.cache = SlowCache(num_pages, page_tokens)
        self.system = [7] * (2 * page_tokens + 1)
        self.limit = num_pages * page_tokens - page_tokens
        self.history: list[list[int]] = [list(self.system) for _ in range(8)]
        self.live: dict[int, SlowLease] = {}
        self.num_cached = self.num_refused = 0

    def step(self) -> None:
        """Let one chat do one thing."""
        chat = self.rng.randrange(8)
        lease = self.live.get(chat)
        if lease is None:
            self._ask(chat)
        elif self.rng.random() < 0.15:
            self._end(chat, is_aborted=self.rng.random() < 0.4)
        else:
            self._decode(chat, lease)
        self.cache.compare()

    def _ask(self, chat: int) -> None:
        tokens = self.history[chat] + [
            self.rng.randrange(3) for _ in range(self.rng.randrange(1, 6))
        ]
        if len(tokens) + 8 > self.limit:
            tokens = [*self.system, self.rng.randrange(3)]
        lease = self.cache.open(tokens, len(tokens) - 1)
        if not self.cache.grow(lease, len(tokens)):
            self.num_refused += 1
            self.cache.close(lease)
            return
        self.num_cached += lease.real.num_cached_tokens
        self.live[chat] = lease

    def _decode(self, chat: int, lease: SlowLease) -> None:
        self.cache.commit(lease, len(lease.tokens))
        if len(lease.tokens) < self.limit and self.cache.grow(lease, len(lease.tokens) + 1):
            lease.tokens.append(self.rng.randrange(3))
        else:
            self.num_refused += 1
            self._end(chat, is_aborted=False)

    def _end(self, chat: int, *, is_aborted: bool) -> None:
        lease = self.live.pop(chat)
        if not is_aborted:
            self.cache.commit(lease, len(lease.tokens) - 1)
            self.history[chat] = lease.tokens
        self.cache.close(lease)


@pytest.mark.parametrize("seed", range(6))
def test_h07_no_page_has_two_owners_when_chats_abort_in_a_small_pool(seed: int) -> None:
    """H07: a double free gave one page two owners after concurrent multi-turn chats with aborts and
    eviction.
    """
    chats = Chats(seed, num_pages=16 + 4 * seed, page_tokens=2 + seed % 3)
    for _ in range(800):
        chats.step()
    assert chats.num_cached > 0
    assert chats.num_refused > 0, "the pool was never short; the test says nothing"
    for lease in list(chats.cache.leases):
        chats.cache.close(lease)
    chats.cache.compare()
    assert chats.cache.real.counts().in_use == 0
    chats.cache.clear()
    chats.cache.compare()
    assert chats.cache.real.counts().free == 16 + 4 * seed
