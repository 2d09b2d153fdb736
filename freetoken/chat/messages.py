"""Brings chat messages of any client into the one form that chat templates are written for. No
rendering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from freetoken.errors import RequestError

ContentStyle = Literal["string", "either", "parts"]
"""What a template takes as a message's content: only a string, a string or a list of parts, only a
list of parts."""

_TEXT_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kind of a text part -> the key its text is under."""


def template_messages(
    messages: Sequence[Mapping[str, Any]], style: ContentStyle, *, knows_developer: bool
) -> list[dict[str, Any]]:
    """Return copies ready for a template.

    Content: None or absent becomes "", one text part becomes its string (a client's choice of form
    must not change the prompt), several stay a list where the template takes lists and are joined
    by line breaks elsewhere. Tool call arguments become objects if they are JSON objects, else stay
    text. The role `developer` becomes `system` for templates that never mention it. Raises
    RequestError naming the message and part.
    """
    return [
        _message(
            _mapping(message, f"messages[{i}]"),
            style,
            f"messages[{i}]",
            knows_developer=knows_developer,
        )
        for i, message in enumerate(messages)
    ]


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(
            f"expected an object, got {type(value).__name__}, at {where}", param=where
        )
    return cast("Mapping[str, Any]", value)


def _message(
    message: Mapping[str, Any], style: ContentStyle, where: str, *, knows_developer: bool
) -> dict[str, Any]:
    out = dict(message)
    if out.get("role") == "developer" and not knows_developer:
        out["role"] = "system"
    out["content"] = _content(message.get("content"), style, f"{where}.content")
    calls = out.pop("tool_calls", None)
    if calls:  # templates ask only whether the key is there: an empty list must not be
        if not isinstance(calls, list):
            place = f"{where}.tool_calls"
            raise RequestError(
                f"expected a list, got {type(calls).__name__}, at {place}", param=place
            )
        out["tool_calls"] = [
            _call(_mapping(call, f"{where}.tool_calls[{i}]"))
            for i, call in enumerate(cast("list[object]", calls))
        ]
    return out


def _content(content: object, style: ContentStyle, where: str) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        texts = [content or ""]
    elif isinstance(content, (list, tuple)):
        parts = cast("Sequence[Any]", content)
        texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(parts)]
    else:
        raise RequestError(
            f"expected a string or a list of text parts, got {type(content).__name__}, at {where}",
            param=where,
        )
    if style == "parts" or (style == "either" and len(texts) > 1):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, Any]", part)
        kind = fields.get("type")
        text = fields.get(_TEXT_KINDS.get(kind, "")) if isinstance(kind, str) else None
        if isinstance(text, str):
            return text
        raise RequestError(
            f"expected a part of type 'text', got {kind!r}, at {where}; send text", param=where
        )
    raise RequestError(f"expected a text part, got {type(part).__name__}, at {where}", param=where)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    fields = dict(cast("Mapping[str, Any]", function))
    fields["arguments"] = _arguments(fields.get("arguments"))
    return {**call, "function": fields}


def _arguments(arguments: object) -> object:
    """Templates iterate over arguments; clients send them as JSON text, which a model may have
    written wrongly.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return cast("dict[str, Any]", value) if isinstance(value, dict) else arguments
