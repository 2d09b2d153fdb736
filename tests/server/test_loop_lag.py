"""The loop's lateness, always measured."""

from __future__ import annotations

import asyncio
import time

import uvloop

from freetoken.server.loop_lag import LoopLag


def test_lag_percentiles_are_those_of_the_last_minute() -> None:
    """An old stall that is shown for ever, or a record that grows for ever."""
    lag = LoopLag()
    assert lag.figures().p99_ms == 0.0
    for _ in range(6000):
        lag.note(1.0)
    for i in range(6000):
        lag.note(0.001 if i % 100 else 0.004)
    figures = lag.figures()
    assert (figures.p50_ms, figures.max_ms) == (1.0, 4.0)


def test_lag_is_noted_while_the_loop_runs() -> None:
    """A meter that never looks, or by a clock that stands still while the loop is held up."""

    async def main() -> float:
        lag = LoopLag()
        async with asyncio.TaskGroup() as tasks:
            meter = tasks.create_task(lag.run())
            await asyncio.sleep(0.02)
            time.sleep(0.03)  # noqa: ASYNC251 - the very fault that it is for
            await asyncio.sleep(0.02)
            meter.cancel()
        return lag.figures().max_ms

    assert 15.0 < asyncio.run(main()) < 1000.0
    assert 15.0 < uvloop.run(main()) < 1000.0
