"""Token ids to text, a few at a time: what was returned so far plus what comes equals the decoding
of all ids.

Two ways. `BytesDetokenizer`: every token has bytes of its own, so an incremental UTF-8 decoder is
exact and costs the same for each token. `WindowDetokenizer`: for other vocabularies; decodes a
short window again for each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from freetoken.chat.pieces import Pieces

_REPLACEMENT = "\ufffd"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one sequence as it grows."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that became certain with these ids; a character whose bytes are
        incomplete waits.
        """
        ...

    def flush(self) -> str:
        """Return what is left at the end: one U+FFFD for an incomplete character, or nothing. Call
        it once.
        """
        ...


class BytesDetokenizer:
    """For byte-level and byte-fallback vocabularies. Invalid bytes become U+FFFD as in
    `bytes.decode`.
    """

    __slots__ = ("_drop_space", "_fragments", "_is_pending", "_texts", "_utf8")

    def __init__(self, pieces: Pieces, *, drop_first_space: bool) -> None:
        self._texts = pieces.texts
        self._fragments = pieces.fragments
        self._utf8 = _new_utf8_decoder("replace")
        self._is_pending = False
        self._drop_space = drop_first_space

    def push(self, ids: Iterable[int]) -> str:
        out = ""
        for token in ids:
            out += self._text_of(token)
        if self._drop_space and out:
            self._drop_space = False
            return out.removeprefix(" ")
        return out

    def _text_of(self, token: int) -> str:
        # A model's vocabulary may be padded past the tokenizer's: such ids have no text, as in
        # decode().
        text = self._texts[token] if 0 <= token < len(self._texts) else ""
        if text is None:
            out = self._utf8.decode(self._fragments[token])
        elif not self._is_pending:
            return text
        elif text:
            out = self._utf8.decode(text.encode())
        else:
            return ""
        self._is_pending = bool(self._utf8.getstate()[0])
        return out

    def flush(self) -> str:
        self._is_pending = False
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies whose decoder looks at neighbours (WordPiece, word-end marks). `decode` is
    the whole decoder.

    Text comes out once it no longer ends in an incomplete character; the window then starts at the
    last such place, one step back, so that the decoder sees the joint between old and new tokens.
    """

    __slots__ = ("_decode", "_ids", "_read", "_start")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        self._read = 0

    def push(self, ids: Iterable[int]) -> str:
        self._ids.extend(ids)
        old, new = self._window()
        if len(new) <= len(old) or new.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._start]
        self._start, self._read = self._read - self._start, len(self._ids)
        return new[len(old) :]

    def flush(self) -> str:
        old, new = self._window()
        self._start = self._read = len(self._ids)
        return new[len(old) :]

    def _window(self) -> tuple[str, str]:
        old = self._decode(self._ids[self._start : self._read])
        return old, self._decode(self._ids[self._start :])
