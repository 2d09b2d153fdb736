"""Refusals and failures: right status, right words, before the status line where possible."""

from __future__ import annotations

import asyncio
import re

import pytest

from freetoken.server.application import ServerState
from tests.server.serving import MODEL, ScriptedFault, byte_tokenizer, chat, reply, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_context_is_refused_with_both_numbers(stream: bool) -> None:
    """H01: a prompt longer than the KV pool waits for ever, or is answered 500."""

    async def main() -> None:
        async with serving(context=64) as site:
            for path, field in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
                long = chat("x" * 64) if path == CHAT else {"prompt": "x" * 64}
                status, body = await site.post(path, long | {"stream": stream})
                assert status == 400
                error = body["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", field)
                numbers = [int(n) for n in re.findall(r"\d+", error["message"])]
                assert numbers[0] == 64
                assert numbers[1] >= 64
            assert site.engine.prompts == []

    asyncio.run(main())


def test_prompt_is_never_cut() -> None:
    """R01: context silently cut to the window loses the user's turn."""

    async def main() -> None:
        text = "<|start|>user:" + "x" * 40 + "<|end|><|start|>assistant:"
        ids = byte_tokenizer().encode(text, False)
        async with serving(context=len(ids) + 1) as site:
            status, body = await site.post(CHAT, chat("x" * 40))
            assert status == 200, body
            assert site.engine.prompts == [ids]
            assert body["usage"]["completion_tokens"] == 1
            status, _ = await site.post(CHAT, chat("x" * 41))
            assert status == 400

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_chat_without_template_is_refused_before_headers(stream: bool) -> None:
    """H24: status 200 and a chunked reply that breaks off, since the template failed too late."""

    async def main() -> None:
        async with serving(template=None) as site:
            status, body = await site.post(CHAT, chat(stream=stream))
            assert (status, body["error"]["code"]) == (400, "no_chat_template")
            status, _ = await site.post(COMPLETIONS, {"prompt": "Hi"})
            assert status == 200

    asyncio.run(main())


def test_template_refusal_is_the_clients_error() -> None:
    """Catches a template's own refusal answered as 500."""
    template = "{{ raise_exception('system must be first') }}"

    async def main() -> None:
        async with serving(template=template) as site:
            status, body = await site.post(CHAT, chat(stream=True))
        assert status == 400
        assert "system must be first" in body["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("name", [MODEL, "alias", "/models/tiny", "default", "", None])
def test_known_model_names_are_served(name: str | None) -> None:
    """Catches an alias that is refused; replies always carry the served id."""

    async def main() -> None:
        async with serving() as site:
            status, body = await site.post(CHAT, chat() | {"model": name})
        assert (status, body["model"]) == (200, MODEL)

    asyncio.run(main())


def test_unknown_model_is_not_found() -> None:
    """Catches another model served silently under the name that was asked for."""

    async def main() -> None:
        async with serving() as site:
            for path, body in ((CHAT, chat()), (COMPLETIONS, {"prompt": "x"})):
                status, answer = await site.post(path, body | {"model": "gpt-9"})
                assert (status, answer["error"]["code"]) == (404, "model_not_found")
                assert MODEL in answer["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_is_429_with_retry_after(stream: bool) -> None:
    """Catches unbounded waiting, or a 200 that turns into an error event."""

    async def main() -> None:
        async with serving(reply("x" * 9), max_running=1, max_queue=1) as site:
            site.runner.is_open.clear()
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(site.post(CHAT, chat()))
                await site.engine.came.get()
                await asyncio.sleep(0)  # the step loop takes the first from the queue
                assert site.engine.statistics().running == 1
                second = tasks.create_task(site.post(CHAT, chat()))
                await site.engine.came.get()
                url = site.url + CHAT
                async with site.session.post(url, json=chat(stream=stream, n=2)) as response:
                    body = await response.json()
                    assert response.status == 429, body
                    assert int(response.headers["Retry-After"]) >= 1
                assert body["error"]["type"] == "rate_limit_error"
                site.runner.open()
            assert first.result()[0] == second.result()[0] == 200

    asyncio.run(main())


def test_choices_that_overfill_the_queue_are_refused_as_one() -> None:
    """Catches a call whose later choices fail after the status line while its first go on."""

    async def main() -> None:
        async with serving(reply("x" * 9), max_running=1, max_queue=2) as site:
            site.runner.is_open.clear()
            url = site.url + CHAT
            async with site.session.post(url, json=chat(stream=True, n=5)) as response:
                assert response.status == 429, await response.text()
            site.runner.open()
            await site.idle()
            status, _ = await site.post(CHAT, chat())
            assert status == 200

    asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_failure_in_stream_is_an_error_event_without_done(path: str) -> None:
    """Catches a cut stream that clients take for a complete answer."""

    async def main() -> None:
        async with serving(reply("half", finish="error")) as site:
            base = chat() if path == CHAT else {"prompt": "Hi"}
            events = await site.events(path, base)
            status, body = await site.post(path, base)
        assert "[DONE]" not in events
        assert events[-1]["error"]["type"] == "server_error"
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert status == 500
        assert body["error"]["type"] == "server_error"

    asyncio.run(main())


def test_dead_engine_ends_streams_and_shows_in_health() -> None:
    """Catches clients left waiting, or a server that says ok, after the engine died."""

    async def main() -> None:
        async with serving(reply("x" * 50)) as site:
            site.runner.is_open.clear()
            site.runner.failure = ScriptedFault("scripted fault")
            async with asyncio.TaskGroup() as tasks:
                stream = tasks.create_task(site.events(CHAT, chat()))
                await site.engine.came.get()
                site.runner.open()
            assert "scripted fault" in stream.result()[-1]["error"]["message"]
            assert (await site.post(CHAT, chat()))[0] == 500
            status, body = await site.get("/health")
            assert (status, body["status"]) == (500, "error")
            assert "scripted fault" in body["error"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_unexpected_exception_shows_id_and_no_traceback(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches internals leaking to clients, or a 500 that cannot be found in the log."""

    async def main() -> None:
        async with serving() as site:

            def check(prompt_tokens: int, params: object) -> None:
                raise ZeroDivisionError("secret /home/path")

            site.engine.check = check
            async with site.session.post(site.url + CHAT, json=chat(stream=stream)) as response:
                text = await response.text()
                assert response.status == 500
                request_id = response.headers["x-request-id"]
        assert request_id in text
        assert "secret" not in text
        assert "Traceback" not in text

    asyncio.run(main())
    assert any(r.exc_info and "failed" in r.getMessage() for r in caplog.records)


def test_exception_in_stream_is_an_event_with_id() -> None:
    """H24, general: any error raised in a generator becomes an error event, then a clean end."""

    async def main() -> None:
        async with serving(reply("abcdef")) as site:

            def token_bytes(token: int) -> bytes:
                raise ZeroDivisionError("secret")

            assert site.state.text is not None
            site.state.text.tokenizer.token_bytes = token_bytes
            events = await site.events(CHAT, chat(logprobs=True))
            assert (await site.post(CHAT, chat()))[0] == 200
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert re.search(r"req_[0-9a-f]{24}", events[-1]["error"]["message"])
        assert "secret" not in str(events)

    asyncio.run(main())


def test_loading_is_503_with_retry_after_and_phase() -> None:
    """Catches a socket that is silent, or answers 500, while the model loads."""

    async def main() -> None:
        async with serving() as site:
            text, site.state.text = site.state.text, None
            progress = site.state.progress
            progress.phase, progress.step = "loading", "loading weights"
            progress.done_bytes, progress.total_bytes = 5, 10
            for path, body in ((CHAT, chat()), (CHAT, chat(stream=True)), (COMPLETIONS, {})):
                async with site.session.post(site.url + path, json=body) as response:
                    assert response.status == 503
                    assert int(response.headers["Retry-After"]) >= 1
                    error = (await response.json())["error"]
                    assert error["code"] == "model_loading"
                    assert "5 of 10 bytes" in error["message"]
            status, health = await site.get("/health")
            assert status == 503
            assert health == {
                "status": "loading",
                "phase": "loading",
                "step": "loading weights",
                "done_bytes": 5,
                "total_bytes": 10,
            }
            assert (await site.get("/v1/models"))[0] == 503
            progress.phase, progress.error = "error", "shard 2 is missing"
            status, health = await site.get("/health")
            assert (status, health["error"]) == (500, "shard 2 is missing")
            site.state.text, progress.phase = text, "ok"
            assert (await site.get("/health"))[0] == 200

    asyncio.run(main())


def test_state_starts_as_loading() -> None:
    """Catches a server that claims to be ready before anything was loaded."""
    assert ServerState().text is None


def test_draining_engine_is_503() -> None:
    """Catches 500 or 429 for a server that is closing."""

    async def main() -> None:
        async with serving() as site:
            await site.engine.drain(1)
            status, body = await site.post(CHAT, chat())
        assert status == 503
        assert "closing" in body["error"]["message"]

    asyncio.run(main())


def test_reply_cut_by_shutdown_is_an_error_not_an_answer() -> None:
    """Catches a reply cut at the drain deadline that is delivered as complete."""

    async def main() -> None:
        async with serving(reply("x" * 50)) as site:
            site.runner.is_open.clear()
            async with asyncio.TaskGroup() as tasks:
                stream = tasks.create_task(site.events(CHAT, chat()))
                whole = tasks.create_task(site.post(CHAT, chat()))
                await site.engine.came.get()
                await site.engine.came.get()
                assert not await site.engine.drain(0)
                site.runner.open()
            assert "[DONE]" not in stream.result()
            assert "closing" in stream.result()[-1]["error"]["message"]
            assert whole.result()[0] == 503

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_route_or_method_is_json(method: str, path: str, status: int) -> None:
    """Catches HTML or plain text errors that clients cannot parse."""

    async def main() -> None:
        async with (
            serving() as site,
            site.session.request(method, site.url + path) as response,
        ):
            body = await response.json()
            assert response.status == status
            assert body["error"]["type"] == "invalid_request_error"
            assert path in body["error"]["message"]
            assert ("Allow" in response.headers) == (status == 405)

    asyncio.run(main())


def test_body_over_limit_is_413() -> None:
    """Catches a body read into memory without end."""

    async def main() -> None:
        async with serving(max_body_bytes=2000) as site:
            status, body = await site.post(CHAT, chat("x" * 3000))
        assert status == 413
        assert "2000 bytes" in body["error"]["message"]

    asyncio.run(main())


def test_request_ids_differ_and_are_in_every_reply() -> None:
    """R09: ids that repeat make logs and aborts ambiguous."""

    async def main() -> None:
        seen: list[str] = []
        async with serving() as site:
            bodies = [chat(), chat(stream=True), chat(temperature=9)]
            for body in bodies:
                headers = {"x-request-id": "mine"}
                async with site.session.post(
                    site.url + CHAT, json=body, headers=headers
                ) as response:
                    seen.append(response.headers["x-request-id"])
            async with site.session.get(site.url + "/nothing") as response:
                seen.append(response.headers["x-request-id"])
        assert len(set(seen)) == 4
        assert all(re.fullmatch(r"req_[0-9a-f]{24}", s) for s in seen)

    asyncio.run(main())
