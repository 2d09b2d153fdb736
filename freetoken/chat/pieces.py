"""What each token id stands for, byte for byte. Read once from a vocabulary; knows no text streams
and no templates.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Core

SPACE_MARK = "\u2581"  # SentencePiece writes a space this way
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_alphabet() -> dict[str, int]:
    """Return the 256 letters that byte-level vocabularies spell bytes with.

    Printable Latin-1 bytes stand for themselves; the rest take the letters from U+0100 on, in
    order. Source: the byte-to-unicode table of GPT-2, used by every byte-level BPE since.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in sorted(printable)}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Pieces:
    """Every token's share of the text, by id.

    texts               own text of each id, None if its bytes are not valid UTF-8 alone;
                        "" for special tokens and for ids without a token
    fragments           bytes of the tokens whose text is None
    specials            names of special tokens: never part of a reply's text
    drops_first_space   a text's first space was added by the tokenizer and is removed again
    """

    texts: list[str | None]
    fragments: dict[int, bytes]
    specials: dict[int, str]
    drops_first_space: bool

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token; a special token gives its name, an unknown id nothing."""
        if token in self.specials:
            return self.specials[token].encode()
        if not 0 <= token < len(self.texts):
            return b""
        text = self.texts[token]
        return self.fragments[token] if text is None else text.encode()


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary spells bytes: the letters of the byte alphabet, or SentencePiece's marks."""

    byte_level: bool
    byte_fallback: bool
    drops_first_space: bool


def read_spelling(core: Core) -> Spelling | None:
    """Tell how `core` turns tokens into text, or None if it is a way whose tokens have no bytes of
    their own.
    """
    decoder = core.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return Spelling(byte_level=True, byte_fallback=False, drops_first_space=False)
    if not kinds or not kinds <= _SENTENCEPIECE_STEPS or not all(map(_is_known_step, steps)):
        return None
    drops = "Strip" in kinds or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )
    return Spelling(
        byte_level=False, byte_fallback="ByteFallback" in kinds, drops_first_space=drops
    )


def _is_known_step(step: dict[str, Any]) -> bool:
    """Whether a decoder step does just what SentencePiece needs: mark to space, or one leading
    space removed.
    """
    if step["type"] == "Replace":
        return step["pattern"] == {"String": SPACE_MARK} and step["content"] == " "
    if step["type"] == "Strip":
        return step["content"] == " " and step["start"] == 1 and step["stop"] == 0
    if step["type"] == "Metaspace":
        return step["replacement"] == SPACE_MARK
    return True


def read_pieces(core: Core, spelling: Spelling | None) -> Pieces:
    """Build the table. Without a known spelling the texts are the pieces as written, good for names
    only.
    """
    added = core.get_added_tokens_decoder()
    specials = {token: entry.content for token, entry in added.items() if entry.special}
    vocabulary = core.get_vocab(with_added_tokens=True)
    texts: list[str | None] = [""] * (max(vocabulary.values(), default=-1) + 1)
    fragments: dict[int, bytes] = {}
    letters = byte_alphabet()
    for piece, token in vocabulary.items():
        if token in specials:
            continue
        if token in added or spelling is None:
            texts[token] = piece
            if spelling is not None and not spelling.byte_level:
                texts[token] = piece.replace(SPACE_MARK, " ")
            continue
        raw = _piece_bytes(piece, spelling, letters)
        try:
            texts[token] = raw.decode()
        except UnicodeDecodeError:
            texts[token] = None
            fragments[token] = raw
    return Pieces(texts, fragments, specials, spelling is not None and spelling.drops_first_space)


def _piece_bytes(piece: str, spelling: Spelling, letters: dict[str, int]) -> bytes:
    if spelling.byte_level:
        try:
            return bytes([letters[letter] for letter in piece])
        except KeyError:  # a piece outside the alphabet is its own text, as the library has it
            return piece.encode()
    if spelling.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()
