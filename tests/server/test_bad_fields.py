"""Every wrong field is answered 400 with its name, in both modes, before the engine hears of it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.server.serving import chat, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAN, INF = float("nan"), float("inf")


def user(content: Any) -> dict[str, Any]:
    """Messages whose third has this content."""
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return {"messages": [*first, {"role": "user", "content": content}]}


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -3}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 7}, "top_p"),
    ({"top_p": -INF}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": 3}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -853}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"model": 5}, "model"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (user(5), "messages[2].content"),
    (user([5]), "messages[2].content[0]"),
    (user([{"type": "text"}]), "messages[2].content[0].text"),
    (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[2].content[1]"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]

COMPLETIONS_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, 2, 258]}, "prompt[2]"),
    ({"prompt": [1, -2]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [True]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 64}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
]

CASES = [
    *((CHAT, fields, param) for fields, param in SAMPLING + CHAT_ONLY),
    *((COMPLETIONS, fields, param) for fields, param in SAMPLING + COMPLETIONS_ONLY),
]


def named(case: tuple[str, dict[str, Any], str]) -> str:
    """A readable test id."""
    path, fields, param = case
    return f"{path.split('/')[2]}-{param}-{json.dumps(fields)[:40]}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_bad_field_is_refused_by_name_in_both_modes(case: tuple[str, dict[str, Any], str]) -> None:
    """H03: nonsense values reach the sampler and kill or skew generation."""
    path, fields, param = case
    base = chat() if path == CHAT else {"prompt": "Hi"}

    async def main() -> None:
        async with serving() as site:
            for stream in (False, True):
                started = time.perf_counter()
                status, body = await site.post(path, base | {"stream": stream} | fields)
                assert status == 400, body
                error = body["error"]
                assert error["param"] == param, error
                assert error["type"] == "invalid_request_error"
                assert param.split("[")[0] in error["message"]
                assert time.perf_counter() - started < 1
            assert site.engine.prompts == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": -1},
        {"stop": []},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"response_format": {"type": "text"}},
        {"temperature": None, "top_p": None, "stop": None, "n": None, "seed": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {
            "user": 5,
            "store": True,
            "metadata": {"a": "b"},
            "client_metadata": 1,
            "verbosity": "low",
        },
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
    ids=json.dumps,
)
def test_edge_values_and_unknown_fields_are_accepted(fields: dict[str, Any]) -> None:
    """Catches a door that is too narrow: real clients send all of these."""

    async def main() -> None:
        async with serving() as site:
            status, body = await site.post(CHAT, chat(**fields))
            assert status == 200, body

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"messages": [' + b"[" * 20000],
    ids=["empty", "cut", "list", "text", "binary", "deep"],
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """Catches a 500 or a crash from bytes that are no request."""

    async def main() -> None:
        async with serving() as site:
            for path in (CHAT, COMPLETIONS):
                status, reply = await site.post(path, body)
                assert status == 400, reply
                assert reply["error"]["type"] == "invalid_request_error"

    asyncio.run(main())


def test_half_surrogate_pair_is_replaced() -> None:
    """Catches a dead-end chat after a client cut a message in the middle of an emoji."""
    body = rb'{"messages": [{"role": "user", "content": "a \ud83d b \ud83d\ude00 c \\ud83d"}]}'

    async def main() -> None:
        async with serving() as site:
            status, reply = await site.post(CHAT, body)
            assert status == 200, reply
            text = bytes(t for t in site.engine.prompts[0] if t < 256).decode()
        assert "a \N{REPLACEMENT CHARACTER} b \N{GRINNING FACE} c \\ud83d" in text

    asyncio.run(main())


def test_message_says_expected_got_and_where() -> None:
    """Catches an error text that leaves the client guessing."""

    async def main() -> None:
        async with serving() as site:
            _, body = await site.post(CHAT, chat(top_p=7))
        assert body["error"]["message"] == "top_p: expected float <= 1.0, got 7"

    asyncio.run(main())
