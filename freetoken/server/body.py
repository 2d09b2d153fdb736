"""From bytes to a typed request: what is wrong is said with the field's path and its value. Knows
no single field.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar, cast

import msgspec

from freetoken.errors import RequestError

T = TypeVar("T")

_AT = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
_STEP = re.compile(r"\.(?P<name>[A-Za-z_]\w*)|\[(?P<index>\d+)\]")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""One JSON escape: a surrogate pair, half of one, or any other."""

_MAX_SHOWN = 80
"""Characters of a refused value repeated to the client: enough to recognise it, not enough to
mirror a document.
"""


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return `body` as the decoder's type. Raises RequestError naming the field; unknown fields are
    ignored.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error), body) from None
    except RecursionError:
        raise RequestError("expected JSON of reasonable depth, got one nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        repaired = _ESCAPE.sub(_whole_character, body)
        if repaired == body:
            raise _malformed(body, error) from None
    return decode(repaired, decoder)


def _whole_character(escape: re.Match[bytes]) -> bytes:
    """Clients that cut strings by length send half an emoji; U+FFFD in its place keeps the chat
    alive.
    """
    return rb"\ufffd" if escape["lone"] else escape[0]


def _named(text: str, body: bytes) -> RequestError:
    at = _AT.search(text)
    what = text[: at.start()] if at else text
    path = at["path"].replace("[...]", "").lstrip(".") if at else ""
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(
            f"{param}: expected a value, got none; add the field", param=param, code="missing_field"
        )
    expected = what.split(", got ")[0].replace("`", "")
    try:
        got = _shown(_value_at(body, path))
    except (msgspec.DecodeError, RecursionError):  # what follows the wrong field is no JSON either
        got = what.partition(", got ")[2].replace("`", "") or "something else"
    return RequestError(
        f"{path or 'body'}: {expected[:1].lower()}{expected[1:]}, got {got}", param=path or None
    )


def _value_at(body: bytes, path: str) -> object:
    value: Any = msgspec.json.decode(body)
    for step in _STEP.finditer(f".{path}" if path else ""):
        name, index = step["name"], step["index"]
        value = (
            cast("dict[str, Any]", value)[name]
            if name is not None
            else cast("list[Any]", value)[int(index)]
        )
    return value


def _shown(value: object) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.EncodeError, RecursionError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _malformed(body: bytes, error: Exception) -> RequestError:
    # NaN and Infinity are no JSON, but Python clients send them: then the field can still be named.
    try:
        found = _non_finite(json.loads(body), "")
    except (ValueError, RecursionError):
        found = None
    if found is not None:
        return RequestError(f"{found[0]}: expected a finite number, got {found[1]}", param=found[0])
    if not body:
        return RequestError("expected a JSON object as body, got an empty body")
    return RequestError(f"expected a JSON object as body, got something else: {error}")


def _non_finite(value: object, path: str) -> tuple[str, str] | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, str(value))
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        named = cast("dict[str, object]", value)
        items = [(f"{path}.{key}" if path else key, item) for key, item in named.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(cast("list[object]", value))]
    return next((found for where, item in items if (found := _non_finite(item, where))), None)
