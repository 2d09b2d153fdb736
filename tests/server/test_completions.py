"""POST /v1/completions: prompt forms, several prompts, echo, log-probabilities, streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.serving import MODEL, reply, serving

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [[72, 105]]),
        (["Hi", "A"], [[72, 105], [65]]),
        ([72, 105], [[72, 105]]),
        ([[72], [105, 65]], [[72], [105, 65]]),
        (None, [[256]]),
        ("", [[256]]),
    ],
    ids=["string", "strings", "ids", "id-lists", "null", "empty"],
)
def test_prompt_forms(prompt: Any, ids: list[list[int]]) -> None:
    """Catches a prompt form that is misread; null and "" mean the start token."""
    letters = {tuple(x): i for i, x in enumerate(ids)}

    async def main() -> None:
        async with serving(reply("ok")) as site:
            status, body = await site.post(PATH, {"prompt": prompt})
            assert status == 200, body
            seen = site.engine.prompts
        assert sorted(letters[tuple(p)] for p in seen) == list(range(len(ids)))
        assert [c["index"] for c in body["choices"]] == list(range(len(ids)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert (body["object"], body["model"]) == ("text_completion", MODEL)

    asyncio.run(main())


def test_max_tokens_defaults_to_16() -> None:
    """Catches a raw completion that runs to the end of the context unasked."""

    async def main() -> None:
        async with serving(reply("x" * 99)) as site:
            _, body = await site.post(PATH, {"prompt": "a"})
        assert body["usage"]["completion_tokens"] == 16
        assert body["choices"][0] == {
            "index": 0,
            "text": "x" * 16,
            "logprobs": None,
            "finish_reason": "length",
        }

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [{}, {"echo": True}, {"logprobs": 1}, {"stop": ["gam"]}, {"n": 2}, {"max_tokens": 3}],
    ids=str,
)
@pytest.mark.parametrize("prompt", ["start ", ["a", "b"]], ids=["one", "two"])
def test_stream_equals_whole(fields: dict[str, Any], prompt: Any) -> None:
    """H21: a stop string missed or leaked, here and in streams alike; no choice without an end."""
    body = {"prompt": prompt, "max_tokens": 99, **fields}

    async def main() -> None:
        async with serving(*[reply("alpha beta gamma") for _ in range(8)]) as site:
            _, whole = await site.post(PATH, body)
            options = {"stream_options": {"include_usage": True}}
            events = await site.events(PATH, body | options)
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert events[-2]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        for choice in whole["choices"]:
            mine = [c for e in events[:-2] for c in e["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            ends = [c["finish_reason"] for c in mine if c["finish_reason"]]
            assert ends == [choice["finish_reason"]]
            if choice["logprobs"]:
                for field, values in choice["logprobs"].items():
                    assert [
                        v for c in mine if c["logprobs"] for v in c["logprobs"][field]
                    ] == values

    asyncio.run(main())


def test_echo_puts_the_prompt_in_front() -> None:
    """Catches an echo that is accepted and ignored."""

    async def main() -> None:
        async with serving(reply("!")) as site:
            _, text = await site.post(PATH, {"prompt": "Hi", "echo": True})
            _, ids = await site.post(PATH, {"prompt": [72, 105], "echo": True})
        assert text["choices"][0]["text"] == ids["choices"][0]["text"] == "Hi!"

    asyncio.run(main())


def test_logprobs_in_completions_shape() -> None:
    """Catches offsets that do not point into the text."""

    async def main() -> None:
        async with serving(reply("abc")) as site:
            _, body = await site.post(PATH, {"prompt": "Hi", "logprobs": 1})
        assert body["choices"][0]["logprobs"] == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [0.0, 0.0, 0.0],
            "top_logprobs": [{"a": 0.0}, {"b": 0.0}, {"c": 0.0}],
            "text_offset": [0, 1, 2],
        }

    asyncio.run(main())


def test_special_tokens_of_a_raw_prompt_are_special() -> None:
    """Catches raw prompts whose control tokens are spelled out as text."""

    async def main() -> None:
        async with serving() as site:
            await site.post(PATH, {"prompt": "<|start|>A<|end|>"})
        assert site.engine.prompts == [[256, 65, 257]]

    asyncio.run(main())
