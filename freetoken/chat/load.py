"""Tokenizer and chat template of a checkpoint in one call; what is missing is known at start, not
at a request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from freetoken.chat.folder_tokenizer import folder_templates, tokenizer_from_folder
from freetoken.chat.gguf_tokenizer import gguf_templates, tokenizer_from_gguf
from freetoken.chat.template import ChatTemplate
from freetoken.chat.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


class TextParts(NamedTuple):
    """What turns a token engine into a text model. template: None if the checkpoint has none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def text_from_folder(folder: Path, chat_template: str | None = None) -> TextParts:
    """Read a Hugging Face folder. chat_template: text that replaces the checkpoint's own. Raises
    ConfigError.
    """
    tokenizer = tokenizer_from_folder(folder)
    own = {} if chat_template is not None else folder_templates(folder)
    return TextParts(tokenizer, _template(tokenizer, own, chat_template))


def text_from_gguf(metadata: Mapping[str, Any], chat_template: str | None = None) -> TextParts:
    """Read a GGUF header. chat_template: text that replaces the file's own. Raises ConfigError."""
    tokenizer = tokenizer_from_gguf(metadata)
    return TextParts(tokenizer, _template(tokenizer, gguf_templates(metadata), chat_template))


def _template(
    tokenizer: Tokenizer, own: Mapping[str, str], chat_template: str | None
) -> ChatTemplate | None:
    sources = own if chat_template is None else {"default": chat_template}
    if not sources:
        _logger.warning(
            "expected a chat template in the checkpoint, got none: chat requests will be refused,"
            " completions work; give one with --chat-template FILE"
        )
        return None
    return ChatTemplate(sources, tokenizer.marks.names)
