"""A slow model of the page cache: every cached prefix is a tuple of tokens, every question a loop
over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken.kvcache.pages import Lease, PageCache

Prefix = tuple[int, ...]


@dataclass(eq=False)
class SlowLease:
    """What the model knows of one lease: the real one, its tokens, and the cached prefixes it pins,
    shortest first.
    """

    real: Lease
    tokens: list[int]
    pages: list[int]
    path: list[Prefix] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    """Places of the table whose page is this lease's alone."""


class SlowCache:
    """Runs each operation on the real cache and on itself, and compares everything after it."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.real = PageCache(num_pages, page_tokens, reuse=True)
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.free = set(range(num_pages))
        self.cached: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.memory: dict[int, Prefix] = {}
        self.leases: list[SlowLease] = []
        self.clock = 0

    def open(self, tokens: list[int], limit: int) -> SlowLease:
        """Open, and expect the longest prefix of full pages that is cached."""
        path: list[Prefix] = []
        while (end := (len(path) + 1) * self.page_tokens) <= min(limit, len(tokens)):
            if tuple(tokens[:end]) not in self.cached:
                break
            path.append(tuple(tokens[:end]))
        assert self.real.peek(tokens, limit) == len(path) * self.page_tokens
        lease = self.real.open(tokens, limit)
        assert lease.num_cached_tokens == len(path) * self.page_tokens
        assert lease.pages == [self.cached[p] for p in path]
        slow = SlowLease(lease, list(tokens), list(lease.pages), path)
        self.leases.append(slow)
        return slow

    def grow(self, lease: SlowLease, num_tokens: int) -> bool:
        """Grow, and expect it to work exactly if enough pages are free, cached and unpinned, or
        doubled for nobody.
        """
        need = -(-num_tokens // self.page_tokens) - len(lease.pages)
        if need > len(self.free) + len(self._unpinned()):
            self._drop_doubles(lease)
        fits = need <= len(self.free) + len(self._unpinned())
        assert self.real.grow(lease.real, num_tokens) == fits
        if not fits or need <= 0:
            assert lease.real.pages == lease.pages
            return fits
        while len(self.free) < need:
            self._evict_one()
        new = lease.real.pages[len(lease.pages) :]
        assert lease.real.pages[: len(lease.pages)] == lease.pages
        assert len(set(new)) == need == len(new)
        assert set(new) <= self.free
        self.free -= set(new)
        lease.own |= set(range(len(lease.pages), len(lease.pages) + need))
        lease.pages += new
        return True

    def commit(self, lease: SlowLease, num_tokens: int) -> None:
        """Write the tokens to the memory of the lease's own pages, then share the full ones."""
        for i in sorted(lease.own):
            written = lease.tokens[
                i * self.page_tokens : min((i + 1) * self.page_tokens, num_tokens)
            ]
            if written:
                self.memory[lease.pages[i]] = tuple(written)
        self.real.commit(lease.real, lease.tokens, num_tokens)
        for i in range(len(lease.path), num_tokens // self.page_tokens):
            prefix = tuple(lease.tokens[: (i + 1) * self.page_tokens])
            if prefix not in self.cached:
                self.cached[prefix] = lease.pages[i]
                lease.own.remove(i)
            lease.path.append(prefix)

    def close(self, lease: SlowLease) -> None:
        """Close twice; the second must do nothing."""
        self.real.close(lease.real)
        self.real.close(lease.real)
        self.leases.remove(lease)
        self.free |= {lease.pages[i] for i in lease.own}
        self.clock += 1
        for prefix in lease.path:
            self.used[prefix] = self.clock

    def clear(self) -> None:
        """Forget all that nobody pins."""
        self.real.clear()
        for prefix in self._unpinned():
            self.free.add(self.cached.pop(prefix))

    def compare(self) -> None:
        """Compare every page, prefix and count, and read every lease's memory back."""
        self.real.check()
        counts, unpinned = self.real.counts(), len(self._unpinned())
        assert (counts.capacity, counts.page_tokens) == (self.num_pages, self.page_tokens)
        assert counts.free + counts.cached + counts.in_use == self.num_pages
        assert (counts.free, counts.cached) == (len(self.free), unpinned)
        assert counts.in_use == len(self._held())
        owners = [
            *self.free,
            *self.cached.values(),
            *(x.pages[i] for x in self.leases for i in x.own),
        ]
        assert sorted(owners) == list(range(self.num_pages)), "a page has no owner, or two"
        for lease in self.leases:
            assert lease.real.pages == lease.pages
            for i, prefix in enumerate(lease.path):
                assert self.memory[lease.pages[i]] == prefix[-self.page_tokens :]
        for prefix, page in self.cached.items():
            assert self.memory[page] == prefix[-self.page_tokens :]
            assert self.real.peek(prefix, len(prefix)) == len(prefix)

    def _held(self) -> set[int]:
        pinned = {self.cached[p] for lease in self.leases for p in lease.path}
        return pinned | {lease.pages[i] for lease in self.leases for i in lease.own}

    def _pins(self, prefix: Prefix) -> int:
        return sum(prefix in lease.path for lease in self.leases)

    def _unpinned(self) -> list[Prefix]:
        pinned = {p for lease in self.leases for p in lease.path}
        return [p for p in self.cached if p not in pinned]

    def _evict_one(self) -> None:
        parents = {p[: -self.page_tokens] for p in self.cached}
        leaf = min((p for p in self._unpinned() if p not in parents), key=lambda p: self.used[p])
        self.free.add(self.cached.pop(leaf))

    def _drop_doubles(self, lease: SlowLease) -> None:
        for i, prefix in enumerate(lease.path):
            if i in lease.own and self._pins(prefix) == 1:
                self.free.add(self.cached[prefix])
                self.cached[prefix] = lease.pages[i]
                lease.own.remove(i)
