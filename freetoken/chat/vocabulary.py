"""Puts tokenizers of the `tokenizers` library together from their parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core
from tokenizers.decoders import Decoder
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer


def make_core(
    model: Model,
    *,
    normalizer: Normalizer | None,
    pre_tokenizer: PreTokenizer | None,
    decoder: Decoder | None,
) -> Core:
    """Return a tokenizer of these parts; `model` is shared, not copied."""
    core = Core(model)
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoder
    return core


def add_tokens(core: Core, tokens: Iterable[AddedToken]) -> None:
    """Add tokens that are found in raw text before it is cut into words; special ones as special.

    A token already in the vocabulary keeps its id; a new one gets the next free id.
    """
    loose = cast("Any", core)
    for is_special, group in groupby(tokens, key=lambda token: token.special):
        # In groups: the library builds its search tree anew at each call.
        (loose.add_special_tokens if is_special else loose.add_tokens)(list(group))
