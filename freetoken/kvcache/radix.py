"""A radix tree over full KV pages: which token prefixes are in memory, who pins them, which page
goes first when room is short.

Knows token ids and page numbers only. An edge is a run of whole pages (compressed); it is split
where sequences part. A node is pinned by every lease that passes through it, so an unpinned node
has only unpinned nodes below it and all of them can be evicted. Last use is the moment the last
lease let go: while pinned a page is in use, and evicting takes the unpinned leaf let go longest
ago, from its tail, one page at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

_TOKEN_BYTES = array("I").itemsize


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages after its parent's. `key` holds their tokens, packed; both are empty only in
    the root and in dead nodes.
    """

    parent: Node | None
    key: bytearray
    pages: list[int]
    pins: int = 0
    last_use: int = 0
    children: dict[bytes, Node] = field(default_factory=dict["bytes", "Node"])
    """By the packed tokens of the child's first page."""


class RadixTree:
    """Owns the nodes. The page cache above it is the only caller and owns the free list and the
    leases.
    """

    def __init__(self, page_tokens: int) -> None:
        self.root = Node(None, bytearray(), [])
        self.num_unpinned = 0
        """Pages in nodes that no lease pins: all of them can be evicted."""
        self._page_tokens = page_tokens
        self._page_bytes = page_tokens * _TOKEN_BYTES
        self._num_nodes = 0
        self._clock = 0
        self._num_entries = 0
        # (last use, entry number, node): a node's entry holds as long as its last use is the same
        # and it is an unpinned leaf.
        # Stale entries are skipped when they surface; a sorted list would need a search when a
        # parent becomes a leaf.
        self._heap: list[tuple[int, int, Node]] = []

    def match(self, tokens: Sequence[int], num_pages: int) -> int:
        """Return how many of the first `num_pages` full pages of `tokens` are here. Changes
        nothing.
        """
        node, done = self.root, 0
        while done < num_pages:
            child, length = self._step(node, tokens, done, num_pages)
            if child is None:
                break
            node, done = child, done + length
            if length < len(child.pages):
                break
        return done

    def descend(
        self, node: Node, tokens: Sequence[int], start: int, end: int
    ) -> tuple[Node, int, list[int]]:
        """Follow pages start .. end of `tokens` below `node`, which ends at page `start`, as far as
        they are here.

        Returns the node reached, the page it ends at and the pages passed. The last run is split
        where the match ends.
        """
        pages: list[int] = []
        while start < end:
            child, length = self._step(node, tokens, start, end)
            if child is None:
                break
            node = self._split(child, length) if length < len(child.pages) else child
            pages += node.pages
            start += length
        return node, start, pages

    def extend(self, node: Node, tokens: Sequence[int], start: int, pages: list[int]) -> Node:
        """Add `pages`, holding tokens from page `start`, below `node`, which the caller alone
        extends; return the node they end in.

        The caller pins `node`, and descend() found nothing below it for these tokens. The pages
        come pinned by the caller.
        """
        key = self._pack(tokens, start, start + len(pages))
        if node.pins == 1 and not node.children and node is not self.root:
            node.key += key
            node.pages += pages
            return node
        child = Node(node, bytearray(key), list(pages), pins=1)
        node.children[key[: self._page_bytes]] = child
        self._num_nodes += 1
        return child

    def pin(self, node: Node, stop: Node) -> None:
        """Pin the path from `node` up to, and without, its ancestor `stop`."""
        while node is not stop:
            if node.pins == 0:
                self.num_unpinned -= len(node.pages)
            node.pins += 1
            assert node.parent is not None
            node = node.parent

    def unpin(self, node: Node) -> None:
        """Let go of the path from `node` to the root, as its latest user."""
        self._clock += 1
        leaf = node
        while node.parent is not None:
            node.pins -= 1
            node.last_use = self._clock
            assert node.pins >= 0
            if node.pins == 0:
                self.num_unpinned += len(node.pages)
            node = node.parent
        self._offer(leaf)

    def evict(self, num_pages: int) -> list[int]:
        """Take up to `num_pages` pages out of the tree, least recently used first; return them."""
        pages: list[int] = []
        while self._heap and len(pages) < num_pages:
            last_use, _, node = heappop(self._heap)
            if node.last_use != last_use or not self._is_evictable(node):
                continue
            keep = max(0, len(node.pages) - (num_pages - len(pages)))
            pages += reversed(node.pages[keep:])
            parent, first_page = node.parent, bytes(node.key[: self._page_bytes])
            del node.pages[keep:]
            del node.key[keep * self._page_bytes :]
            if keep:
                self._offer(node)
                continue
            assert parent is not None
            del parent.children[first_page]
            node.parent = None
            self._num_nodes -= 1
            self._offer(parent)
        self.num_unpinned -= len(pages)
        return pages

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents first; for checks."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def check(self) -> None:
        """Raise AssertionError if the tree contradicts itself. Costs a walk over all nodes and
        tokens.
        """
        unpinned = num_nodes = 0
        offered = {id(node) for last_use, _, node in self._heap if node.last_use == last_use}
        for node in self.nodes():
            num_nodes += 1
            parent = node.parent
            assert parent is not None, "a node in the tree has no parent"
            assert node.pages, "a node holds no page"
            assert len(node.key) == len(node.pages) * self._page_bytes, (
                "tokens and pages of a node differ in number"
            )
            assert parent.children.get(bytes(node.key[: self._page_bytes])) is node, (
                "a node is filed under other tokens"
            )
            assert parent is self.root or parent.pins >= node.pins, (
                "a node is pinned more often than its parent"
            )
            unpinned += 0 if node.pins else len(node.pages)
            assert id(node) in offered or not self._is_evictable(node), (
                "an unpinned leaf cannot be evicted"
            )
        assert unpinned == self.num_unpinned, (
            f"expected {unpinned} unpinned pages, counted {self.num_unpinned}"
        )
        assert num_nodes == self._num_nodes, (
            f"expected {num_nodes} nodes, counted {self._num_nodes}"
        )

    def _pack(self, tokens: Sequence[int], start: int, end: int) -> bytes:
        # Packed tokens compare and hash at memory speed; 32k of them take 0.4 ms to pack, a
        # comparison of lists as long.
        return array("I", tokens[start * self._page_tokens : end * self._page_tokens]).tobytes()

    def _step(
        self, node: Node, tokens: Sequence[int], start: int, end: int
    ) -> tuple[Node | None, int]:
        """Find the child of `node` that continues with page `start`, and how many of its pages do
        before page `end`.
        """
        child = node.children.get(self._pack(tokens, start, start + 1)) if node.children else None
        if child is None:
            return None, 0
        end = min(end, start + len(child.pages))
        return child, self._count_equal(child.key, self._pack(tokens, start, end))

    def _count_equal(self, key: bytearray, wanted: bytes) -> int:
        """Count the pages that both begin with; halving, because one comparison of a long run costs
        less than a loop over pages.
        """
        if key.startswith(wanted):
            return len(wanted) // self._page_bytes
        low, high = 0, len(wanted) // self._page_bytes
        while high - low > 1:
            middle = (low + high) // 2
            first, last = low * self._page_bytes, middle * self._page_bytes
            if key.startswith(wanted[first:last], first, last):
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut a run in two; return the new upper part. The lower part keeps its identity, so leases
        that end there stay right.
        """
        parent, num_bytes = node.parent, num_pages * self._page_bytes
        assert parent is not None
        assert 0 < num_pages < len(node.pages)
        upper = Node(parent, node.key[:num_bytes], node.pages[:num_pages], node.pins, node.last_use)
        parent.children[bytes(upper.key[: self._page_bytes])] = upper
        del node.key[:num_bytes]
        del node.pages[:num_pages]
        upper.children[bytes(node.key[: self._page_bytes])] = node
        node.parent = upper
        self._num_nodes += 1
        return upper

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and node.pins == 0 and not node.children

    def _offer(self, node: Node) -> None:
        if not self._is_evictable(node):
            return
        self._num_entries += 1
        heappush(self._heap, (node.last_use, self._num_entries, node))
        # without eviction stale entries would only pile up
        if len(self._heap) > 2 * self._num_nodes + 64:
            self._heap = [
                e for e in self._heap if e[2].last_use == e[0] and self._is_evictable(e[2])
            ]
            heapify(self._heap)
