"""The engine's boundary and step loop on a runner that the test drives."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from freetoken.engine.engine import AsyncEngine
from freetoken.errors import CapacityError, ContextTooLong, DeviceError, NotReady, RequestError
from freetoken.types import SamplingParams
from tests.engine.manual import (
    EOS,
    ManualRunner,
    collect,
    expected,
    is_all_returned,
    next_token,
    running,
    said,
    settle,
)


def test_generate_yields_every_token_once_and_ends_at_its_limit() -> None:
    """Tokens lost or doubled by the overlap of two steps in flight."""

    async def main() -> None:
        async with running(ManualRunner(is_free=True)) as engine:
            params = SamplingParams(max_tokens=9)
            assert await collect(engine.generate([5, 6, 7], params, request_id="a")) == (
                expected(3, 9),
                "length",
                0,
            )
            assert is_all_returned(engine)

    asyncio.run(main())


def test_end_token_stops_and_the_token_run_ahead_is_discarded() -> None:
    """R14: the step launched ahead of the end leaks its token."""

    async def main() -> None:
        runner = ManualRunner(is_free=True, overrides={6: EOS})
        async with running(runner) as engine:
            params = SamplingParams(max_tokens=50)
            ids, finish, _ = await collect(engine.generate([5, 6, 7], params, request_id="a"))
            assert (ids, finish) == ([*expected(3, 3), EOS], "stop")
            await settle()
            assert is_all_returned(engine)
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            ids, finish, _ = await collect(engine.generate([5, 6, 7], params, request_id="b"))
            assert (len(ids), finish) == (6, "length")

    asyncio.run(main())


def test_stop_token_id_ends_a_sequence_even_when_eos_is_ignored() -> None:
    """stop_token_ids lost when ignore_eos is set."""

    async def main() -> None:
        async with running(ManualRunner(is_free=True)) as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(next_token(5),))
            assert (await collect(engine.generate([1, 1, 1], params, request_id="a")))[:2] == (
                expected(3, 3),
                "stop",
            )

    asyncio.run(main())


def test_prompt_over_the_context_is_refused_with_both_numbers_and_neighbours_go_on() -> None:
    """H01, R01: a prompt longer than the KV pool waits for ever, or is cut."""

    async def main() -> None:
        async with running(ManualRunner(is_free=True), context=32, pages=8) as engine:
            neighbour = engine.generate([1, 2], SamplingParams(max_tokens=4), request_id="n")
            first = await anext(neighbour)
            with pytest.raises(ContextTooLong, match=r"32 tokens.* 40 tokens"):
                await said(engine, [3] * 40, 1, "long")
            ids, finish, _ = await collect(neighbour)
            assert (first.ids + ids, finish) == (expected(2, 4), "length")

    asyncio.run(main())


def test_max_tokens_is_clamped_to_what_is_left_of_the_context() -> None:
    """R02: a large max_tokens near the end of the window is refused, negative, or runs past the
    context.
    """

    async def main() -> None:
        async with running(ManualRunner(is_free=True), context=16, pages=4) as engine:
            for limit in (32000, None):
                params = SamplingParams(max_tokens=limit)
                assert await collect(engine.generate([7] * 10, params, request_id="a")) == (
                    expected(10, 6),
                    "length",
                    0 if limit else 8,
                )
            assert len(await said(engine, [9] * 15, 32000)) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], SamplingParams(), "at least 1 prompt token"),
        ([1, -1], SamplingParams(), "token ids from 0 to 999"),
        ([1000], SamplingParams(), "got 1000"),
        ([1], SamplingParams(max_tokens=0), "max_tokens of at least 1"),
    ],
    ids=["empty", "negative-id", "id-over-vocabulary", "no-tokens-wanted"],
)
def test_bad_request_is_refused_at_the_door(
    prompt: list[int], params: SamplingParams, text: str
) -> None:
    """Bad ids that reach the embedding, or an empty prompt that hangs."""

    async def main() -> None:
        async with running(ManualRunner(is_free=True)) as engine:
            with pytest.raises(RequestError, match=text):
                await collect(engine.generate(prompt, params, request_id="a"))
            assert engine.statistics().requests == 0

    asyncio.run(main())


def test_queue_over_its_limit_is_refused_and_those_in_it_are_served() -> None:
    """A queue that grows without end."""

    async def main() -> None:
        runner = ManualRunner()
        async with (
            running(runner, max_running=1, max_queue=2) as engine,
            asyncio.TaskGroup() as tasks,
        ):
            waiting = [tasks.create_task(said(engine, [i], 1, f"r{i}")) for i in range(3)]
            await settle()
            with pytest.raises(CapacityError, match="3 requests are here"):
                engine.check(1, SamplingParams())
            for _ in waiting:
                runner.finish_step()
                await settle()
            assert [t.result() for t in waiting] == [expected(1, 1)] * 3

    asyncio.run(main())


def test_two_steps_are_in_flight_and_never_three() -> None:
    """The overlap is lost, or runs away from the publisher."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner) as engine:
            stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=8), request_id="a")
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(collect(stream))
                for finished in range(8):
                    await settle()
                    assert len(runner.launched) - finished == min(2, 8 - finished)
                    runner.finish_step()
                assert (await task)[0] == expected(3, 8)
            # The token in flight is never told to the runner by id: it has it already.
            assert runner.seen_tokens == [[1, 2, 3]] + [[]] * 7

    asyncio.run(main())


def test_device_failure_ends_every_request_and_the_engine_task() -> None:
    """R36: requests hang, and new ones are taken, after the runner died."""

    async def main() -> None:
        runner = ManualRunner()
        errors: list[BaseException] = []

        async def client(engine: AsyncEngine, name: str) -> None:
            try:
                await said(engine, [1, 2], 5, name)
            except DeviceError as error:
                errors.append(error)

        async def serve() -> None:
            async with running(runner) as engine, asyncio.TaskGroup() as tasks:
                for name in "abc":
                    tasks.create_task(client(engine, name))
                await settle()
                runner.failure = DeviceError("device lost")
                runner.finish_step()
                await settle()
                assert isinstance(engine.fault, DeviceError)
                assert (engine.statistics().failed, engine.statistics().aborted) == (3, 0)
                with pytest.raises(DeviceError, match="restart the server"):
                    engine.check(1, SamplingParams())

        with pytest.raises(ExceptionGroup) as caught:
            await serve()
        assert caught.group_contains(DeviceError, match="device lost")
        assert [str(e) for e in errors] == ["the engine stopped after a fault: device lost"] * 3
        assert runner.is_closed

    asyncio.run(main())


def test_drain_waits_for_running_requests_and_refuses_new_ones() -> None:
    """A shutdown that cuts replies, or takes new work for ever."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner) as engine, asyncio.TaskGroup() as tasks:
            reply = tasks.create_task(said(engine, [1], 2))
            await settle()
            drained = tasks.create_task(engine.drain(10.0))
            await settle()
            with pytest.raises(NotReady, match="closing"):
                engine.check(1, SamplingParams())
            runner.finish_step()
            runner.finish_step()
            assert await drained
            assert reply.result() == expected(1, 2)

    asyncio.run(main())


def test_drain_aborts_what_is_left_at_the_deadline() -> None:
    """A stream without end keeps the process from stopping."""

    async def main() -> None:
        runner = ManualRunner()
        async with running(runner) as engine, asyncio.TaskGroup() as tasks:
            reply = tasks.create_task(
                collect(engine.generate([1], SamplingParams(), request_id="a"))
            )
            await settle()
            assert not await engine.drain(0.0)
            assert (await reply)[1] == "abort"

    asyncio.run(main())


def test_callers_can_await_step_boundaries_and_hang_a_coroutine_between_steps() -> None:
    """The loop hook of embedding programs is called late, twice or never."""

    async def main() -> None:
        runner = ManualRunner()
        calls: list[tuple[int, int]] = []

        async def hook(step: int) -> None:
            calls.append((step, len(runner.launched)))

        async def watch() -> list[int]:
            seen: list[int] = []
            async with aclosing(engine.steps()) as steps:
                async for step in steps:
                    seen.append(step)
                    if len(seen) == 3:
                        break
            return seen

        async with running(runner) as engine, asyncio.TaskGroup() as tasks:
            engine.add_hook(hook)
            watcher = tasks.create_task(watch())
            reply = tasks.create_task(said(engine, [1], 3))
            for _ in range(3):
                await settle()
                runner.finish_step()
            await settle()
            assert watcher.result() == [1, 2, 3]
            assert reply.result() == expected(1, 3)
            assert calls == [(1, 2), (2, 3), (3, 3)]

    asyncio.run(main())


def test_step_listeners_end_with_the_engine() -> None:
    """A program that waits for ever for the next step of an engine that died."""

    async def main() -> None:
        runner = ManualRunner()
        seen: list[int] = []

        async def watch(engine: AsyncEngine) -> None:
            async with aclosing(engine.steps()) as steps:
                seen.extend([step async for step in steps])

        async with asyncio.TaskGroup() as tasks:
            async with running(runner) as engine:
                watcher = tasks.create_task(watch(engine))
                reply = tasks.create_task(said(engine, [1], 2))
                for _ in range(2):
                    await settle()
                    runner.finish_step()
                assert await reply == expected(1, 2)
            await watcher
            await watch(engine)
        assert seen == [1, 2]

    asyncio.run(main())


def test_closed_engine_says_so_and_not_that_it_broke() -> None:
    """A request during the last moments of a shutdown reported as a fault of the device."""

    async def main() -> None:
        async with running(ManualRunner()) as engine:
            pass
        with pytest.raises(NotReady, match="closed"):
            engine.check(1, SamplingParams())

    asyncio.run(main())


def test_cached_tokens_of_a_preempted_request_stay_within_its_prompt() -> None:
    """Usage that reports more cached tokens than the prompt has, after a restart that found its own
    pages.
    """

    async def main() -> None:
        runner = ManualRunner(is_free=True)
        async with running(runner, pages=10, reuse=True) as engine, asyncio.TaskGroup() as tasks:
            params = SamplingParams(max_tokens=20)
            clients = [
                tasks.create_task(
                    collect(engine.generate(range(first, first + 8), params, request_id=name))
                )
                for name, first in (("a", 10), ("b", 50), ("c", 90))
            ]
            got = [await client for client in clients]
            assert engine.statistics().preempted > 0
            assert [(ids, cached) for ids, _, cached in got] == [(expected(8, 20), 0)] * 3
            assert engine.statistics().cached_tokens == 0

    asyncio.run(main())
