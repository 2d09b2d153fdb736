"""Token counts of a call as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.server.choices import Choice
from freetoken.server.schema import Reply


def wants_usage(request: Reply) -> bool:
    """Tell whether a stream ends with a usage chunk: only when asked for."""
    options = request.stream_options
    return options is not None and bool(options.include_usage)


def usage(choices: Sequence[Choice], firsts: Sequence[Choice]) -> dict[str, Any]:
    """Return the usage object. `firsts`: one choice for each prompt, since choices of one prompt
    share it.
    """
    prompt_tokens = sum(len(choice.prompt) for choice in firsts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
    }
