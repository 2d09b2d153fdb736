"""Chat messages to prompt ids: normalise, render, tokenise, with what users typed kept apart from
control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.chat.messages import ContentStyle, template_messages
from freetoken.chat.template import ChatTemplate
from freetoken.chat.tokenizer import Tokenizer, printable
from freetoken.errors import RequestError

_PROBE = "a7Xq"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as the model reads it."""

    text: str
    ids: list[int]


class PromptWriter:
    """Renders chats with one template and vocabulary. Stateless between calls, so threads may share
    it.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._style: ContentStyle = content_style(template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return prompt text and ids. Raises RequestError if messages are malformed or the template
        refuses them.
        """
        source = self._template.source(has_tools=bool(tools))
        ready = template_messages(messages, self._style, knows_developer="developer" in source)
        marked = self._tokenizer.control.mark(
            {"messages": ready, "tools": tools, "template_kwargs": template_kwargs}, source
        )
        text = self._template.render(add_generation_prompt=add_generation_prompt, **marked.value)
        text, positions = marked.unmark(printable(text))
        return Rendered(text, self._tokenizer.encode_guarded(text, positions))


def content_style(template: ChatTemplate) -> ContentStyle:
    """Find out by trial what a template does with content given as a string and as a list of
    parts.
    """
    takes_string = _shows(template, _PROBE)
    takes_parts = _shows(template, [{"type": "text", "text": _PROBE}])
    if takes_parts:
        return "either" if takes_string else "parts"
    return "string"


def _shows(template: ChatTemplate, content: object) -> bool:
    try:
        text = template.render([{"role": "user", "content": content}])
    except RequestError:
        return False
    # A template that prints the list as it stands shows its keys around the text.
    return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text
