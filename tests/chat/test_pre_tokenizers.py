"""Where each family cuts words: a wrong cut changes ids without any error."""

from __future__ import annotations

import pytest

from freetoken.chat.pieces import byte_alphabet
from freetoken.chat.pre_tokenizers import RULES

CASES = {
    "gpt-2": ["It", "'s", " 12345", " Words", "...", "\n\n  ", " x", "\t", "Éte", "  "],
    "smollm": ["It", "'s", " ", *"12345", " Words", "...", "\n\n  ", " x", "\t", "Éte", "  "],
    "llama-bpe": ["It", "'s", " ", "123", "45", " Words", "...\n\n", "  ", " x", "\tÉte", "  "],
    "qwen2": ["It", "'s", " ", *"12345", " Words", "...\n\n", "  ", " x", "\tÉte", "  "],
    "gpt-4o": ["It's", " ", "123", "45", " Words", "...\n\n", "  ", " x", "\tÉte", "  "],
    "tekken": ["It", "'s", " ", *"12345", " Words", "...\n\n", "  ", " x", "\tÉte", "  "],
    "deepseek-v3": ["It", "'s", " ", "123", "45", " Words", "...\n\n", "  ", " x", "\tÉte", "  "],
}
TEXT = "It's 12345 Words...\n\n   x\tÉte  "


def cut(name: str, text: str) -> list[str]:
    """The words of `text` under one rule."""
    alphabet = byte_alphabet()
    pieces = RULES[name].pre_tokenizer().pre_tokenize_str(text)
    return [bytes(alphabet[letter] for letter in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize("name", CASES)
def test_words_are_cut_as_the_family_does(name: str) -> None:
    """Digits in threes or alone, contractions, runs of blanks: what differs between families."""
    assert cut(name, TEXT) == CASES[name]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_keeps_all_letters(name: str) -> None:
    """A gap between two expressions would lose text."""
    for text in (TEXT, "你好，世界 カナ 한글 123", "a\u0301b 👍🏽\r\n \t", "!?x--y <|im_end|>"):
        assert "".join(cut(name, text)) == text
