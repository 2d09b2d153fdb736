"""Chat templates: messages to one prompt text, through Jinja in a sandbox. Compiled once; knows no
token ids.

The surroundings (block trimming, `tojson` without HTML escapes, `raise_exception`, `strftime_now`,
loop controls, the `generation` tag) are those that published templates are written for:
transformers' chat templating.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freetoken.errors import ConfigError, RequestError

MAX_RENDERED_CHARS = 64 << 20
"""A prompt larger than the largest body we take comes from a runaway template; half would refuse
long real chats."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises when it meets messages it was not written for. All mean: these messages do
not fit."""


class _GenerationTag(Extension):
    """`{% generation %}` marks a reply's text for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  # the name and type that Extension declares

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    indent: int | str | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(text: str) -> NoReturn:
    raise TemplateError(text)


def _formatted(now: Callable[[], datetime], form: str) -> str:
    return now().strftime(form)


def _tables(environment: ImmutableSandboxedEnvironment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Filters and global names of an environment; the library leaves their types open."""
    loose = cast("Any", environment)
    return loose.filters, loose.globals


class ChatTemplate:
    """One model's chat templates. Rendering changes nothing in it, so threads may share it."""

    def __init__(
        self,
        sources: str | Mapping[str, str],
        names: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile.

        sources: one template, or several by name (`default`, `tool_use`, ...).
        names: variables every template may use, such as bos_token and eos_token.
        Raises ConfigError for a template that does not compile.
        """
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self._names = dict(names or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        filters, surroundings = _tables(environment)
        filters["tojson"] = _tojson
        surroundings["raise_exception"] = _refuse
        surroundings["strftime_now"] = partial(_formatted, now)
        self._compiled = {
            name: _compile(environment, name, text) for name, text in self.sources.items()
        }
        if not self._compiled:
            raise ConfigError(
                "expected a chat template, got none; give one with --chat-template FILE"
            )

    def source(self, *, has_tools: bool) -> str:
        """Return the text of the template that a chat with or without tools is rendered by."""
        return self.sources[self._name(has_tools=has_tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text for messages in the form of `messages.template_messages`.

        Raises RequestError with the template's own words if it refuses the messages.
        """
        extra = dict(template_kwargs or {})
        if taken := sorted(_RESERVED & extra.keys()):
            raise RequestError(
                f"expected template settings, got {taken[0]!r}, at chat_template_kwargs; use the"
                " request's own field",
                param="chat_template_kwargs",
            )
        arguments = {
            **self._names,
            **extra,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled[self._name(has_tools=bool(tools))]
        try:
            return _bounded(template, arguments)
        except _FAULTS as error:
            words = str(error).encode(errors="replace").decode()  # may quote half an emoji
            raise RequestError(
                f"the model's chat template cannot render these messages: {words}",
                param="messages",
                code="chat_template_error",
            ) from error

    def _name(self, *, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._compiled:
            return "tool_use"
        return "default" if "default" in self._compiled else next(iter(self._compiled))


def _compile(environment: ImmutableSandboxedEnvironment, name: str, text: str) -> Template:
    try:
        with warnings.catch_warnings():
            # odd escapes in a template are its author's
            warnings.simplefilter("ignore", SyntaxWarning)
            return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"expected a Jinja chat template, got: {error.message}, in {name!r} at line"
            f" {error.lineno}; give a working one with --chat-template FILE"
        ) from error


def _bounded(template: Template, arguments: dict[str, Any]) -> str:
    pieces: list[str] = []
    room = MAX_RENDERED_CHARS
    for piece in template.generate(arguments):
        room -= len(piece)
        if room < 0:
            raise TemplateError(f"the prompt grew past {MAX_RENDERED_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)
