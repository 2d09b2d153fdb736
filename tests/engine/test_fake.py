"""The scripted runner under the real scheduler."""

from __future__ import annotations

import asyncio

import pytest

from freetoken.engine.engine import AsyncEngine
from freetoken.engine.fake import ScriptedReply, ScriptRunner
from freetoken.errors import DeviceError
from freetoken.types import SamplingParams, TokenLogprob
from tests.engine.manual import EOS, collect, is_all_returned, running, settle

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7])
def test_replies_are_taken_in_order_and_the_last_repeats(tokens_per_step: int) -> None:
    """R03: several tokens a step lose some, or replies go to the wrong request."""
    replies = [
        ScriptedReply((11, 12, 13, 14, 15), tokens_per_step),
        ScriptedReply((21, 22), tokens_per_step, finish="length"),
    ]

    async def main() -> None:
        async with running(ScriptRunner(replies)) as engine:
            said = [
                await collect(engine.generate(PROMPT, SamplingParams(), request_id=str(i)))
                for i in range(3)
            ]
            assert [s[:2] for s in said] == [
                ([11, 12, 13, 14, 15], "stop"),
                ([21, 22], "length"),
                ([21, 22], "length"),
            ]
            await settle()
            assert is_all_returned(engine)

    asyncio.run(main())


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_limit_end_token_and_ignore_eos_work_as_on_a_model(tokens_per_step: int) -> None:
    """A script that ignores max_tokens hides the same fault in clients."""
    reply = ScriptedReply((11, 12, EOS, 14, 15), tokens_per_step)

    async def main() -> None:
        async with running(ScriptRunner([reply])) as engine:

            async def said(**settings: object) -> tuple[list[int], str | None]:
                params = SamplingParams(**settings)  # pyright: ignore[reportArgumentType]
                return (await collect(engine.generate(PROMPT, params, request_id="r")))[:2]

            assert await said() == ([11, 12, EOS], "stop")
            assert await said(max_tokens=2) == ([11, 12], "length")
            assert await said(ignore_eos=True, max_tokens=7) == (
                [11, 12, EOS, 14, 15, 11, 12],
                "length",
            )
            assert await said(stop_token_ids=(12,)) == ([11, 12], "stop")

    asyncio.run(main())


def test_scripted_error_fails_its_request_and_no_other() -> None:
    """A broken reply that takes the engine down."""

    async def main() -> None:
        replies = [ScriptedReply((11,), finish="error"), ScriptedReply((21,))]
        async with running(ScriptRunner(replies)) as engine:
            with pytest.raises(DeviceError, match="request 'a' ended with an error"):
                await collect(engine.generate(PROMPT, SamplingParams(), request_id="a"))
            assert (await collect(engine.generate(PROMPT, SamplingParams(), request_id="b")))[
                :2
            ] == ([21], "stop")
            statistics = engine.statistics()
            assert (statistics.failed, statistics.finished) == (1, 1)

    asyncio.run(main())


def test_empty_reply_ends_at_once() -> None:
    """A reply without tokens that never finishes."""

    async def main() -> None:
        async with running(ScriptRunner([ScriptedReply(())])) as engine:
            assert (await collect(engine.generate(PROMPT, SamplingParams(), request_id="a")))[
                :2
            ] == ([], "stop")

    asyncio.run(main())


def test_logprobs_are_aligned_with_ids() -> None:
    """Log-probabilities that drift from their tokens."""

    async def main() -> None:
        async with running(ScriptRunner([ScriptedReply((11, 12))])) as engine:
            stream = engine.generate(PROMPT, SamplingParams(logprobs=1), request_id="a")
            got: list[TokenLogprob] = []
            async for chunk in stream:
                got += chunk.logprobs or []
            assert [(p.token, p.logprob) for p in got] == [(11, 0.0), (12, 0.0)]

    asyncio.run(main())


def test_steps_of_different_delays_end_in_order() -> None:
    """A reply without delay that overtakes a slow neighbour's step, and then hangs when the number
    of finished steps falls back.
    """
    replies = [ScriptedReply((11, 12), delay_s=0.02), ScriptedReply((21, 22, 23, 24, 25))]

    async def main() -> None:
        runner = ScriptRunner(replies)
        ended: list[str] = []

        async def ask(engine: AsyncEngine, name: str) -> list[int]:
            params = SamplingParams(max_tokens=2 if name == "slow" else None)
            ids = (await collect(engine.generate(PROMPT, params, request_id=name)))[0]
            ended.append(name)
            return ids

        async with running(runner) as engine, asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(ask(engine, "slow"))
            quick = tasks.create_task(ask(engine, "quick"))
            clock = asyncio.get_running_loop().time
            began = clock()
            assert await quick == [21, 22, 23, 24, 25]
            # Both steps of the slow reply held the quick one too.
            assert clock() - began >= 0.035
            assert await slow == [11, 12]
            assert ended == ["slow", "quick"]

    asyncio.run(main())


def test_delay_is_waited_for_by_the_loop_not_in_it() -> None:
    """A scripted delay that blocks everybody else."""

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        reply = ScriptedReply((11, 12, 13), delay_s=0.005)
        async with running(ScriptRunner([reply])) as engine, asyncio.TaskGroup() as tasks:
            ticker = tasks.create_task(tick())
            stream = engine.generate(PROMPT, SamplingParams(), request_id="a")
            assert (await collect(stream))[0] == [11, 12, 13]
            ticker.cancel()
        assert ticks > 50

    asyncio.run(main())
