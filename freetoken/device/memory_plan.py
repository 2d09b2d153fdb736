"""One plan in bytes, made from headers before anything is loaded: weights, KV cache, working
memory, tables, graphs. Plain numbers only: what each costs is worked out in `footprint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken.errors import ConfigError

FLOOR_TOKENS = 32_768
"""Context that a default start keeps. A coding agent's first prompt has about 25k tokens: at half
it does not fit, at double small cards lose the chunk size that makes prompts fast."""

_CHUNK_SHARE = 4
"""Working memory of a prompt chunk takes at most this part of what the weights leave. At 2 the KV
cache of a small card is halved; at 8 its chunks get so short that prompts take twice as long."""

_FULL_CONTEXTS = 4
"""Contexts that the KV cache holds by default, memory allowing: one conversation and three agents
beside it."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Working memory of the longest step: bytes a unit of each thing it grows with."""

    fixed_bytes: int = 0
    token_bytes: int = 0
    """Each token of a prompt chunk."""
    context_bytes: int = 0
    """Each token of context of one request."""
    pair_bytes: int = 0
    """Each token of a chunk times each token of context: masks."""
    kv_token_bytes: int = 0
    """Each token that the KV cache holds."""


@dataclass(frozen=True, slots=True)
class HostAsk:
    """RAM that a GPU start needs beside the GPU's own memory."""

    available_bytes: int
    pinned_bytes: int
    loading_bytes: int
    """Tensors on their way to the GPU, while weights load."""
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryAsk:
    """What a plan is made from. None: choose."""

    is_gpu: bool
    available_bytes: int
    dense_bytes: int
    expert_bytes: int
    kv_token_bytes: int
    workspace: Workspace
    slot_bytes: int
    """Sampling tables and logits of each request that may run."""
    graph_bytes: int
    reserve_bytes: int
    """Left for what the plan does not list: driver, libraries, rounding of allocations."""
    model_context: int
    page_tokens: int
    max_running: int
    chunk_range: tuple[int, int]
    """Fewest and most tokens of a prompt chunk to choose from."""
    loading_bytes: int = 0
    """Needed in the same memory while weights load, given back before the KV cache is used."""
    num_tokens: int | None = None
    max_seq_len: int | None = None
    max_prefill: int | None = None
    host: HostAsk | None = None

    @property
    def place(self) -> str:
        return "GPU memory" if self.is_gpu else "RAM"

    @property
    def wanted(self) -> int:
        """Context to aim for."""
        return self.max_seq_len or self.model_context

    @property
    def chunk_limits(self) -> tuple[int, int]:
        """Fewest and most tokens of a chunk; equal if the person said how many."""
        if self.max_prefill is None:
            return self.chunk_range
        return self.max_prefill, self.max_prefill

    @property
    def fixed_bytes(self) -> int:
        """All that depends on neither chunk nor context."""
        tables = self.slot_bytes * self.max_running
        weights = self.dense_bytes + self.expert_bytes
        rest = tables + self.graph_bytes + self.reserve_bytes
        return weights + self.workspace.fixed_bytes + rest

    def cache_bytes(self, num_tokens: int) -> int:
        """KV of whole pages for `num_tokens`, and the working memory that grows with them."""
        work, longest = self.workspace, self.chunk_limits[1]
        context = min(num_tokens, self.wanted)
        each = self.kv_token_bytes + work.kv_token_bytes
        whole = -(-num_tokens // self.page_tokens) * self.page_tokens
        return each * whole + (work.context_bytes + work.pair_bytes * longest) * context

    def cache_tokens(self, num_bytes: int) -> int:
        """The most tokens in whole pages that `cache_bytes` fits into `num_bytes`."""
        work, longest, page = self.workspace, self.chunk_limits[1], self.page_tokens
        each = self.kv_token_bytes + work.kv_token_bytes
        context = work.context_bytes + work.pair_bytes * longest
        if num_bytes < self.cache_bytes(self.wanted):
            return max(num_bytes, 0) // ((each + context) * page) * page
        return (num_bytes - context * self.wanted) // (each * page) * page


@dataclass(frozen=True, slots=True)
class Use:
    """One line of the plan. A transient use ends before the KV cache is used and is not summed."""

    name: str
    num_bytes: int
    note: str = ""
    is_transient: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """One kind of memory and what is kept in it."""

    name: str
    available_bytes: int
    uses: tuple[Use, ...]

    @property
    def unused_bytes(self) -> int:
        return self.available_bytes - sum(u.num_bytes for u in self.uses if not u.is_transient)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a start allocates."""

    num_pages: int
    page_tokens: int
    context: int
    """Usable tokens of one request, prompt and reply."""
    max_prefill_tokens: int
    """Most prompt tokens of one step."""
    memories: tuple[Memory, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    """What a person should know: why the context is short, and what to change."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_pages * self.page_tokens

    def describe(self) -> str:
        """The plan as a table."""
        lines: list[str] = []
        for memory in self.memories:
            lines += memory_lines(memory)
        tokens = f"{self.context:,} tokens of prompt and reply in one request"
        return "\n".join(["memory plan", *lines, f"  {'usable context':<26}{tokens}"])


def memory_lines(memory: Memory) -> list[str]:
    """Rows of a table: name, gigabytes, remark."""
    lines = [f"  {memory.name + ', free':<24}{gb(memory.available_bytes):>12}"]
    for use in memory.uses:
        note = f"  {use.note}" if use.note else ""
        lines.append(f"    {use.name:<22}{gb(use.num_bytes):>12}{note}")
    word, left = ("unused", memory.unused_bytes) if memory.unused_bytes >= 0 else ("short", 0)
    return [*lines, f"    {word:<22}{gb(left or abs(memory.unused_bytes)):>12}"]


def plan_memory(ask: MemoryAsk) -> MemoryPlan:
    """Size KV cache and prompt chunks. Explicit settings are honoured or refused with what is short
    and the flag to change, never overridden.

    By default the KV cache holds four full contexts (or one for each request that may run, if
    fewer) in at most half of what the weights leave; the context shrinks only if not even one fits,
    and chunks shrink before the context falls under FLOOR_TOKENS. More memory never gives a shorter
    context. Raises ConfigError.
    """
    _check_flags(ask)
    _check_host(ask)
    lowest, longest = ask.chunk_limits
    each = ask.workspace.token_bytes
    left = ask.available_bytes - ask.fixed_bytes
    _check_weights(ask, left - each * lowest)
    floor = ask.num_tokens or ask.max_seq_len or min(ask.wanted, FLOOR_TOKENS)
    if (ask.num_tokens or ask.max_seq_len) is not None:
        _check_cache(ask, floor, left - each * lowest)
    spare = min(left // _CHUNK_SHARE, each * longest, left - ask.cache_bytes(floor))
    budget = max(each * lowest, spare)
    num_tokens = _choose_tokens(ask, left - budget)
    context = min(ask.wanted, ask.num_tokens or num_tokens, num_tokens)
    plan = MemoryPlan(
        num_pages=num_tokens // ask.page_tokens,
        page_tokens=ask.page_tokens,
        context=context,
        max_prefill_tokens=_chunk_in(budget, ask),
    )
    return MemoryPlan(
        plan.num_pages,
        plan.page_tokens,
        plan.context,
        plan.max_prefill_tokens,
        _memories(ask, plan),
        _notes(ask, context, left - each * lowest),
    )


def gb(count: int) -> str:
    """Bytes for a person; 1 GB is 10^9 bytes."""
    return f"{count / 1e9:.2f} GB"


def _choose_tokens(ask: MemoryAsk, room: int) -> int:
    page = ask.page_tokens
    if ask.num_tokens is not None:
        return -(-ask.num_tokens // page) * page
    full = -(-ask.wanted // page) * page
    several = full * min(_FULL_CONTEXTS, ask.max_running)
    return max(min(several, ask.cache_tokens(room // 2)), min(full, ask.cache_tokens(room)))


def _chunk_in(budget: int, ask: MemoryAsk) -> int:
    lowest, longest = ask.chunk_limits
    step = max(1, lowest // 2)
    steps = (budget // max(1, ask.workspace.token_bytes) - lowest) // step
    return min(longest, lowest + max(0, steps) * step)


# Refusals -----------------------------------------------------------------------------------------


def _check_flags(ask: MemoryAsk) -> None:
    """Settings that contradict the model or each other, whatever the memory."""
    if ask.max_seq_len is not None and ask.max_seq_len > ask.model_context:
        raise ConfigError(
            f"--max-seq-len: expected at most {ask.model_context} (the model's context), got"
            f" {ask.max_seq_len}; lower it"
        )
    if ask.num_tokens is not None and ask.num_tokens < (ask.max_seq_len or 2):
        raise ConfigError(
            f"--num-tokens: expected at least --max-seq-len, {ask.max_seq_len or 2}, got"
            f" {ask.num_tokens}: {(ask.max_seq_len or 2) - ask.num_tokens} tokens short; raise"
            " --num-tokens or lower --max-seq-len"
        )


def _check_weights(ask: MemoryAsk, room: int) -> None:
    """Room is what is left for the KV cache with the shortest chunk."""
    loading = ask.dense_bytes + ask.expert_bytes + ask.loading_bytes + ask.reserve_bytes
    if ask.available_bytes < loading:
        raise ConfigError(
            f"expected {gb(loading)} of {ask.place} to load (weights"
            f" {gb(ask.dense_bytes + ask.expert_bytes)} and {gb(ask.loading_bytes)} in reading),"
            f" got {gb(ask.available_bytes)}: {gb(loading - ask.available_bytes)} short;"
            f" {_cures(ask, loading - ask.available_bytes)}"
        )
    short = ask.cache_bytes(max(2, ask.page_tokens)) - room
    if short > 0:
        work = ask.workspace.fixed_bytes + ask.workspace.token_bytes * ask.chunk_limits[0]
        raise ConfigError(
            f"expected {gb(ask.available_bytes + short)} of {ask.place} (dense weights"
            f" {gb(ask.dense_bytes)}, expert weights {gb(ask.expert_bytes)}, working memory"
            f" {gb(work)}, tables and graphs"
            f" {gb(ask.slot_bytes * ask.max_running + ask.graph_bytes)}, reserve"
            f" {gb(ask.reserve_bytes)}, one page of {ask.page_tokens} tokens"
            f" {gb(ask.cache_bytes(ask.page_tokens))}), got {gb(ask.available_bytes)}:"
            f" {gb(short)} short; {_cures(ask, short)}"
        )


def _check_cache(ask: MemoryAsk, num_tokens: int, room: int) -> None:
    """Room is what is left for the KV cache with the shortest chunk."""
    needed = ask.cache_bytes(num_tokens)
    if needed <= room:
        return
    flag = "--max-seq-len" if ask.num_tokens is None else "--num-tokens"
    raise ConfigError(
        f"{flag} {num_tokens}: expected {gb(needed)} of {ask.place} for the KV cache, got"
        f" {gb(room)} left beside weights and working memory: {gb(needed - room)} short; lower"
        f" {flag} to {ask.cache_tokens(room)} or less, or {_cures(ask, needed - room)}"
    )


def _check_host(ask: MemoryAsk) -> None:
    host = ask.host
    if host is None:
        return
    needed = host.pinned_bytes + host.loading_bytes + host.reserve_bytes
    if needed > host.available_bytes:
        raise ConfigError(
            f"expected {gb(needed)} of RAM to load the weights through (reading"
            f" {gb(host.loading_bytes)}, pinned {gb(host.pinned_bytes)}, reserve"
            f" {gb(host.reserve_bytes)}), got {gb(host.available_bytes)}:"
            f" {gb(needed - host.available_bytes)} short; end other programs"
        )


def _cures(ask: MemoryAsk, short: int) -> str:
    """Flags that alone would free `short` bytes, each with its value; then the wider choices."""
    cures: list[str] = []
    each, page = ask.workspace.token_bytes, ask.page_tokens
    if ask.max_prefill is not None and each:
        fewer = ask.max_prefill + -short // each
        if fewer >= 1:
            cures.append(f"lower --max-prefill-length to {fewer} or less")
    if ask.slot_bytes:
        fewer = ask.max_running + -short // ask.slot_bytes
        if fewer >= 1:
            cures.append(f"lower --max-running-requests to {fewer} or less")
    if ask.cache_bytes(page) - ask.cache_bytes(2) >= short and page > 2:
        cures.append("lower --page-size")
    if ask.is_gpu:
        cures.append("compute in RAM with --device cpu")
    cures.append("choose a smaller --dtype or a smaller model")
    return ", or ".join([f"free {gb(short)}", *cures])


def _notes(ask: MemoryAsk, context: int, room: int) -> tuple[str, ...]:
    """Say why the context is shorter than agents need, if nobody asked for that."""
    floor = min(ask.model_context, FLOOR_TOKENS)
    if context >= floor or ask.num_tokens is not None or ask.max_seq_len is not None:
        return ()
    short = ask.cache_bytes(floor) - room
    return (
        f"the usable context is {context} tokens and not {floor}: KV takes"
        f" {ask.kv_token_bytes} bytes a token and {gb(room)} of {ask.place} are left for it,"
        f" {gb(short)} short; {_cures(ask, short)}",
    )


# The table ----------------------------------------------------------------------------------------


def _memories(ask: MemoryAsk, plan: MemoryPlan) -> tuple[Memory, ...]:
    work, chunk = ask.workspace, plan.max_prefill_tokens
    working = (
        work.fixed_bytes
        + work.token_bytes * chunk
        + (work.context_bytes + work.pair_bytes * chunk) * plan.context
        + work.kv_token_bytes * plan.num_tokens
    )
    pages = f"{plan.num_tokens:,} tokens in {plan.num_pages:,} pages of {plan.page_tokens}"
    uses = [
        Use("dense weights", ask.dense_bytes),
        Use("expert weights", ask.expert_bytes),
        Use("KV cache", ask.kv_token_bytes * plan.num_tokens, pages),
        Use("working memory", working, f"prompt chunks of up to {chunk:,} tokens"),
        Use("sampling", ask.slot_bytes * ask.max_running, f"{ask.max_running} requests at once"),
        Use("decode graphs", ask.graph_bytes),
        Use("reserve", ask.reserve_bytes, "driver, libraries" if ask.is_gpu else "libraries"),
        Use("while loading", ask.loading_bytes, "given back before KV is used", is_transient=True),
    ]
    kept = tuple(use for use in uses if use.num_bytes or use.name == "KV cache")
    found = [Memory(ask.place, ask.available_bytes, kept)]
    if ask.host is not None:
        host = ask.host
        held = (
            Use("pinned", host.pinned_bytes, "results and settings of steps"),
            Use("reserve", host.reserve_bytes, "libraries"),
            Use("while loading", host.loading_bytes, "tensors being read", is_transient=True),
        )
        found.append(Memory("RAM", host.available_bytes, held))
    return tuple(found)
