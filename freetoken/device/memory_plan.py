"""How the KV cache is sized: one plan in bytes, made from headers before anything is loaded. Plain
numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, and the tokens they hold."""

    weight_bytes: int
    kv_bytes: int
    num_pages: int
    page_tokens: int
    context: int
    """Usable tokens of one request."""

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"memory plan: weights {_gb(self.weight_bytes)}, KV {_gb(self.kv_bytes)} for"
            f" {self.num_pages * self.page_tokens} tokens; context {self.context} tokens a request"
        )


@dataclass(frozen=True, slots=True)
class MemoryAsk:
    """What a plan is made from. None: choose."""

    weight_bytes: int
    kv_token_bytes: int
    model_context: int
    page_tokens: int
    max_running: int
    available_bytes: int
    reserve_bytes: int
    """Left for everything the plan does not list."""
    num_tokens: int | None = None
    max_seq_len: int | None = None


def plan_memory(ask: MemoryAsk) -> MemoryPlan:
    """Size the KV cache. Explicit settings are honoured or refused with what is short, never
    overridden.

    By default it holds up to four full contexts (or one for each request that may run, if fewer),
    in at most half of the memory that the weights leave, and the context shrinks only if not even
    one fits. Raises ConfigError if the weights, or an explicit size, do not fit.
    """
    left = ask.available_bytes - ask.weight_bytes - ask.reserve_bytes
    if left < ask.kv_token_bytes * ask.page_tokens:
        raise ConfigError(
            f"expected {_gb(ask.weight_bytes + ask.reserve_bytes)} of free memory, got"
            f" {_gb(ask.available_bytes)}: free some,"
            " choose a smaller --dtype or a smaller model"
        )
    wanted = min(ask.model_context, ask.max_seq_len or ask.model_context)
    if ask.max_seq_len is not None and ask.max_seq_len > ask.model_context:
        raise ConfigError(
            f"expected --max-seq-len of at most {ask.model_context} (the model's"
            f" context), got {ask.max_seq_len}"
        )
    if ask.num_tokens is not None:
        num_tokens = ask.num_tokens
        if num_tokens * ask.kv_token_bytes > left:
            raise ConfigError(
                f"--num-tokens {num_tokens} needs {_gb(num_tokens * ask.kv_token_bytes)} for KV,"
                f" but {_gb(left)} are left; lower it to {left // ask.kv_token_bytes} or less"
            )
    else:
        num_tokens = min(wanted * min(4, ask.max_running), max(left // 2, 0) // ask.kv_token_bytes)
        num_tokens = max(num_tokens, min(wanted, left // ask.kv_token_bytes))
    num_pages = (
        -(-num_tokens // ask.page_tokens)
        if ask.num_tokens is None
        else num_tokens // ask.page_tokens
    )
    context = min(wanted, num_pages * ask.page_tokens)
    if context < 2 or (ask.max_seq_len is not None and context < ask.max_seq_len):
        raise ConfigError(
            f"a context of {wanted} tokens does not fit: {num_pages} pages of {ask.page_tokens}"
            f" tokens hold {num_pages * ask.page_tokens}; raise --num-tokens or lower --max-seq-len"
        )
    kv_bytes = num_pages * ask.page_tokens * ask.kv_token_bytes
    return MemoryPlan(ask.weight_bytes, kv_bytes, num_pages, ask.page_tokens, context)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
