"""Which tokens end a reply: the union of every place a checkpoint names them.

Checkpoints disagree with themselves: config.json has one id, generation_config.json a list, the
tokenizer a third for chats. Taking one of them makes a model run on and play the user's part, so
all are taken. A request's own settings never shrink the set (`ignore_eos` is the way to go past
it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|endofturn|>",
    "<end_of_utterance>",
)
"""Tokens that only ever end a turn. `<|end|>` is missing on purpose: in one family it ends a turn,
in another only a message within the turn; the former name it in generation_config.json."""

_GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_ids(config: Mapping[str, Any]) -> set[int]:
    """Return the ids of `eos_token_id` in a config.json or generation_config.json: absent, null,
    one or a list.
    """
    inner: Any = config.get("text_config")
    nested: Mapping[str, Any] = (
        cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else dict[str, Any]()
    )
    return _as_ids(config.get("eos_token_id")) | _as_ids(nested.get("eos_token_id"))


def gguf_ids(metadata: Mapping[str, Any]) -> set[int]:
    """Return the end ids a GGUF header names: end of text, of turn and of message."""
    found: set[int] = set()
    for key in _GGUF_KEYS:
        found |= _as_ids(metadata.get(f"tokenizer.ggml.{key}"))
    return found


def turn_end_ids(templates: Iterable[str], special_id: Callable[[str], int | None]) -> set[int]:
    """Return well-known ends of turn that a chat template writes and that are special tokens here.

    A judgement: a base model's config often lists only the end of text, while its chat template
    ends each turn with another token. The template is the proof that this token ends turns; being
    special, it is never text.

    special_id: gives a special token's id, or None if there is no such special token.
    """
    sources = list(templates)
    named = (token for token in TURN_ENDS if any(token in source for source in sources))
    return {number for token in named if (number := special_id(token)) is not None}


def _as_ids(value: object) -> set[int]:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    return {
        item
        for item in values
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0
    }
