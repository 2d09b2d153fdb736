"""Ids, bytes and texts of byte-level and SentencePiece vocabularies."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.chat.gguf_tokenizer import tokenizer_from_gguf
from freetoken.chat.pieces import byte_alphabet
from freetoken.chat.tokenizer import Tokenizer, printable
from freetoken.errors import ConfigError
from tests.chat.builders import (
    CONTROL,
    byte_level_core,
    byte_level_tokenizer,
    marks,
    sentencepiece_metadata,
)


def slow_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece BPE by its definition: join the best-scored neighbours, leftmost first."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    pieces = {t: metadata["tokenizer.ggml.scores"][i] for t, i in ids.items() if i >= 259}
    prefix = "▁" if text and metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
    symbols = list(prefix + text.replace(" ", "▁"))
    while True:
        pairs = [(i, a + b) for i, (a, b) in enumerate(pairwise(symbols))]
        known = [(-pieces[joint], i, joint) for i, joint in pairs if joint in pieces]
        if not known:
            break
        _, i, joint = min(known)
        symbols[i : i + 2] = [joint]
    out: list[int] = []
    for symbol in symbols:
        octets = [symbol] if symbol in pieces else [f"<0x{b:02X}>" for b in symbol.encode()]
        out += [ids[piece] for piece in octets]
    return out


@pytest.mark.parametrize("has_prefix", [True, False])
@given(text=st.text("heloworldaniu ,.é!1你👍", max_size=24))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_ids_equal_the_definition(text: str, has_prefix: bool) -> None:
    """Merges derived from scores in a wrong order give other ids than the model was trained on."""
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": has_prefix})
    tokenizer = _cached(has_prefix)
    assert tokenizer.encode(text, add_special=False) == slow_sentencepiece(text, metadata)


@cache
def _cached(has_prefix: bool) -> Tokenizer:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": has_prefix})
    return tokenizer_from_gguf(metadata)


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """The tiny byte-level vocabulary as a GGUF header."""
    state = json.loads(byte_level_core().to_str())
    vocabulary = byte_level_core().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [3 if token in CONTROL else 4 if token == "<think>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocabulary["<|endoftext|>"],
    } | changes


@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
@settings(max_examples=100, deadline=None)
def test_gguf_byte_level_ids_equal_the_library(text: str) -> None:
    """A GGUF header must give the ids of the tokenizer.json it was made from."""
    ours = _gguf_byte_level()
    assert ours.encode(text, add_special=False) == byte_level_core().encode(text).ids


@cache
def _gguf_byte_level() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata())


def test_h23_gguf_end_ids_are_the_union_of_eos_eot_eom_and_template() -> None:
    """H23: only eos was taken and the model ran past its turn."""
    vocabulary = byte_level_core().get_vocab()
    extra = {
        "tokenizer.ggml.eot_token_id": vocabulary["<|im_start|>"],
        "tokenizer.ggml.eom_token_id": vocabulary["<s>"],
        "tokenizer.chat_template": "{{ '<|im_end|>' }}<end_of_turn>",
    }
    assert tokenizer_from_gguf(byte_level_metadata(**extra)).eos_ids == {
        vocabulary[name] for name in ("<|endoftext|>", "<|im_start|>", "<s>", "<|im_end|>")
    }


def test_token_bytes_are_exact_for_every_token() -> None:
    """Log-probabilities report bytes; a guess through text loses those of half characters."""
    tokenizer = byte_level_tokenizer()
    alphabet = byte_alphabet()
    vocabulary = byte_level_core().get_vocab()
    for piece, token in vocabulary.items():
        if piece not in (*CONTROL, "<think>"):
            assert tokenizer.token_bytes(token) == bytes(alphabet[letter] for letter in piece)
    assert tokenizer.token_bytes(vocabulary["<|im_end|>"]) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_token_bytes_of_byte_fallback_and_space_mark() -> None:
    """`<0xE4>` is one byte, not six letters; the space mark is a space."""
    tokenizer = _cached(True)
    assert tokenizer.token_bytes(tokenizer.id_of("<0xE4>") or -1) == b"\xe4"
    assert tokenizer.token_text(tokenizer.id_of("<0xE4>") or -1) == "\ufffd"
    assert tokenizer.token_text(tokenizer.id_of("▁hello") or -1) == " hello"


def test_decode_shows_special_tokens_only_when_asked() -> None:
    """Control tokens in a reply's text confuse clients; ordinary added tokens belong to it."""
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("<think>hi<|im_end|>", add_special=False)
    assert tokenizer.decode(ids) == "<think>hi"
    assert tokenizer.decode(ids, skip_special=False) == "<think>hi<|im_end|>"


def test_prefix_is_added_once() -> None:
    """A raw prompt that already begins with BOS must not get a second one, and none at its end."""
    core = byte_level_core()
    bos = core.token_to_id("<s>")
    tokenizer = Tokenizer(core, marks(core, prefix=(bos,)))
    plain = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello", add_special=True) == [bos, *plain]
    assert tokenizer.encode("<s>hello", add_special=True) == [bos, *plain]


def test_lone_surrogates_become_replacement_characters() -> None:
    """A client's string cut inside an emoji made the library raise TypeError: a 500."""
    assert printable("a\ud83d\udc4db\ud83dc") == "a👍b\ufffdc"
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(tokenizer.encode("x\ud800", add_special=False)) == "x\ufffd"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, ["tokenizer.ggml.model", "'bert'", "Hugging Face"]),
        ({"tokenizer.ggml.tokens": None}, ["tokenizer.ggml.tokens", "none"]),
        ({"tokenizer.ggml.scores": [1.0]}, ["tokenizer.ggml.scores", "got 1"]),
        ({"tokenizer.ggml.eos_token_id": 10**6}, ["tokenizer.ggml.eos_token_id", "1000000"]),
        ({"tokenizer.ggml.token_type": [1]}, ["tokenizer.ggml.token_type"]),
    ],
    ids=["model", "tokens", "scores", "eos", "types"],
)
def test_broken_gguf_header_names_the_key(changes: dict[str, Any], words: list[str]) -> None:
    """A damaged header must end in one line that names the key, not in a traceback."""
    with pytest.raises(ConfigError) as error:
        tokenizer_from_gguf(sentencepiece_metadata(**changes))
    assert all(word in str(error.value) for word in words)


def test_merge_of_unknown_pieces_names_the_merge() -> None:
    """The library's own message for it has no file and no key."""
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges.*'zz qq'"):
        tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.merges": ["zz qq"]}))


def test_unknown_pre_tokenizer_warns_and_works(caplog: pytest.LogCaptureFixture) -> None:
    """A new family's file should run, but not silently with a guess."""
    tokenizer = tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.pre": "brand-new"}))
    assert "brand-new" in caplog.text
    assert tokenizer.decode(tokenizer.encode("it's 12345!", add_special=False)) == "it's 12345!"
