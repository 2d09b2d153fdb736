"""Chat templates: what published ones rely on, and what must never become a 500."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from freetoken.chat import template as template_module
from freetoken.chat.messages import ContentStyle, template_messages
from freetoken.chat.prompt import PromptWriter, content_style
from freetoken.chat.template import ChatTemplate
from freetoken.errors import ConfigError, RequestError
from tests.chat.builders import CHATML, byte_level_tokenizer

USER = [{"role": "user", "content": "hi"}]
PARTS_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def render(source: str, messages: Any = USER, **settings: Any) -> str:
    """Compile and render in one go."""
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **settings)


def test_blocks_are_trimmed_as_templates_expect() -> None:
    """Templates are written over many lines; a stray line break changes the prompt."""
    source = (
        "{% if true %}\n  {%- for m in messages %}\n    {% if m %}\nX{{ m.content }}\n{% endif %}\n"
        "{% endfor %}\n{% endif %}\n"
    )
    assert render(source) == "Xhi\n"


def test_tojson_keeps_letters_and_angle_brackets() -> None:
    """Jinja's own tojson escapes < > & ' and non-ASCII; models were trained without."""
    value = {"a": "<é & '你'>", "b": [1, None]}
    assert render("{{ tools | tojson }}", tools=[value]) == json.dumps([value], ensure_ascii=False)
    assert render("{{ tools | tojson(indent=2) }}", tools=[value]) == json.dumps(
        [value], ensure_ascii=False, indent=2
    )


def test_surroundings_of_published_templates() -> None:
    """Loop controls, namespaces, generation tag, strftime_now, token names, extra settings."""
    source = (
        "{{ bos_token }}{% set ns = namespace(n=0) %}"
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}"
        "{% endfor %}{{ ns.n }}"
        "{% generation %}G{% endgeneration %}{{ strftime_now('%d %b %Y') }}"
        "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 3, 4))
    text = template.render(USER, template_kwargs={"enable_thinking": False})
    assert text == "<s>3G04 Mar 2026!"


def test_tool_use_template_is_chosen_for_tools() -> None:
    """Some checkpoints have a template of their own for chats with tools."""
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"type": "function"}]) == "tools"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + messages[0] }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=["refusal", "undefined", "type", "division", "dunder", "mutation", "recursion"],
)
def test_refusal_and_faults_are_the_clients_error(source: str) -> None:
    """Whatever a template raises over these messages is a 400 with its text, never a 500."""
    with pytest.raises(RequestError) as error:
        render(source)
    assert error.value.param == "messages"
    if "raise_exception" in source:
        assert "roles must alternate" in str(error.value)


def test_runaway_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that writes without end would take all memory."""
    monkeypatch.setattr(template_module, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RequestError, match="1000 characters"):
        render("{% for i in range(90000) %}{{ i }}{% endfor %}")


def test_broken_template_is_found_at_start() -> None:
    """A syntax error must stop the start, not each request."""
    with pytest.raises(ConfigError, match=r"line 2.*--chat-template"):
        ChatTemplate("ok\n{% if %}")


def test_settings_cannot_replace_the_messages() -> None:
    """`chat_template_kwargs` must not smuggle in other messages or tools."""
    with pytest.raises(RequestError) as error:
        render("{{ messages }}", template_kwargs={"messages": []})
    assert error.value.param == "chat_template_kwargs"


def test_templates_take_content_in_the_form_found_by_trial() -> None:
    """A list given to a template that prints it shows Python syntax to the model."""
    assert content_style(ChatTemplate(CHATML)) == "string"
    assert content_style(ChatTemplate(PARTS_TEMPLATE)) == "either"
    only_parts = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    assert content_style(ChatTemplate(only_parts)) == "parts"
    assert content_style(ChatTemplate("{{ messages | tojson }}")) == "string"


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("string", "a\nb"),
        ("either", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    ],
)
def test_parts_are_joined_or_kept(style: ContentStyle, expected: Any) -> None:
    """Agents send content as parts; a template for strings gets one string."""
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert template_messages(messages, style, knows_developer=True)[0]["content"] == expected


@pytest.mark.parametrize("source", [CHATML, PARTS_TEMPLATE])
def test_string_and_one_part_give_equal_prompts(source: str) -> None:
    """The prefix cache misses if the form a client chose changes the prompt."""
    writer = PromptWriter(byte_level_tokenizer(), ChatTemplate(source))
    part = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert writer.render(part) == writer.render(USER)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (7, "messages[0].content"),
        ([{"type": "image_url", "image_url": {}}], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0]"),
        ([{"type": ["x"]}], "messages[0].content[0]"),
        ([3], "messages[0].content[0]"),
    ],
)
def test_content_that_is_no_text_names_its_place(content: Any, param: str) -> None:
    """An image dropped in silence would be answered as if it were not there."""
    with pytest.raises(RequestError) as error:
        template_messages([{"role": "user", "content": content}], "string", knows_developer=True)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_tool_call_arguments_become_objects_when_they_are(arguments: Any, expected: Any) -> None:
    """Templates iterate over arguments; history with invalid JSON must not fail."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    out = template_messages(messages, "string", knows_developer=True)[0]
    assert out["content"] == ""
    assert out["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_empty_tool_calls_and_developer_role() -> None:
    """Templates ask `'tool_calls' in message`; few know the role developer."""
    message = {"role": "developer", "content": "x", "tool_calls": []}
    assert template_messages([message], "string", knows_developer=False) == [
        {"role": "system", "content": "x"}
    ]
    assert template_messages([message], "string", knows_developer=True)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "assistant", "tool_calls": "f()"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "messages[0].tool_calls[0]"),
    ],
)
def test_messages_of_a_wrong_shape_name_their_place(message: Any, param: str) -> None:
    """An embedding program has no HTTP door before this one."""
    with pytest.raises(RequestError) as error:
        template_messages([message], "string", knows_developer=True)
    assert error.value.param == param


def test_refusal_that_quotes_half_an_emoji_can_be_sent() -> None:
    """An error text with a lone surrogate cannot be written as JSON."""
    with pytest.raises(RequestError) as error:
        render(
            "{{ raise_exception(messages[0].content) }}", [{"role": "user", "content": "\ud83d"}]
        )
    assert str(error.value).encode()
