"""Keeps special tokens a user typed from becoming special tokens. Text and positions only; no
vocabulary is loaded.

A chat template writes control tokens (`<|im_end|>`) and user text into one string, and the
tokenizer cannot tell them apart. Before rendering, `mark` replaces the first letter of every
control token's name in user text by a stand-in letter that occurs nowhere else; after rendering,
`unmark` puts it back and remembers where it was. The rendered text is unchanged, and `runs` knows
which names are the user's.

Beginnings of a name at the end of a field are marked too: two fields side by side could complete
it. What a template does inside a field beyond stripping it (cutting letters out of the middle) is
outside this protection.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from freetoken.errors import RequestError

_STEM = 4
"""Letters of a name searched for first: few different stems for thousands of `<unused17>`."""

_STAND_INS = (*range(0x12000, 0x1239A), *range(0xF0000, 0xFFFFE))
"""Cuneiform signs, letters without case that `repr` leaves as they are and hardly anyone writes;
then private use."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles may be part of a control token that the template builds (`'<|' + role + '|>'`); other roles
are user text."""


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of rendered text to be encoded in one go. is_plain: special tokens in it are the
    user's text.
    """

    text: str
    is_plain: bool
    is_first: bool


@dataclass(frozen=True, slots=True)
class Marked:
    """A template's arguments with stand-ins and the letters these stand for; {}: nothing is
    marked.
    """

    value: dict[str, Any]
    letters: dict[str, str]

    def unmark(self, text: str) -> tuple[str, list[int]]:
        """Return the rendered text with its own letters again, and the sorted positions of those
        that were marked.
        """
        if not self.letters:
            return text, []
        found = [match.start() for match in re.finditer(f"[{''.join(self.letters)}]", text)]
        return text.translate(str.maketrans(self.letters)), found


class ControlTokens:
    """The names of a vocabulary's special tokens and how to find them in text."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._tokens = {token.content: token for token in tokens if token.content}
        self._lengths = sorted({len(name) for name in self._tokens}, reverse=True)
        stems = sorted({re.escape(name[:_STEM]) for name in self._tokens}, key=len, reverse=True)
        self._stem = re.compile("|".join(stems)) if stems else None
        self._firsts = frozenset(name[0] for name in self._tokens)
        letters = "".join(re.escape(letter) for letter in sorted(self._firsts))
        self._first = re.compile(f"[{letters}]") if letters else None

    @classmethod
    def of(cls, core: Core) -> ControlTokens:
        return cls([token for token in core.get_added_tokens_decoder().values() if token.special])

    def mark(self, value: dict[str, Any], template: str) -> Marked:
        """Return `value` (messages, tools, ...: dicts, lists, strings) with control tokens in it
        made harmless.

        template: the source that will render it; stand-ins must not occur there either.
        Raises RequestError if the text leaves no letter free to stand in, which no real text does.
        """
        strings = list(_strings(value))
        if not any(self._dangers(text) for text in strings):
            return Marked(value, {})
        taken = set(template).union(*strings)
        free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        stand_in = dict(zip(sorted(self._firsts), free, strict=False))
        if len(stand_in) < len(self._firsts):
            raise RequestError(
                "expected text, got every letter of the private use area", param="messages"
            )
        marked = _replaced(value, lambda text: self._mark_text(text, stand_in))
        return Marked(
            cast("dict[str, Any]", marked), {sign: letter for letter, sign in stand_in.items()}
        )

    def runs(self, text: str, marked: Sequence[int]) -> Iterator[Run]:
        """Cut `text` so that no run holds both a control token of the template and one of the
        user.
        """
        spans = list(self._spans(text)) if marked else []
        if not any(_touches(span, marked) for span in spans):
            yield Run(text, is_plain=False, is_first=True)
            return
        done = 0  # start of the run being gathered
        begin, is_users = 0, False  # the stretch since the last control token of the template
        for start, end in [*spans, (len(text), len(text))]:
            if start < begin:
                continue
            if start < len(text) and _touches((start, end), marked):
                is_users = True
                continue
            if is_users:
                if begin > done:
                    yield Run(text[done:begin], is_plain=False, is_first=done == 0)
                if stretch := self._stripped(text, begin, start):
                    yield Run(stretch, is_plain=True, is_first=begin == 0)
                done = start
            begin, is_users = end, False
        if done < len(text):
            yield Run(text[done:], is_plain=False, is_first=done == 0)

    def _dangers(self, text: str) -> list[int]:
        """Positions where a control token's name starts, or could start if the next field went on
        with it.
        """
        if self._first is None or self._first.search(text) is None:
            return []
        found = [start for start, _ in self._spans(text)]
        for end in {len(text), len(text.rstrip())}:
            tail = text[max(0, end - self._lengths[0]) : end]
            if not self._firsts.isdisjoint(tail):
                found += [end - n for n in range(1, len(tail) + 1) if tail[-n:] in self._beginnings]
        return found

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """Every proper beginning of a name."""
        return frozenset(name[:n] for name in self._tokens for n in range(1, len(name)))

    def _mark_text(self, text: str, stand_in: dict[str, str]) -> str:
        letters = list(text)
        for position in self._dangers(text):
            letters[position] = stand_in[letters[position]]
        return "".join(letters)

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the longest name at each position that begins one; they may
        overlap.
        """
        assert self._stem is not None
        match = self._stem.search(text)
        while match is not None:
            start = match.start()
            for length in self._lengths:
                if text[start : start + length] in self._tokens:
                    yield start, start + length
                    break
            match = self._stem.search(text, start + 1)

    def _stripped(self, text: str, start: int, end: int) -> str:
        """A stretch without the blanks that the control tokens beside it swallow (`rstrip`,
        `lstrip` tokens).
        """
        stretch = text[start:end]
        before = (self._tokens.get(text[max(0, start - n) : start]) for n in self._lengths)
        after = (self._tokens.get(text[end : end + n]) for n in self._lengths)
        if any(token is not None and token.rstrip for token in before):
            stretch = stretch.lstrip()
        if any(token is not None and token.lstrip for token in after):
            stretch = stretch.rstrip()
        return stretch


def _touches(span: tuple[int, int], marked: Sequence[int]) -> bool:
    at = bisect_left(marked, span[0])
    return at < len(marked) and marked[at] < span[1]


def _strings(value: object) -> Iterator[str]:
    """Every string in a tree of dicts and lists, keys too; known roles left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            yield from _strings(key)
            if not _is_known_role(key, item):
                yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from _strings(item)


def _replaced(value: object, change: Callable[[str], str]) -> object:
    """The same tree with every string that `_strings` yields changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            _replaced(key, change): item if _is_known_role(key, item) else _replaced(item, change)
            for key, item in cast("dict[Any, Any]", value).items()
        }
    if isinstance(value, (list, tuple)):
        return [_replaced(item, change) for item in cast("Sequence[Any]", value)]
    return value


def _is_known_role(key: object, item: object) -> bool:
    return key == "role" and isinstance(item, str) and item in ROLES
