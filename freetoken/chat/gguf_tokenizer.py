"""A tokenizer from the header of a GGUF file. Knows the keys under `tokenizer.`; the container is
read elsewhere.

Two kinds: byte-level BPE (`gpt2`: pieces and merges are given) and SentencePiece BPE (`llama`:
pieces with scores; the merges follow from them).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from freetoken.chat import pre_tokenizers
from freetoken.chat.end_tokens import gguf_ids, turn_end_ids
from freetoken.chat.pieces import SPACE_MARK
from freetoken.chat.tokenizer import Marks, Tokenizer
from freetoken.chat.vocabulary import add_tokens, make_core
from freetoken.errors import ConfigError

_logger = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type; 1 normal, 5 unused, 6 byte
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

Merge = tuple[str, str]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer a GGUF header describes.

    metadata: all keys of the header as plain values. Raises ConfigError that names the key.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        core, adds_bos = _byte_level(metadata)
    elif kind == "llama":
        core, adds_bos = _sentencepiece(metadata)
    else:
        raise ConfigError(
            f"expected tokenizer.ggml.model 'gpt2' or 'llama', got {kind!r}; use the model's"
            " Hugging Face folder, which has a tokenizer.json"
        )
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, len(tokens))
    add_tokens(core, _listed_tokens(tokens, types))
    return Tokenizer(core, _marks(metadata, tokens, types, adds_bos))


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a GGUF header by name; the unnamed one is `default`."""
    prefix = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if isinstance(value, str) and key == prefix:
            found["default"] = value
        elif isinstance(value, str) and key.startswith(prefix + "."):
            found[key.removeprefix(prefix + ".")] = value
    return found


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Core, bool]:
    pre = metadata.get("tokenizer.ggml.pre", pre_tokenizers.DEFAULT)
    rule = pre_tokenizers.RULES.get(pre)
    if rule is None:
        _logger.warning(
            "expected a known tokenizer.ggml.pre, got %r; words are cut by the default rule, so"
            " texts may tokenize a little differently",
            pre,
        )
        rule = pre_tokenizers.RULES[pre_tokenizers.DEFAULT]
    tokens = _strings(metadata, "tokens")
    model = _bpe(tokens, _given_merges(metadata, tokens), ignore_merges=rule.whole_words)
    core = make_core(
        model,
        normalizer=rule.normalizer(),
        pre_tokenizer=rule.pre_tokenizer(),
        decoder=decoders.ByteLevel(),
    )
    return core, rule.adds_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Core, bool]:
    tokens = _strings(metadata, "tokens")
    scores = _list(metadata, "scores")
    if len(scores) != len(tokens):
        raise ConfigError(
            f"expected {len(tokens)} tokenizer.ggml.scores, one a token, got {len(scores)}; the"
            " file is damaged"
        )
    types = _types(metadata, len(tokens))
    merges = merges_from_scores(tokens, cast("list[float]", scores), types)
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    model = _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE_MARK)
    steps: list[Any] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    decoder = decoders.Sequence(steps)
    core = make_core(model, normalizer=spaces, pre_tokenizer=None, decoder=decoder)
    return core, True


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[Merge]:
    """Return the merges of a SentencePiece BPE vocabulary, best first.

    Its rule: join the neighbours whose joint piece has the highest score, the leftmost of equals. A
    piece may be reached from several pairs; all are listed, in the order of their own pieces' ids.
    Control tokens are no pieces.
    """
    pieces = {token: i for i, token in enumerate(tokens) if types[i] not in (_UNKNOWN, _CONTROL)}
    ranked: list[tuple[float, int, int, Merge]] = []
    for piece, number in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[number], pieces[left], pieces[right], (left, right)))
    ranked.sort()
    return [merge for *_, merge in ranked]


def _bpe(tokens: Sequence[str], merges: list[Merge], **settings: bool | str | None) -> BPE:
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    if len(vocabulary) != len(tokens):
        _logger.warning(
            "expected different tokenizer.ggml.tokens, got %s doubles; the first of each is used",
            len(tokens) - len(vocabulary),
        )
    return BPE(vocabulary, merges, **cast("dict[str, Any]", settings))


def _given_merges(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[Merge]:
    known = set(tokens)
    merges: list[Merge] = []
    for line in _strings(metadata, "merges"):
        left, _, right = line.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise ConfigError(
                f"expected tokenizer.ggml.merges of known tokens, got {line!r}; the file is damaged"
            )
        merges.append((left, right))
    return merges


def _listed_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Return what is found in raw text: control tokens and those a user defined."""
    control = (_UNKNOWN, _CONTROL)
    return [
        AddedToken(token, special=kind in control, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (*control, _USER_DEFINED)
    ]


def _marks(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], adds_bos: bool
) -> Marks:
    ids: dict[str, int] = {}
    for role in _ROLES:
        value = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise ConfigError(
                f"expected tokenizer.ggml.{role}_token_id below {len(tokens)}, got {value!r}; the"
                " file is damaged"
            )
        if value is not None:
            ids[role] = value
    special = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
    bos = ids.get("bos")
    adds = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    return Marks(
        bos_id=bos,
        eos_ids=frozenset(
            gguf_ids(metadata) | turn_end_ids(gguf_templates(metadata).values(), special.get)
        ),
        prefix_ids=(bos,) if adds and bos is not None else (),
        names={name: tokens[ids[role]] for role, name in _ROLES.items() if role in ids},
    )


def _types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    types: object = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [1] * num_tokens
    if not isinstance(types, list) or len(cast("list[int]", types)) != num_tokens:
        raise ConfigError(
            f"expected {num_tokens} values in tokenizer.ggml.token_type; the file is damaged"
        )
    return cast("list[int]", types)


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value: object = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        shown = "none" if value is None else type(cast("object", value)).__name__
        raise ConfigError(
            f"expected a filled list in tokenizer.ggml.{key}, got {shown}; the file has no"
            " usable tokenizer, convert the model again or use its Hugging Face folder"
        )
    return cast("list[Any]", value)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    return cast("list[str]", _list(metadata, key))
