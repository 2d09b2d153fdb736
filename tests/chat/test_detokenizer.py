"""Incremental text: nothing lost, nothing shown too early, whatever the cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from freetoken.chat.gguf_tokenizer import tokenizer_from_gguf
from freetoken.chat.tokenizer import Marks, Tokenizer
from tests.chat.builders import byte_level_tokenizer, sentencepiece_metadata

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "spm"])
HARD = [
    "🇩🇪🇫🇷",
    "👨‍👩‍👧‍👦!",
    "你好，世界",
    "Příliš žluťoučký kůň",
    " e\u0301 \u00a0x",
    "\u0000\ufeff\ufffd",
]


def joined(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    """The sum of the deltas when ids come in chunks that end at `cuts`."""
    detokenizer = tokenizer.detokenizer()
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return "".join(parts) + detokenizer.flush()


@BOTH
@pytest.mark.parametrize("text", HARD)
def test_h22_joined_deltas_equal_decode_for_characters_across_tokens(
    tokenizer: Tokenizer, text: str
) -> None:
    """H22: emoji, CJK and Czech letters became U+FFFD when each token was decoded alone."""
    ids = tokenizer.encode(text, add_special=False)
    assert joined(tokenizer, ids, list(range(len(ids)))) == tokenizer.decode(ids) == text


@BOTH
def test_h22_text_shows_no_replacement_before_the_character_is_complete(
    tokenizer: Tokenizer,
) -> None:
    """H22: half a character was sent as U+FFFD and could not be taken back."""
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("👨‍👩‍👧‍👦🇩🇪你好", add_special=False)
    assert "\ufffd" not in "".join(detokenizer.push([token]) for token in ids)
    assert detokenizer.flush() == ""


@BOTH
def test_h22_lone_bytes_at_the_end_flush_once(tokenizer: Tokenizer) -> None:
    """H22: a reply cut inside an emoji lost its tail or repeated U+FFFD for each byte."""
    raw = b"ab" + "👍".encode()[:3]
    by_bytes = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [by_bytes[bytes([byte])] for byte in raw]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push([token]) for token in ids) == "ab"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_r15_token_with_leading_space_after_pending_bytes_replaces_only_the_broken_ones() -> None:
    """R15: the decoder flushed at a space although bytes were pending."""
    space = BYTE_LEVEL.encode(" the", add_special=False)
    pending = [t for t in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(t) == b"\xf0"]
    whole = BYTE_LEVEL.encode("👍", add_special=False)
    ids = [pending[0], *space, *whole]
    detokenizer = BYTE_LEVEL.detokenizer()
    parts = [detokenizer.push([token]) for token in ids]
    assert parts[0] == ""
    assert "".join(parts) + detokenizer.flush() == "\ufffd the👍"


def test_special_token_between_bytes_of_a_character_changes_nothing() -> None:
    """A skipped token in the middle of a character must not flush it."""
    ids = BYTE_LEVEL.encode("漢", add_special=False)
    special = next(iter(BYTE_LEVEL.special_ids))
    mixed = [ids[0], special, *ids[1:]]
    assert joined(BYTE_LEVEL, mixed, list(range(len(mixed)))) == BYTE_LEVEL.decode(mixed) == "漢"


@BOTH
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_ids_and_cuts_join_to_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any ids, valid UTF-8 or not, unknown ids too, at any cut: the sum is the decoding of all."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=6))
    assert joined(tokenizer, ids, cuts) == tokenizer.decode(ids)


@BOTH
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=40),
    cuts=st.lists(st.integers(0, 90), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_random_text_comes_back_at_any_cut(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    """Text of any script survives encoding and incremental decoding."""
    ids = tokenizer.encode(text, add_special=False)
    if not any(i in tokenizer.special_ids for i in ids):
        # A SentencePiece vocabulary cannot tell a typed space mark from a space.
        plain = text.replace("\u2581", " ") if tokenizer is SENTENCEPIECE else text
        assert joined(tokenizer, ids, cuts) == plain


@given(raw=st.binary(max_size=24))
@settings(max_examples=200, deadline=None)
def test_byte_level_decode_equals_the_library(raw: bytes) -> None:
    """Our table and the library must agree on every byte string, broken ones too."""
    by_bytes = {BYTE_LEVEL.token_bytes(i): i for i in reversed(range(BYTE_LEVEL.vocab_size))}
    ids = [by_bytes[bytes([byte])] for byte in raw]
    assert BYTE_LEVEL.decode(ids) == BYTE_LEVEL._core.decode(ids)


def test_reply_inside_a_text_keeps_its_space() -> None:
    """SentencePiece: words of prompt and reply ran together without the reply's first space."""
    prompt = SENTENCEPIECE.encode("hello", add_special=True)
    reply = SENTENCEPIECE.encode("world", add_special=False)
    assert SENTENCEPIECE.detokenizer(prompt).push(reply) == " world"
    assert SENTENCEPIECE.detokenizer([*prompt, 2]).push(reply) == "world"
    assert SENTENCEPIECE.detokenizer().push(reply) == "world"


def test_unknown_decoder_uses_windows_and_joins_to_decode() -> None:
    """WordPiece joins pieces by their neighbours; per-token text would lose the spaces."""
    words = ["[UNK]", "play", "##ing", "the", "game", "##s", "un", "##do", "!"]
    core = Core(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(core, Marks(None, frozenset(), (), {}))
    chosen = random.Random(5)
    for _ in range(50):
        ids = [chosen.randrange(1, len(words)) for _ in range(chosen.randrange(1, 12))]
        cuts = [chosen.randrange(20) for _ in range(4)]
        assert joined(tokenizer, ids, cuts) == core.decode(ids)
