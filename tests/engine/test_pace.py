"""How many prompt tokens a step may hold beside running streams."""

from __future__ import annotations

import asyncio

import pytest

from freetoken.engine.loop import Pace
from freetoken.engine.request import StepResult
from tests.engine.manual import ManualRunner, running, said, settle


def test_budget_keeps_the_gap_of_running_streams() -> None:
    """H08: a running stream stops while somebody's prompt is computed in large steps."""
    pace = Pace(512, 0.25)
    assert pace.budget(is_decoding=False) == 512
    assert pace.budget(is_decoding=True) == 64  # nothing measured yet
    pace.learn(64, 0.064)
    assert pace.budget(is_decoding=True) == 250
    for _ in range(40):
        pace.learn(250, 2.5)
    assert pace.budget(is_decoding=True) == pytest.approx(25, abs=1)
    for _ in range(60):
        pace.learn(25, 25.0)
    assert pace.budget(is_decoding=True) == 16  # the prompt goes on all the same
    assert pace.budget(is_decoding=False) == 512


def test_fixed_cost_of_a_tiny_prompt_is_not_taken_for_a_tokens_price() -> None:
    """A prompt of one token that makes all later steps tiny."""
    pace = Pace(512, 0.25)
    pace.learn(2, 1.0)
    assert pace.budget(is_decoding=True) == 64


def test_prefill_that_was_skipped_teaches_nothing() -> None:
    """H08: a client that leaves before its chunk is computed makes prompts look free, and the next
    one holds up every stream with a step of full length.
    """

    class Timed(ManualRunner):
        """10 ms a prompt token that was computed, 1 ms a step."""

        async def wait(self, number: int) -> StepResult:
            result = await super().wait(number)
            tokens = sum(
                chunk.length
                for chunk, sampled in zip(self.launched[number - 1], result.sampled, strict=True)
                if chunk.is_prefill and not sampled.skipped
            )
            return StepResult(result.sampled, 0.001 + 0.010 * tokens)

    async def main() -> None:
        runner = Timed()
        limits = {"context": 1000, "pages": 1000, "max_prefill_tokens": 200}
        async with running(runner, **limits) as engine, asyncio.TaskGroup() as tasks:
            pace = engine._loop._pace
            gone = tasks.create_task(said(engine, range(3, 403), 2, "gone"))
            await settle()
            assert engine.statistics().steps_in_flight == 2
            assert engine.abort("gone")
            for _ in range(2):
                runner.finish_step()
                await settle()
            assert await gone == []
            assert pace.budget(is_decoding=True) == 64
            assert engine.statistics().prefill_s == 0.0
            stays = tasks.create_task(said(engine, range(3, 103), 1, "stays"))
            await settle()
            runner.finish_step()
            await stays
            assert pace.budget(is_decoding=True) == 24

    asyncio.run(main())
