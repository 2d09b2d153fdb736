"""Log-probabilities in the two shapes of OpenAI's API. Token ids and texts only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from freetoken.types import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI uses the same number."""


class TokenTexts(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


def chat_logprobs(tokens: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[i].logprobs` of the chat route."""
    content = [
        _entry(tokens, e.token, e.logprob)
        | {"top_logprobs": [_entry(tokens, t, p) for t, p in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: TokenTexts, entries: Sequence[TokenLogprob], offset: int
) -> dict[str, Any]:
    """Return `choices[i].logprobs` of the completions route. `offset`: characters of text before
    these tokens.
    """
    texts = [tokens.token_text(e.token) for e in entries]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(e.logprob, LOWEST) for e in entries],
        "top_logprobs": [_by_text(tokens, e) for e in entries],
        "text_offset": offsets,
    }


def _entry(tokens: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokens.token_text(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokens.token_bytes(token)),
    }


def _by_text(tokens: TokenTexts, entry: TokenLogprob) -> dict[str, float]:
    by_text: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        text = tokens.token_text(token)
        by_text[text] = max(
            logprob, by_text.get(text, LOWEST)
        )  # several ids may share a text: keep the likeliest
    return by_text
