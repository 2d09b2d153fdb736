"""Tokenizers and templates from Hugging Face folders, complete and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetoken.chat.folder_tokenizer import folder_templates, tokenizer_from_folder
from freetoken.chat.load import text_from_folder
from freetoken.errors import ConfigError
from tests.chat.builders import CHATML, byte_level_core

VOCABULARY = byte_level_core().get_vocab()


def write(folder: Path, **files: Any) -> Path:
    """tokenizer.json plus NAME.json for each keyword."""
    byte_level_core().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_h23_end_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    """H23: one file's end id won, the others were forgotten, and the model played the user too."""
    write(
        tmp_path,
        config={"eos_token_id": 11, "text_config": {"eos_token_id": [12]}},
        generation_config={"eos_token_id": [13, 14]},
        tokenizer_config={
            "eos_token": {"content": "<|endoftext|>"},
            "chat_template": CHATML + "<end_of_turn>",
        },
    )
    assert tokenizer_from_folder(tmp_path).eos_ids == {
        *(11, 12, 13, 14),
        VOCABULARY["<|endoftext|>"],
        VOCABULARY["<|im_end|>"],
    }


def test_h23_turn_end_that_is_no_special_token_does_not_end_replies(tmp_path: Path) -> None:
    """H23: a name in a template proves nothing unless it is one special token here."""
    write(tmp_path, tokenizer_config={"chat_template": "<end_of_turn><|eot_id|><think>"})
    assert tokenizer_from_folder(tmp_path).eos_ids == frozenset()


def test_ids_equal_the_library(tmp_path: Path) -> None:
    """The folder's tokenizer.json is used as it is."""
    tokenizer = tokenizer_from_folder(write(tmp_path))
    for text in ("hello world", "  2 spaces", "Příliš 你好 👍<|im_end|>"):
        assert tokenizer.encode(text, add_special=False) == byte_level_core().encode(text).ids


@pytest.mark.parametrize(("wanted", "prefix"), [(True, True), (False, False), (None, False)])
def test_bos_goes_before_raw_prompts_only_if_the_config_says(
    tmp_path: Path, wanted: bool | None, prefix: bool
) -> None:
    """A missing or doubled BOS shifts every answer of a model trained with it."""
    write(tmp_path, tokenizer_config={"bos_token": "<s>", "add_bos_token": wanted})
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.bos_id == VOCABULARY["<s>"]
    assert (tokenizer.encode("hi", add_special=True)[0] == VOCABULARY["<s>"]) is prefix


def test_vocab_and_merges_without_tokenizer_json(tmp_path: Path) -> None:
    """Older folders have vocab.json and merges.txt only."""
    state = json.loads(byte_level_core().to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in state["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    listed = {str(VOCABULARY["<think>"]): {"content": "<think>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "added_tokens_decoder": listed})
    )
    tokenizer = tokenizer_from_folder(tmp_path)
    for text in ("hello world, it's <think> 12", "你好 👍"):
        assert tokenizer.encode(text, add_special=False) == byte_level_core().encode(text).ids
    assert tokenizer.eos_ids == {VOCABULARY["<|im_end|>"]}


def test_configured_special_flag_is_taken(tmp_path: Path) -> None:
    """tokenizer_config.json may call a token special that tokenizer.json does not."""
    listed = {str(VOCABULARY["<think>"]): {"content": "<think>", "special": True}}
    tokenizer = tokenizer_from_folder(
        write(tmp_path, tokenizer_config={"added_tokens_decoder": listed})
    )
    assert VOCABULARY["<think>"] in tokenizer.special_ids


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["tokenizer.json", "neither"]),
        ({"tokenizer.model": "x"}, ["tokenizer.model", "save_pretrained"]),
        ({"qwen.tiktoken": "x"}, ["qwen.tiktoken", "save_pretrained"]),
        ({"tokenizer.json": "<html>not found</html>"}, ["tokenizer.json", "download"]),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, ["tokenizer_config.json"]),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b"}, ["merges.txt", "'b'"]),
    ],
    ids=["nothing", "sentencepiece", "tiktoken", "html", "config", "merges"],
)
def test_unusable_folder_says_what_to_do(
    tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    """A folder without a usable tokenizer must end in one line naming the file and the remedy."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        tokenizer_from_folder(tmp_path)
    assert all(word in str(error.value) for word in words)


def test_templates_from_every_place(tmp_path: Path) -> None:
    """Template files moved over the years; the newer place wins."""
    write(tmp_path, tokenizer_config={"chat_template": "one"})
    assert folder_templates(tmp_path) == {"default": "one"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert folder_templates(tmp_path) == {"default": "a", "tool_use": "b"}
    write(tmp_path, chat_template={"chat_template": "two"})
    assert folder_templates(tmp_path)["default"] == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("four")
    assert folder_templates(tmp_path) == {"default": "three", "tool_use": "b", "rag": "four"}


def test_h24_missing_template_is_known_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """H24: nobody knew before the first chat broke off; a given template must be taken."""
    write(tmp_path)
    assert text_from_folder(tmp_path).template is None
    assert "--chat-template" in caplog.text
    assert text_from_folder(tmp_path, "{{ messages }}").template is not None
