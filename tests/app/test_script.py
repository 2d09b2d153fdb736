"""Fake scripts: everything wrong in one is named before serving."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.cli import main as cli
from freetoken.errors import ConfigError
from freetoken.script import encode_replies, read_script
from tests.app.scripted import script, tokenizer_folder
from tests.server.serving import byte_tokenizer

GOOD = {"text": "x"}


@pytest.fixture
def _logging_left_alone() -> Iterator[None]:
    """A command sets the process's logging; later tests look at records."""
    root, ours = logging.getLogger(), logging.getLogger("freetoken")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


WRONG = {
    "no-replies-key": ({}, r"missing required field `replies`"),
    "no-replies": ({"replies": []}, r"length >= 1.*\$\.replies"),
    "replies-not-a-list": ({"replies": "x"}, r"Expected `array`, got `str` - at `\$\.replies`"),
    "text-and-ids": (
        {"replies": [GOOD, {"text": "x", "ids": [1]}]},
        r"\$\.replies\[1\]`, got both",
    ),
    "neither-text-nor-ids": (
        {"replies": [{}]},
        r"either text or ids at `\$\.replies\[0\]`, got none",
    ),
    "text-not-text": ({"replies": [{"text": 3}]}, r"\$\.replies\[0\]\.text"),
    "negative-id": ({"replies": [{"ids": [-1]}]}, r">= 0.*\$\.replies\[0\]\.ids"),
    "no-tokens-a-step": ({"replies": [GOOD | {"tokens_per_step": 0}]}, r">= 1.*tokens_per_step"),
    "negative-delay": ({"replies": [GOOD | {"delay_ms": -1}]}, r">= 0.*delay_ms"),
    "unknown-finish": ({"replies": [GOOD | {"finish": "abort"}]}, r"'abort'.*finish"),
    "unknown-reply-field": ({"replies": [GOOD | {"delay": 1}]}, r"unknown field `delay`"),
    "unknown-field": ({"replies": [GOOD], "contxt": 9}, r"unknown field `contxt`"),
    "context-too-small": ({"replies": [GOOD], "context": 1}, r">= 2.*\$\.context"),
    "tokenizer-not-text": ({"replies": [GOOD], "tokenizer": 1}, r"\$\.tokenizer"),
    "tool-parser": ({"replies": [GOOD], "tool_call_parser": "x"}, r"tool_call_parser` is not"),
    "reasoning-parser": ({"replies": [GOOD], "reasoning_parser": "x"}, r"reasoning_parser` is not"),
}


@pytest.mark.parametrize(("document", "text"), WRONG.values(), ids=WRONG)
def test_wrong_script_names_file_and_field(
    document: dict[str, object], text: str, tmp_path: Path
) -> None:
    """A script with a slip in it that serves something else, or a traceback."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=text) as error:
        read_script(path)
    assert str(path) in str(error.value)
    assert str(error.value).startswith("--fake: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"<html>", "malformed"),
    ],
    ids=["missing", "cut", "binary", "empty", "list", "html"],
)
def test_file_that_is_no_script_is_told(content: bytes | None, text: str, tmp_path: Path) -> None:
    """A traceback of the JSON library."""
    path = tmp_path / "script.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=text) as error:
        read_script(path)
    assert str(path) in str(error.value)


def test_folder_instead_of_a_script_is_told(tmp_path: Path) -> None:
    """A traceback for the commonest slip."""
    with pytest.raises(ConfigError, match="Is a directory"):
        read_script(tmp_path)


def test_id_outside_the_vocabulary_is_told(tmp_path: Path) -> None:
    """An id that fails in the middle of a stream, in the detokenizer."""
    read = read_script(script(tmp_path, GOOD, {"ids": [3, 999]}))
    with pytest.raises(ConfigError, match=r"below 258, got 999, at `\$\.replies\[1\]\.ids`"):
        encode_replies(read, byte_tokenizer())


def test_replies_become_tokens_with_their_timing(tmp_path: Path) -> None:
    """A field that is read and forgotten; a control token typed in a script that stays text."""
    timed = {"ids": [1, 2], "tokens_per_step": 3, "delay_ms": 250, "finish": "length"}
    read = read_script(script(tmp_path, {"text": "hi<|end|>"}, timed, context=64))
    first, second = encode_replies(read, byte_tokenizer())
    assert first.ids == (*b"hi", 257)
    assert (second.ids, second.tokens_per_step) == ((1, 2), 3)
    assert (second.delay_s, second.finish) == (0.25, "length")
    assert read.context == 64


@pytest.mark.usefixtures("_logging_left_alone")
@pytest.mark.parametrize("tokenizer", ["nowhere", "empty", "script.json", "no.gguf"])
def test_wrong_tokenizer_is_one_line_and_exit_code_2(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that ends in a traceback after the port was bound."""
    path = script(tmp_path, GOOD, tokenizer=tokenizer)
    (tmp_path / "empty").mkdir()
    assert cli.main(["serve", "--fake", str(path), "--port", "0", "--log-level", "error"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ft: error: ")
    assert error.count("\n") == 1
    assert str(tmp_path) in error


def test_tokenizer_path_starts_at_the_scripts_folder(tmp_path: Path) -> None:
    """A script that works from one working directory only."""
    assert tokenizer_folder(tmp_path / "tokenizer").is_dir()
    read = read_script(script(tmp_path, GOOD))
    assert read.tokenizer == "tokenizer"
