"""The page cache's promises one by one; random traces are in test_traces.py."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from freetoken.kvcache.pages import Lease, PageCache


def hold(cache: PageCache, tokens: list[int], limit: int | None = None) -> Lease:
    """Open, grow and commit all of `tokens`."""
    lease = cache.open(tokens, len(tokens) if limit is None else limit)
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    cache.check()
    return lease


def keep(cache: PageCache, tokens: list[int]) -> None:
    """Leave `tokens` cached, pinned by nobody."""
    cache.close(hold(cache, tokens))


def test_open_finds_full_pages_only() -> None:
    """A page that is not full was shared, and its later tokens were somebody else's."""
    cache = PageCache(8, 4, reuse=True)
    keep(cache, list(range(11)))
    assert cache.counts().cached == 2
    assert cache.open(list(range(11)), 11).num_cached_tokens == 8


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_open_keeps_to_limit(limit: int, cached: int) -> None:
    """A prompt that is cached whole left no token to compute, so there were no logits."""
    cache = PageCache(8, 4, reuse=True)
    keep(cache, list(range(8)))
    assert cache.peek(list(range(8)), limit) == cached
    lease = cache.open(list(range(8)), limit)
    assert (lease.num_cached_tokens, len(lease.pages)) == (cached, cached // 4)
    cache.check()


@pytest.mark.parametrize(("place", "cached"), [(0, 0), (3, 0), (4, 4), (5, 4), (7, 4), (8, 8)])
def test_divergence_shares_pages_before_it(place: int, cached: int) -> None:
    """A sequence got a page in which one of its tokens differs, or lost one in which none does."""
    cache = PageCache(16, 4, reuse=True)
    first = list(range(12))
    other = [*first[:place], 99, *first[place + 1 :]]
    keep(cache, first)
    keep(cache, other)
    assert cache.peek(other, 12) == cache.peek(first, 12) == 12
    assert cache.counts().cached == 6 - cached // 4


def test_split_of_a_pinned_run_keeps_its_pins() -> None:
    """A run split under a running sequence was evicted from under it."""
    cache = PageCache(6, 2, reuse=True)
    first = hold(cache, [0, 1, 2, 3, 4, 5])
    other = hold(cache, [0, 1, 9, 9])
    assert other.pages[0] == first.pages[0]
    cache.close(other)
    assert cache.counts().cached == 1
    cache.clear()
    assert cache.counts().in_use == 3
    cache.check()


def test_eviction_takes_least_recently_used_tail_first() -> None:
    """A prefix used a moment ago was dropped before one nobody came back to, or a page before those
    that follow it.
    """
    cache = PageCache(6, 1, reuse=True)
    keep(cache, [1, 2, 3])
    keep(cache, [4, 5, 6])
    cache.close(cache.open([1, 2], 2))
    lease = cache.open([], 0)
    assert cache.grow(lease, 1)
    assert (cache.peek([1, 2, 3], 3), cache.peek([4, 5, 6], 3)) == (2, 3)
    assert cache.grow(lease, 3)
    assert (cache.peek([1, 2, 3], 3), cache.peek([4, 5, 6], 3)) == (2, 1)
    assert cache.grow(lease, 5)
    assert (cache.peek([1, 2, 3], 3), cache.peek([4, 5, 6], 3)) == (1, 0)
    cache.check()


def test_grow_beyond_pool_changes_nothing() -> None:
    """A refused request had already thrown others' cache away or kept half of its pages."""
    cache = PageCache(4, 2, reuse=True)
    keep(cache, [1, 2, 3, 4])
    lease = cache.open([9], 0)
    before = cache.counts()
    assert not cache.grow(lease, 9)
    assert (cache.counts(), lease.pages) == (before, [])
    assert cache.grow(lease, 8)
    cache.check()


def test_grow_within_pages_is_free() -> None:
    """Asking again for positions already held took another page."""
    cache = PageCache(4, 4, reuse=True)
    lease = cache.open([], 0)
    assert cache.grow(lease, 5)
    assert cache.grow(lease, 8)
    assert cache.grow(lease, 0)
    assert len(lease.pages) == 2


def test_pinned_pages_are_never_evicted() -> None:
    """Pages of a running sequence went to another one."""
    cache = PageCache(4, 1, reuse=True)
    lease = hold(cache, [1, 2, 3])
    other = cache.open([8], 0)
    assert not cache.grow(other, 2)
    assert cache.grow(other, 1)
    assert set(lease.pages).isdisjoint(other.pages)
    cache.check()


def test_commit_of_equal_tokens_keeps_own_pages() -> None:
    """Two sequences computed the same prompt at once; a swapped page table would be wrong in a step
    already launched.
    """
    cache = PageCache(12, 2, reuse=True)
    first, second = cache.open([], 0), cache.open([], 0)
    tokens = [1, 2, 3, 4]
    for lease in (first, second):
        assert cache.grow(lease, 6)
    tables = [list(first.pages), list(second.pages)]
    cache.commit(first, tokens, 4)
    cache.commit(second, tokens, 4)
    cache.commit(second, [*tokens, 5, 6], 6)
    cache.check()
    assert [first.pages, second.pages] == tables
    third = cache.open([*tokens, 5, 6], 6)
    assert third.pages == [*first.pages[:2], second.pages[2]]
    for lease in (first, second, third):
        cache.close(lease)
    cache.check()
    assert (cache.counts().cached, cache.counts().free) == (3, 9)


def test_last_lease_gets_whole_pool_though_it_doubled_pages() -> None:
    """A sequence pinned another's equal pages beside its own, so the only one left could wait for a
    page for ever.
    """
    cache = PageCache(6, 1, reuse=True)
    first, second = cache.open([], 0), cache.open([], 0)
    for lease in (first, second):
        assert cache.grow(lease, 3)
        cache.commit(lease, [1, 2, 3], 3)
    assert not cache.grow(second, 4)
    cache.close(first)
    table = list(second.pages)
    assert cache.grow(second, 6)
    assert second.pages[:3] == table
    cache.check()
    cache.close(second)
    assert cache.open([1, 2, 3], 3).pages == table


def test_commit_page_by_page_equals_commit_at_once() -> None:
    """Committing at each page border left another tree than committing at the end."""
    tokens = list(range(40))
    for step in (1, 4, 7, 40):
        cache = PageCache(10, 4, reuse=True)
        lease = cache.open([], 0)
        assert cache.grow(lease, 40)
        for end in [*range(0, 40, step), 40, 40, 12]:
            cache.commit(lease, tokens, end)
            cache.check()
        cache.close(lease)
        assert cache.open(tokens, 40).pages == lease.pages


def test_naive_mode_reuses_nothing() -> None:
    """--cache-type naive kept pages after their request."""
    cache = PageCache(4, 2, reuse=False)
    keep(cache, [1, 2, 3, 4])
    assert cache.open([1, 2, 3, 4], 4).num_cached_tokens == 0
    assert (cache.counts().free, cache.counts().cached) == (4, 0)
    cache.clear()
    cache.check()


def test_close_twice_frees_once() -> None:
    """H07: closing a lease again put its pages on the free list a second time."""
    cache = PageCache(4, 2, reuse=True)
    lease = cache.open([], 0)
    assert cache.grow(lease, 7)
    cache.close(lease)
    cache.close(lease)
    cache.check()
    assert cache.counts().free == 4


def test_check_finds_a_page_with_two_owners() -> None:
    """The check itself was blind."""
    cache = PageCache(4, 2, reuse=True)
    lease = hold(cache, [1, 2, 3])
    cache._free.append(lease.pages[1])
    with pytest.raises(AssertionError, match="two owners: free and lease"):
        cache.check()
    cache._free.remove(lease.pages[1])
    cache._free.pop()
    with pytest.raises(AssertionError, match="1 have none"):
        cache.check()


@pytest.mark.parametrize(("num_pages", "page_tokens"), [(0, 16), (4, 0)])
def test_empty_pool_is_refused(num_pages: int, page_tokens: int) -> None:
    """A pool without pages started, and its first request waited for ever."""
    with pytest.raises(ValueError, match="expected at least 1 page"):
        PageCache(num_pages, page_tokens, reuse=True)


def test_long_run_does_not_pile_up_entries() -> None:
    """The eviction queue grew with every request that ended, though nothing was ever evicted."""
    cache = PageCache(8, 1, reuse=True)
    for _ in range(1000):
        keep(cache, [1, 2, 3])
    assert len(cache._tree._heap) < 200
    cache.check()


def test_commit_of_next_page_does_not_read_the_whole_prompt() -> None:
    """Each page border of a long reply compared the prompt from its start: quadratic time."""

    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, index: slice) -> list[int]:  # type: ignore[override]
            part = list.__getitem__(self, index)
            Counted.num_read += len(part)
            return part

    cache, tokens = PageCache(600, 16, reuse=True), Counted(range(9600))
    lease = cache.open(tokens, 0)
    assert cache.grow(lease, 9600)
    for end in range(0, 9600, 16):
        cache.commit(lease, tokens, end)
    assert Counted.num_read <= 3 * 9600


def test_deep_chain_of_turns_needs_no_recursion() -> None:
    """A chat of thousands of turns overflowed the stack."""
    depth = 2 * sys.getrecursionlimit()
    cache, tokens = PageCache(depth + 4, 1, reuse=True), [1]
    for turn in range(depth):
        lease = hold(cache, tokens) if turn % 500 == 0 else _turn(cache, tokens)
        cache.close(lease)
        tokens.append(turn % 5)
    assert dataclasses.astuple(cache.counts())[1:4] == (4, depth, 0)
    cache.clear()
    cache.check()


def _turn(cache: PageCache, tokens: list[int]) -> Lease:
    lease = cache.open(tokens, len(tokens) - 1)
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    return lease
