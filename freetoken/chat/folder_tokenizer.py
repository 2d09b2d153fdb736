"""A tokenizer from a Hugging Face folder: tokenizer.json and the small JSON files beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from freetoken.chat.end_tokens import config_ids, turn_end_ids
from freetoken.chat.pre_tokenizers import RULES
from freetoken.chat.tokenizer import Marks, Tokenizer
from freetoken.chat.vocabulary import add_tokens, make_core
from freetoken.errors import ConfigError

_logger = logging.getLogger(__name__)

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_CLASS_RULES = {"Qwen2Tokenizer": "qwen2", "Qwen2TokenizerFast": "qwen2"}
"""Which words a vocab.json was trained on, by tokenizer_class; every other class means GPT-2's."""


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder.

    Raises ConfigError if there is none, or one that cannot be used, saying what to do.
    """
    config = read_json(folder / "tokenizer_config.json")
    core = _core(folder, config)
    _add_configured_tokens(core, config)
    names = _names(folder, config)
    known = {entry.content for entry in core.get_added_tokens_decoder().values() if entry.special}
    roles = [name for name in names.values() if core.token_to_id(name) is not None]
    add_tokens(
        core, [AddedToken(t, special=True, normalized=False) for t in roles if t not in known]
    )
    special = {
        entry.content: token
        for token, entry in core.get_added_tokens_decoder().items()
        if entry.special
    }
    ends = config_ids(read_json(folder / "config.json"))
    ends |= config_ids(read_json(folder / "generation_config.json"))
    if (eos := special.get(names.get("eos_token", ""))) is not None:
        ends.add(eos)
    ends |= turn_end_ids(folder_templates(folder).values(), special.get)
    bos = special.get(names.get("bos_token", ""))
    return Tokenizer(core, Marks(bos, frozenset(ends), _prefix(core, config, bos), names))


def folder_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by name; the main one is `default`.

    Later places win, as in transformers: tokenizer_config.json, chat_template.json,
    chat_template.jinja, additional_chat_templates/NAME.jinja.
    """
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "chat_template.json"):
        value: object = read_json(folder / file).get("chat_template")
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            for entry in cast("list[dict[str, str]]", value):
                found[entry["name"]] = entry["template"]
    files = {"default": folder / "chat_template.jinja"}
    more = folder / "additional_chat_templates"
    if more.is_dir():
        files |= {file.stem: file for file in sorted(more.glob("*.jinja"))}
    found.update({name: file.read_text("utf-8") for name, file in files.items() if file.is_file()})
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, {} if the file is absent. Raises ConfigError naming a damaged file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"expected JSON in {file}, got: {error}; download the file again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object in {file}, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _core(folder: Path, config: Mapping[str, Any]) -> Core:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Core.from_file(str(file))
        except Exception as error:  # the library raises the bare class
            raise ConfigError(
                f"expected a tokenizer in {file}, got: {error}; download the file again, or update"
                " the `tokenizers` package if the model is newer than it"
            ) from error
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if vocabulary.is_file() and merges.is_file():
        return _byte_level(vocabulary, merges, config)
    for other in sorted(folder.glob("*.model")) + sorted(folder.glob("*.tiktoken")):
        raise ConfigError(
            f"expected tokenizer.json in {folder}, got only {other.name}; convert it once with"
            f" transformers: AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})"
        )
    raise ConfigError(
        f"expected tokenizer.json, or vocab.json and merges.txt, in {folder}, got neither; download"
        " the model's tokenizer files"
    )


def _byte_level(vocabulary: Path, merges: Path, config: Mapping[str, Any]) -> Core:
    pieces = cast("dict[str, int]", read_json(vocabulary))
    lines = merges.read_text("utf-8").split("\n")
    pairs = [
        (left, right)
        for line in lines
        if not line.startswith("#version") and (parts := line.rstrip("\r").partition(" "))[1]
        for left, _, right in (parts,)
    ]
    for left, right in pairs:
        if not {left, right, left + right} <= pieces.keys():
            raise ConfigError(
                f"expected pieces of {vocabulary} in {merges}, got {left!r} {right!r}"
            )
    rule = RULES[_CLASS_RULES.get(config.get("tokenizer_class", ""), "gpt-2")]
    return make_core(
        BPE(pieces, pairs, ignore_merges=rule.whole_words),
        normalizer=rule.normalizer(),
        pre_tokenizer=rule.pre_tokenizer(),
        decoder=decoders.ByteLevel(),
    )


def _add_configured_tokens(core: Core, config: Mapping[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json lists, and take its word on which are special."""
    known = core.get_added_tokens_decoder()
    listed: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    for number, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = int(number)
        if token in known and known[token].special == entry.get("special", False):
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        added = AddedToken(
            entry["content"], **{flag: bool(entry.get(flag, False)) for flag in flags}
        )
        add_tokens(core, [added])
        got = core.token_to_id(entry["content"])
        if got != token:
            _logger.warning(
                "expected token %r at id %s (tokenizer_config.json), got %s (tokenizer.json); the"
                " latter is used",
                entry["content"],
                token,
                got,
            )


def _names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return role -> token text; special_tokens_map.json, the older place, fills gaps."""
    older = read_json(folder / "special_tokens_map.json")
    names: dict[str, str] = {}
    for role in _ROLES:
        value: object = config.get(role) or older.get(role)
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get("content")
        if isinstance(value, str) and value:
            names[role] = value
    return names


def _prefix(core: Core, config: Mapping[str, Any], bos: int | None) -> tuple[int, ...]:
    """Return what goes before a raw prompt: what tokenizer.json adds there, or BOS if the config
    asks for it.
    """
    plain = core.encode("a", add_special_tokens=False).ids
    full = core.encode("a", add_special_tokens=True).ids
    starts = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
    prefix = tuple(full[: starts[0]]) if starts and plain else ()
    wants_bos: object = config.get("add_bos_token")
    if wants_bos is True and bos is not None and bos not in prefix:
        return (bos, *prefix)
    if wants_bos is False:
        return tuple(token for token in prefix if token != bos)
    return prefix
