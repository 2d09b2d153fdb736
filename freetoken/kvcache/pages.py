"""Who owns which KV page: free, shared through the prefix tree, or private to one lease. Token ids
and page numbers only.

A page has one owner at every moment: the free list, one lease (it alone writes there), or the tree
(full pages whose tokens are final, read by any number of leases that pin them). Pages move free ->
private (grow) -> tree (commit) -> free (evict), or private -> free (close). There is one caller,
the engine's loop; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freetoken.kvcache.radix import Node, RadixTree
from freetoken.types import PageCounts


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's hold on pages, from open() to close(). Only the PageCache writes it."""

    pages: list[int]
    """The whole page table, in order; only grow() appends, nothing already in it changes."""
    num_cached_tokens: int
    """Tokens of the prefix found at open()."""
    node: Node
    """Where the committed part ends in the tree; the path to it is pinned."""
    num_committed: int
    """Pages of the table that the tree knows by their tokens; those after it are private."""
    duplicates: set[int] = field(default_factory=set[int])
    """Places of the table below num_committed whose page stayed private, because the tree had
    another with the same tokens.
    """
    is_open: bool = True


class PageCache:
    """Owns every page number, the prefix tree and all open leases."""

    def __init__(self, num_pages: int, page_tokens: int, *, reuse: bool) -> None:
        """Start with `num_pages` free pages of `page_tokens` tokens. Without `reuse` nothing is
        shared or kept.
        """
        if num_pages < 1 or page_tokens < 1:
            raise ValueError(
                f"expected at least 1 page of at least 1 token, got {num_pages} of {page_tokens};"
                " give the KV cache more memory"
            )
        self.reuse = reuse
        self._capacity = num_pages
        self._page_tokens = page_tokens
        # a stack: the page given back last is the likeliest to be in a CPU cache
        self._free = list(range(num_pages))[::-1]
        self._tree = RadixTree(page_tokens)
        self._leases: set[Lease] = set()

    def open(self, tokens: Sequence[int], limit: int) -> Lease:
        """Pin the longest cached prefix of `tokens`, in full pages and of at most `limit` tokens.

        A caller that wants logits passes len(tokens) - 1, so that at least one token is left to
        compute.
        """
        tree, end = self._tree, min(limit, len(tokens)) // self._page_tokens
        node, num_pages, pages = tree.descend(tree.root, tokens, 0, end)
        tree.pin(node, tree.root)
        lease = Lease(pages, num_pages * self._page_tokens, node, num_pages)
        self._leases.add(lease)
        return lease

    def peek(self, tokens: Sequence[int], limit: int) -> int:
        """Return how many tokens open() would find now. Changes nothing, neither pins nor order of
        eviction.
        """
        return (
            self._tree.match(tokens, min(limit, len(tokens)) // self._page_tokens)
            * self._page_tokens
        )

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Give the lease pages for positions below `num_tokens`, evicting cached pages if none are
        free.

        False: there are not enough even so; the lease is as before. A lease that is alone always
        gets its pages, as long as they are no more than the capacity.
        """
        assert lease.is_open
        need = -(-num_tokens // self._page_tokens) - len(lease.pages)
        if need <= 0:
            return True
        if need > len(self._free) + self._tree.num_unpinned:
            self._replace_duplicates(lease)
            if need > len(self._free) + self._tree.num_unpinned:
                return False
        if need > len(self._free):
            self._free += self._tree.evict(need - len(self._free))
        lease.pages += self._free[: -need - 1 : -1]
        del self._free[-need:]
        return True

    def commit(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Share the full pages below `num_tokens`, whose KV is in memory and final for
        `tokens[:num_tokens]`.

        `tokens` must begin as in the calls before; work is done only for pages that are new. Where
        the tree has these tokens already, under another page, the lease keeps its own.
        """
        assert lease.is_open
        assert num_tokens <= min(len(tokens), len(lease.pages) * self._page_tokens)
        start, end = lease.num_committed, num_tokens // self._page_tokens
        if end <= start or not self.reuse:
            return
        tree = self._tree
        node, known, _ = tree.descend(lease.node, tokens, start, end)
        if known > start:
            tree.pin(node, lease.node)
            lease.duplicates.update(range(start, known))
        if known < end:
            node = tree.extend(node, tokens, known, lease.pages[known:end])
        lease.node, lease.num_committed = node, end

    def close(self, lease: Lease) -> None:
        """Free the lease's private pages and let go of the shared ones, which stay cached. Closing
        again does nothing.
        """
        if not lease.is_open:
            return
        lease.is_open = False
        self._leases.remove(lease)
        self._free += self._private(lease)
        self._tree.unpin(lease.node)

    def clear(self) -> None:
        """Forget every cached page that no lease pins."""
        self._free += self._tree.evict(self._tree.num_unpinned)

    def counts(self) -> PageCounts:
        """Count pages by state; constant time."""
        free, cached = len(self._free), self._tree.num_unpinned
        return PageCounts(
            self._capacity, free, cached, self._capacity - free - cached, self._page_tokens
        )

    def check(self) -> None:
        """Raise AssertionError if a page is lost or has two owners, or a count is wrong. For tests
        and idle moments: walks all pages.
        """
        self._tree.check()
        owners: dict[int, str] = {}
        shared = [(page, "tree") for node in self._tree.nodes() for page in node.pages]
        private = [(page, "lease") for lease in self._leases for page in self._private(lease)]
        for page, owner in [*((page, "free") for page in self._free), *shared, *private]:
            assert 0 <= page < self._capacity, f"page {page} does not exist"
            assert page not in owners, f"page {page} has two owners: {owners[page]} and {owner}"
            owners[page] = owner
        num_lost = self._capacity - len(owners)
        assert num_lost == 0, f"expected every page to have an owner, {num_lost} have none"
        pins: dict[Node, int] = {}
        for lease in self._leases:
            node = lease.node
            while node.parent is not None:
                pins[node] = pins.get(node, 0) + 1
                node = node.parent
        for node in self._tree.nodes():
            expected = pins.get(node, 0)
            assert node.pins == expected, f"expected {expected} pins, found {node.pins}"

    def _private(self, lease: Lease) -> list[int]:
        return [lease.pages[i] for i in lease.duplicates] + lease.pages[lease.num_committed :]

    def _replace_duplicates(self, lease: Lease) -> None:
        """Free the tree's pages that double this lease's own and that no other lease reads; its own
        take their place.

        Without this a lease could pin twice what it needs, and the last one running could wait for
        pages for ever.
        """
        if not lease.duplicates:
            return
        node, end = lease.node, lease.num_committed
        while node.parent is not None:
            start = end - len(node.pages)
            if node.pins == 1:
                for i in range(start, end):
                    if i in lease.duplicates:
                        lease.duplicates.remove(i)
                        self._free.append(node.pages[i - start])
                        node.pages[i - start] = lease.pages[i]
            node, end = node.parent, start
