"""Clients that leave, at every point of a request's life."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from freetoken.engine.engine import AsyncEngine
from freetoken.types import SamplingParams
from tests.engine.manual import (
    ManualRunner,
    collect,
    expected,
    is_all_returned,
    running,
    said,
    settle,
)

LONG = SamplingParams(max_tokens=8000)


async def leave_after(engine: AsyncEngine, chunks: int) -> None:
    """Read some chunks of an endless reply, then go."""
    async with aclosing(engine.generate([1, 2, 3], LONG, request_id="gone")) as stream:
        for _ in range(chunks):
            await anext(stream)


def test_client_that_leaves_mid_stream_costs_at_most_the_steps_in_flight() -> None:
    """H02: after a client leaves, decoding goes on to max_tokens and its pages stay taken."""

    async def main() -> None:
        runner = ManualRunner(is_free=True)
        async with running(runner) as engine:
            await leave_after(engine, 3)
            steps = len(runner.launched)
            await settle()
            assert len(runner.launched) <= steps + 1
            assert is_all_returned(engine)
            assert engine.statistics().aborted == 1
            assert engine.statistics().finished == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "finished_steps", [0, 1, 2], ids=["first-chunk", "later-chunk", "last-chunk"]
)
def test_client_that_leaves_during_prefill_stops_the_rest_of_its_prompt(
    finished_steps: int,
) -> None:
    """H02 (d): a chunked prefill goes on for nobody."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner, max_prefill_tokens=8) as engine, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(
                collect(engine.generate(range(10, 50), LONG, request_id="gone"))
            )
            await settle()
            for _ in range(finished_steps):
                runner.finish_step()
                await settle()
            task.cancel()
            await settle()
            launched = len(runner.launched)
            for _ in range(launched - finished_steps):
                runner.finish_step()
            await settle()
            assert len(runner.launched) == launched == finished_steps + 2
            assert is_all_returned(engine)
            # Only chunks that were done while somebody wanted them may be reused.
            assert engine.statistics().pages.cached == finished_steps * 2

    asyncio.run(main())


def test_client_that_leaves_the_queue_is_never_computed() -> None:
    """H02 (c): a request that still waits is started after its client left."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner, max_running=1) as engine, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(said(engine, [1], 2, "first"))
            queued = tasks.create_task(said(engine, [2], 2, "queued"))
            await settle()
            queued.cancel()
            await settle()
            runner.finish_step()
            runner.finish_step()
            assert await first == expected(1, 2)
            await settle()
            assert {c.sequence.request_id for step in runner.launched for c in step} == {"first"}
            assert engine.statistics().waiting == 0

    asyncio.run(main())


def test_abort_and_disconnect_together_count_once() -> None:
    """H02 (e): a double abort frees pages twice or raises."""

    async def main() -> None:
        async with running(ManualRunner(is_free=True)) as engine:
            async with aclosing(engine.generate([1, 2, 3], LONG, request_id="gone")) as stream:
                await anext(stream)
                assert engine.abort("gone")
                assert not engine.abort("gone")
                assert (await collect(stream))[1] == "abort"
            await settle()
            assert engine.statistics().aborted == 1
            assert not engine.abort("gone")
            assert is_all_returned(engine)

    asyncio.run(main())


def test_abort_takes_the_exact_id_not_a_prefix() -> None:
    """R09: cancelling batch_1 also kills batch_10."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner) as engine, asyncio.TaskGroup() as tasks:
            one = tasks.create_task(collect(engine.generate([1], LONG, request_id="batch_1")))
            ten = tasks.create_task(said(engine, [1, 2], 3, "batch_10"))
            await settle()
            assert engine.abort("batch_1")
            for _ in range(4):
                if (
                    len(runner.launched)
                    > engine.statistics().steps - engine.statistics().steps_in_flight
                ):
                    runner.finish_step()
                await settle()
            assert await ten == expected(2, 3)
            assert (await one)[1] == "abort"

    asyncio.run(main())


def test_result_of_an_aborted_step_enters_neither_output_nor_cache() -> None:
    """R10: abort between the last prefill chunk and the first token commits the late result."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner) as engine, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(collect(engine.generate([5] * 8, LONG, request_id="gone")))
            await settle()
            assert engine.abort("gone")
            assert await task == ([], "abort", 0)
            runner.finish_step()
            runner.finish_step()
            await settle()
            assert engine.statistics().pages.cached == 0
            assert is_all_returned(engine)

    asyncio.run(main())


def test_turn_after_a_cancelled_one_sees_only_its_own_tokens() -> None:
    """R11: the next turn is refused, or continues text that its client never got."""

    async def main() -> None:
        runner = ManualRunner(is_free=True)
        async with running(runner) as engine:
            await leave_after(engine, 6)
            runner.seen_tokens.clear()
            prompt = [1, 2, 3, 40, 41, 42, 43, 44, 45]
            assert await said(engine, prompt, 3) == expected(9, 3)
            assert [t for tokens in runner.seen_tokens for t in tokens] == prompt
            assert is_all_returned(engine)

    asyncio.run(main())
