"""POST /v1/chat/completions: whole replies, streams, choices, usage, log-probabilities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.serving import END, MODEL, byte_tokenizer, chat, reply, serving

CHAT = "/v1/chat/completions"


def deltas(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    chunks = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" for c in chunks)


def test_reply_whole_has_every_required_field() -> None:
    """Catches a reply that SDKs cannot parse, or wrong token counts."""

    async def main() -> None:
        async with serving(reply("Grüße \N{SNOWMAN}.")) as site:
            status, body = await site.post(CHAT, chat())
        text = "Grüße \N{SNOWMAN}."
        assert status == 200
        assert body["id"].startswith("chatcmpl-")
        assert (body["object"], body["model"]) == ("chat.completion", MODEL)
        [choice] = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
        prompt = len(site.engine.prompts[0])
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": len(text.encode()),
            "total_tokens": prompt + len(text.encode()),
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    asyncio.run(main())


def test_stream_has_role_then_text_then_finish_then_done() -> None:
    """Catches a missing role chunk or finish_reason: agents loop for ever without it."""

    async def main() -> None:
        async with serving(reply("Hello there")) as site:
            events = await site.events(CHAT, chat())
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert len({c["id"] for c in chunks}) == 1
        assert all(set(c) == {"id", "object", "created", "model", "choices"} for c in chunks)
        assert all(c["object"] == "chat.completion.chunk" and c["model"] == MODEL for c in chunks)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons[-1] == "stop"
        assert set(reasons[:-1]) == {None}
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert deltas(events) == "Hello there"

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5},
        {"stop": ["gam", "zzz"]},
        {"stop": "alpha"},
        {"logprobs": True, "top_logprobs": 1, "stop": ["beta gamma"]},
        {"n": 3},
    ],
    ids=["plain", "length", "stop", "stop-at-once", "logprobs", "n"],
)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_stream_equals_whole(fields: dict[str, Any], tokens_per_step: int) -> None:
    """Catches text, finish or log-probabilities that differ between the two modes."""
    texts = ["alpha beta gamma \N{GRINNING FACE} delta"] * 6
    script = [reply(t, tokens_per_step=tokens_per_step) for t in texts]

    async def main() -> None:
        async with serving(*script) as site:
            _, whole = await site.post(CHAT, chat(**fields))
            events = await site.events(CHAT, chat(**fields))
        assert len(whole["choices"]) == fields.get("n", 1)
        for choice in whole["choices"]:
            index = choice["index"]
            mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
            assert deltas(events, index) == choice["message"]["content"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [
                choice["finish_reason"]
            ]
            entries = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
            assert entries == (choice["logprobs"] or {"content": []})["content"]

    asyncio.run(main())


def test_choices_run_together_each_with_its_own_end() -> None:
    """H20: n choices that share one finish or one index are merged by clients."""

    async def main() -> None:
        async with serving(reply("one"), reply("two two", finish="length"), reply("3")) as site:
            body = chat(n=3, seed=5, stream_options={"include_usage": True})
            events = await site.events(CHAT, body)
            seeds = sorted(p.seed or 0 for p in site.engine.params)
        assert [deltas(events, i) for i in range(3)] == ["one", "two two", "3"]
        ends = {
            c["index"]: c["finish_reason"]
            for e in events[:-2]
            for c in e["choices"]
            if c["finish_reason"]
        }
        assert ends == {0: "stop", 1: "length", 2: "stop"}
        assert seeds == [5, 6, 7]
        prompt = len(site.engine.prompts[0])
        assert events[-2]["usage"]["prompt_tokens"] == prompt
        assert events[-2]["usage"]["completion_tokens"] == len("onetwo two3")

    asyncio.run(main())


def test_choice_ends_by_stop_string_leaves_id_prefix_neighbour_alone() -> None:
    """R09: an abort by id prefix ends batch_10 together with batch_1."""

    async def main() -> None:
        script = [reply("go on to the end") for _ in range(11)]
        script[1] = reply("go STOP end")
        async with serving(*script, max_running=11) as site:
            _, body = await site.post(CHAT, chat(n=11, stop=["STOP"]))
            ids = [site.engine.came.get_nowait() for _ in range(11)]
        assert len(set(ids)) == 11
        assert ids[10] == ids[1] + "0"
        texts = [c["message"]["content"] for c in body["choices"]]
        assert texts == ["go " if i == 1 else "go on to the end" for i in range(11)]
        assert site.engine.statistics().aborted <= 1

    asyncio.run(main())


@pytest.mark.parametrize("asked", [True, False])
def test_usage_chunk_only_on_request(asked: bool) -> None:
    """R16: usage unasked confuses strict clients; missing usage breaks agents' compaction."""

    async def main() -> None:
        async with serving(reply("Hi")) as site:
            events = await site.events(CHAT, chat(stream_options={"include_usage": asked}))
        with_usage = [e for e in events[:-1] if "usage" in e]
        assert [e["choices"] for e in with_usage] == ([[]] if asked else [])
        if asked:
            assert events[-2] is with_usage[0]
            assert with_usage[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        else:
            assert all(e["choices"] for e in events[:-1])

    asyncio.run(main())


def test_cached_tokens_grow_by_turn() -> None:
    """Catches usage that hides prefix reuse from agents."""

    async def main() -> None:
        turns: list[dict[str, str]] = []
        cached: list[int] = []
        async with serving(reply("A reply of some length.")) as site:
            for i in range(3):
                turns.append({"role": "user", "content": f"Question number {i}, please answer."})
                _, body = await site.post(CHAT, {"messages": turns})
                turns.append(body["choices"][0]["message"])
                cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 < cached[1] < cached[2]

    asyncio.run(main())


def test_logprobs_in_openai_shape() -> None:
    """Catches a shape that SDKs refuse; bytes of a split character must be its own bytes."""

    async def main() -> None:
        async with serving(reply("é")) as site:
            _, body = await site.post(CHAT, chat(logprobs=True, top_logprobs=2))
        first, second = body["choices"][0]["logprobs"]["content"]
        assert (first["bytes"], second["bytes"]) == ([0xC3], [0xA9])
        assert first["logprob"] == 0.0
        assert first["top_logprobs"][0]["bytes"] == [0xC3]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 10**9}, 40),
        ({}, 40),
    ],
    ids=["max_tokens", "newer-name-wins", "huge-clamped", "absent"],
)
def test_max_tokens_is_clamped_to_what_is_left(fields: dict[str, Any], expected: int) -> None:
    """R02: an agent that asks 32000 near the end of the window must get what is left."""

    async def main() -> None:
        prompt = len(byte_tokenizer().encode("<|start|>user:Hi<|end|><|start|>assistant:", False))
        async with serving(reply("x" * 200), context=prompt + 40) as site:
            status, body = await site.post(CHAT, chat(**fields))
        assert status == 200
        assert body["usage"]["completion_tokens"] == expected
        assert body["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


def test_empty_reply_still_has_a_finish() -> None:
    """Catches a lost finish_reason when the model says its end token at once."""

    async def main() -> None:
        from freetoken.engine.fake import ScriptedReply  # noqa: PLC0415

        async with serving(ScriptedReply((END,))) as site:
            events = await site.events(CHAT, chat())
            _, whole = await site.post(CHAT, chat())
        assert deltas(events) == ""
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert whole["choices"][0]["message"]["content"] == ""

    asyncio.run(main())


def test_content_forms_give_the_same_prompt() -> None:
    """Catches a text part that renders unlike the same string: it costs the whole prefix cache."""

    async def main() -> None:
        contents: list[Any] = ["Hi", [{"type": "text", "text": "Hi", "cache_control": {}}]]
        async with serving() as site:
            for content in contents:
                await site.post(CHAT, {"messages": [{"role": "user", "content": content}]})
            await site.post(CHAT, {"messages": [{"role": "developer", "content": "Hi"}]})
            await site.post(CHAT, {"messages": [{"role": "system", "content": "Hi"}]})
        assert site.engine.prompts[0] == site.engine.prompts[1]
        assert site.engine.prompts[2] == site.engine.prompts[3]

    asyncio.run(main())


def test_tools_and_template_kwargs_reach_the_template() -> None:
    """Catches tools or switches that are accepted and silently dropped."""
    tool = {"type": "function", "function": {"name": "get_goal"}}

    async def main() -> None:
        async with serving() as site:
            tokenizer = byte_tokenizer()
            body = chat(tools=[tool], tool_choice="none", reasoning_effort="none")
            await site.post(CHAT, body)
            explicit = {"enable_thinking": True}
            await site.post(CHAT, body | {"chat_template_kwargs": explicit})
            texts = [tokenizer.decode(p, skip_special=False) for p in site.engine.prompts]
        assert "[get_goal ](thinking=False)" in texts[0]
        assert "(thinking=True)" in texts[1]

    asyncio.run(main())


def test_model_defaults_yield_to_request() -> None:
    """Catches generation_config values that override what the client asked for."""

    async def main() -> None:
        async with serving() as site:
            site.state.sampling_defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
            await site.post(CHAT, chat())
            await site.post(CHAT, chat(temperature=0, top_k=-1))
            first, second = site.engine.params
        assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 0.95)
        assert (second.temperature, second.top_k, second.top_p) == (0.0, -1, 0.95)

    asyncio.run(main())
