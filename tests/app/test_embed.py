"""The engine inside somebody else's asyncio program, on a tiny real checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
import uvloop
from aiohttp import web

import freetoken
from freetoken import embed
from freetoken.assembly import Assembly, IsStopping
from freetoken.chat.text_model import TextDelta
from freetoken.config import Config
from freetoken.errors import ConfigError, ContextTooLong, DeviceError, NotReady, RequestError
from freetoken.types import Progress
from tests.app.scripted import chat, tokenizer_folder
from tests.models.oracle import NEW, PROMPT, Oracle, build

HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A tiny Mixture-of-Experts whose tokens are bytes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("embed")
    oracle = build("qwen3_moe", folder, vocab_size=258, max_position_embeddings=256)
    tokenizer_folder(folder)
    return oracle


@asynccontextmanager
async def opened(oracle: Oracle) -> AsyncIterator[freetoken.Engine]:
    """The tiny model, as a program opens it."""
    async with freetoken.Engine.open(str(oracle.folder), num_tokens=512) as engine:
        yield engine


async def ids_of(engine: freetoken.Engine, prompt: Sequence[int], **settings: object) -> list[int]:
    """Ids of one greedy continuation."""
    ids: list[int] = []
    stream = engine.generate(prompt, temperature=0, ignore_eos=True, **settings)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            ids += delta.ids
    return ids


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_generate_in_the_callers_loop_says_what_transformers_says(
    run: Callable[..., list[int]], oracle: Oracle
) -> None:
    """An embedded engine that needs a loop of its own, or computes something else."""

    async def main() -> list[int]:
        async with opened(oracle) as engine:
            return await ids_of(engine, oracle.prompt, max_tokens=NEW)

    assert run(main()) == oracle.greedy


def test_chat_streams_text_and_leaving_it_frees_every_page(oracle: Oracle) -> None:
    """A program that breaks out of a reply and pays for it to the end."""

    async def main() -> None:
        async with opened(oracle) as engine:
            got: list[TextDelta] = []
            settings = {"temperature": 0, "ignore_eos": True}
            async with aclosing(engine.chat(HELLO, **settings)) as deltas:
                async for delta in deltas:
                    got.append(delta)
                    if len(got) == 3:
                        break
            assert [len(d.ids) > 0 for d in got] == [True] * 3
            async with aclosing(engine.steps()) as steps:
                while engine.statistics().pages.in_use:
                    await anext(steps)
            statistics = engine.statistics()
            assert (statistics.aborted, statistics.running) == (1, 0)
            unread = engine.chat(HELLO)
            await unread.aclose()
            assert engine.statistics().requests == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": -3}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {999: 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=str,
)
def test_wrong_setting_is_named_before_anything_runs(
    settings: dict[str, object], param: str, oracle: Oracle
) -> None:
    """H03: nonsense that HTTP refuses reaches the sampler through Python."""

    async def main() -> None:
        async with opened(oracle) as engine:
            with pytest.raises(RequestError) as error:
                await anext(engine.chat(HELLO, **settings))
            assert error.value.param == param
            assert engine.statistics().requests == 0

    asyncio.run(main())


def test_errors_in_the_block_come_out_as_they_are(oracle: Oracle) -> None:
    """An `except RequestError` around the block that never matches: a group wraps it."""

    async def main(error: Exception | None) -> None:
        async with opened(oracle) as engine:
            if error is not None:
                raise error
            await ids_of(engine, [1] * 999)

    with pytest.raises(ContextTooLong):
        asyncio.run(main(None))
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        asyncio.run(main(mine))
    assert caught.value is mine
    assert caught.value.__suppress_context__ is False


def test_engine_that_dies_raises_its_own_error_from_the_block(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R36: a program that waits for ever on an engine whose device is gone."""

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    async def main() -> None:
        async with opened(oracle) as engine:
            monkeypatch.setattr("freetoken.models.decoder.Decoder.forward", broken)
            with pytest.raises(DeviceError, match="device lost"):
                await ids_of(engine, oracle.prompt)
            async with aclosing(engine.steps()) as steps:
                assert [step async for step in steps] == []
            await asyncio.Event().wait()  # the block is cancelled: nothing would wake it

    with pytest.raises(DeviceError, match="device lost"):
        asyncio.run(main())


def test_hooks_and_steps_see_every_step(oracle: Oracle) -> None:
    """A loop hook that the public class forgets to pass on."""

    async def main() -> None:
        seen: list[int] = []

        async def hook(step: int) -> None:
            seen.append(step)

        async with opened(oracle) as engine:
            engine.add_hook(hook)
            await ids_of(engine, oracle.prompt, max_tokens=4)
            assert engine.card.context == 256
            steps = engine.statistics().steps
            async with aclosing(engine.steps()) as boundaries:
                while len(seen) < steps:
                    await anext(boundaries)
            assert seen == list(range(1, steps + 1))
            assert await engine.drain(1.0)
            with pytest.raises(NotReady, match="closing"):
                await ids_of(engine, [1])

    asyncio.run(main())


def test_abort_by_id_ends_exactly_that_request(oracle: Oracle) -> None:
    """R09: an abort that ends a neighbour whose name begins alike."""

    async def main() -> None:
        async with opened(oracle) as engine, asyncio.TaskGroup() as tasks:
            limits = {"batch_1": 100, "batch_10": 30}
            replies = {
                name: tasks.create_task(
                    ids_of(engine, oracle.prompt, max_tokens=limit, request_id=name)
                )
                for name, limit in limits.items()
            }
            async with aclosing(engine.steps()) as steps:
                await anext(steps)
            assert engine.abort("batch_1")
            assert not engine.abort("batch_")
            assert len(await replies["batch_10"]) == 30
            assert len(await replies["batch_1"]) < 100
            assert engine.statistics().aborted == 1

    asyncio.run(main())


def test_application_mounts_into_the_callers_own(oracle: Oracle) -> None:
    """An HTTP interface that works at the root of its own server only."""

    async def main() -> None:
        async with opened(oracle) as engine, aiohttp.ClientSession() as session:
            outer = web.Application()
            outer.add_subapp("/llm", engine.application())
            runner = web.AppRunner(outer, handler_cancellation=True)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/llm/v1"
                body = chat(max_tokens=5, temperature=0, ignore_eos=True)
                async with session.post(f"{url}/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    assert (await response.json())["usage"]["completion_tokens"] == 5
                    assert response.headers["x-request-id"].startswith("req_")
                async with session.post(f"{url}/completions", json={"prompt": 1.5}) as response:
                    assert (response.status, (await response.json())["error"]["param"]) == (
                        400,
                        "prompt",
                    )
                lag_ms = 0.0
                while lag_ms == 0.0:  # it looks every 10 ms
                    async with session.get(f"{url}/stats") as response:
                        figures = await response.json()
                    assert figures["finished"] == 1
                    lag_ms = figures["loop_lag"]["max_ms"]
            finally:
                await runner.cleanup()

    asyncio.run(main())


def test_unknown_or_doubled_open_setting_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """A misspelt setting that is ignored."""

    async def main(**settings: object) -> None:
        async with freetoken.Engine.open(str(tmp_path), **settings):
            pass

    with pytest.raises(ConfigError, match=r"got 'max_runing'; the settings are .*max_queue"):
        asyncio.run(main(max_runing=3))
    with pytest.raises(ConfigError, match="--model and --demo together"):
        asyncio.run(main(demo=True))
    with pytest.raises(ConfigError, match=r"expected config\.json or one GGUF file"):
        asyncio.run(main())


def test_giving_up_while_loading_ends_the_loading_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled start that reads hundreds of gigabytes in the background all the same."""
    asked: list[IsStopping] = []

    @asynccontextmanager
    async def endless(
        _config: Config, _progress: Progress, is_stopping: IsStopping
    ) -> AsyncIterator[Assembly]:
        asked.append(is_stopping)
        assert not is_stopping()
        await asyncio.Event().wait()
        raise AssertionError
        yield  # an async generator

    monkeypatch.setattr(embed, "assemble", endless)

    async def main() -> None:
        async with asyncio.timeout(0.01), freetoken.Engine.open("anything"):
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert asked[0]()


def test_prompt_of_text_takes_the_models_own_prefix(oracle: Oracle) -> None:
    """Raw text and its ids continued differently."""

    async def main() -> None:
        async with opened(oracle) as engine:
            text = bytes(oracle.prompt).decode()
            ids = list(text.encode())
            assert ids == oracle.prompt
            from_text: list[int] = []
            async for delta in engine.generate(text, temperature=0, max_tokens=4, ignore_eos=True):
                from_text += delta.ids
            assert from_text == oracle.greedy[:4]
            assert engine.statistics().prompt_tokens == PROMPT

    asyncio.run(main())
