"""The composition root of the server: builds each object once, owns the root task group and the
signals.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import uvloop

from freetoken.assembly import Assembly, Stopped, assemble
from freetoken.config import Config
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.server.application import ServerState, build_application, start
from freetoken.server.http import first_cause
from freetoken.types import Progress

AfterReady = Callable[[str], Awaitable[int | None]]
"""Gets the base URL once the model is served; an int it returns stops the server with that exit
code.
"""

EXIT_OK, EXIT_FAULT, EXIT_CUT_OFF = 0, 1, 3
"""Ended as asked; something broke, or a second signal; replies still ran at the drain's deadline.
2 is for wrong settings: the command line's.
"""
_SECOND_SIGNAL_S = 1.0
"""A later signal is a person who will not wait; sooner, it is one signal to a process group."""

log = logging.getLogger("freetoken")


def run(
    config: Config, *, progress: Progress | None = None, after_ready: AfterReady | None = None
) -> int:
    """Serve until a signal, a fault or `after_ready` says so. Returns the process's exit code.

    Raises ConfigError or WeightError if the start fails.
    """
    # A thread that computes returns the interpreter lock after 0.2 ms instead of 5: the loop's own
    # delay.
    sys.setswitchinterval(0.0002)
    return uvloop.run(Server(config, progress or Progress()).run(after_ready))


class Server:
    """One served model in one process. Owns the listening socket, the engine and the exit code."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._state = ServerState(progress)
        self._stop = asyncio.Event()
        self._is_stopping = threading.Event()
        self._exit_code = EXIT_OK
        self._stop_asked_at = 0.0
        self._time = time.monotonic

    async def run(self, after_ready: AfterReady | None) -> int:
        """Bind, load, serve, drain, close. The socket answers `/health` while the model loads."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._request_stop)
        server = self._config.server
        async with AsyncExitStack() as stack:
            application = build_application(self._state, server)
            runner, port = await start(application, server.host, server.port)
            stack.push_async_callback(runner.cleanup)
            assembly = await self._load(stack)
            if assembly is not None:
                # What was loaded lives as long as the process. A full collection would walk its
                # 200k objects in the loop: 105 ms (demo model, EPYC, December 2026).
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
                await self._serve(assembly, port, after_ready)
        return self._exit_code

    async def _load(self, stack: AsyncExitStack) -> Assembly | None:
        progress = self._state.progress
        progress.phase = "loading"
        try:
            return await stack.enter_async_context(
                assemble(self._config, progress, self._is_stopping.is_set)
            )
        except Stopped:
            return None
        except FreeTokenError as error:
            progress.phase, progress.error = "error", str(error)
            raise
        except OSError as error:
            text = (
                f"expected readable files, got {error.strerror or error} for {error.filename};"
                " check --model, --cache-dir and the rights of that file"
            )
            progress.phase, progress.error = "error", text
            raise ConfigError(text) from error

    async def _serve(self, assembly: Assembly, port: int, after_ready: AfterReady | None) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(assembly.engine.run(), name="engine"),
                    tasks.create_task(self._state.loop_lag.run(), name="loop-lag"),
                ]
                self._state.serve(assembly.text, assembly.sampling_defaults, assembly.aliases)
                host = self._config.server.host
                print(f"API server is ready to serve on {host}:{port}", flush=True)  # noqa: T201
                if after_ready is not None:
                    first_chat = self._after_ready(after_ready, f"http://{_reachable(host)}:{port}")
                    running.append(tasks.create_task(first_chat, name="after-ready"))
                await self._stop.wait()
                await self._drain(assembly)
                for task in running:
                    task.cancel()
        except* Exception as group:  # the process's edge: logged, then it ends
            error = first_cause(group)
            self._state.progress.phase, self._state.progress.error = "error", str(error)
            is_told = isinstance(error, FreeTokenError)  # else the log must show where it was
            log.critical("the engine stopped: %s", error, exc_info=None if is_told else error)
            self._exit_code = EXIT_FAULT

    async def _drain(self, assembly: Assembly) -> None:
        seconds = self._config.server.drain_s
        if not await assembly.engine.drain(seconds):
            log.warning("requests still ran after %g s and were ended", seconds)
            self._exit_code = self._exit_code or EXIT_CUT_OFF

    async def _after_ready(self, after_ready: AfterReady, url: str) -> None:
        code = await after_ready(url)
        if code is not None:
            self._exit_code = code
            self._request_stop()

    def _request_stop(self) -> None:
        now = self._time()
        if not self._is_stopping.is_set():
            self._stop_asked_at = now
        elif now - self._stop_asked_at > _SECOND_SIGNAL_S:
            log.warning("second signal: leaving at once")
            os._exit(EXIT_FAULT)
        self._is_stopping.set()
        self._stop.set()


def _reachable(host: str) -> str:
    """An address that a client on this machine can use for a listening address."""
    if host in {"0.0.0.0", "::"}:
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
