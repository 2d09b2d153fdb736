"""The composition root of the server: builds each object once, owns the root task group and the
signals.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import uvloop

from freetoken.assembly import Assembly, Stopped, assemble
from freetoken.config import Config
from freetoken.errors import DeviceError, FreeTokenError
from freetoken.server.application import ServerState, build_application, start
from freetoken.types import Progress

AfterReady = Callable[[str], Awaitable[int | None]]
"""Gets the base URL once the model is served; an int it returns stops the server with that exit
code.
"""

EXIT_OK, EXIT_FAULT = 0, 1
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

    async def _serve(self, assembly: Assembly, port: int, after_ready: AfterReady | None) -> None:
        server = self._config.server
        try:
            async with asyncio.TaskGroup() as tasks:
                steps = tasks.create_task(assembly.engine.run(), name="engine")
                state = self._state
                state.sampling_defaults, state.aliases = (
                    assembly.sampling_defaults,
                    assembly.aliases,
                )
                state.text, state.progress.phase = assembly.text, "ok"
                print(f"API server is ready to serve on {server.host}:{port}", flush=True)  # noqa: T201 - the ready line
                helper = None
                if after_ready is not None:
                    url = f"http://{_reachable(server.host)}:{port}"
                    helper = tasks.create_task(
                        self._after_ready(after_ready, url), name="after-ready"
                    )
                await self._stop.wait()
                if not await assembly.engine.drain(server.drain_s):
                    log.warning("requests still ran after %g s and were ended", server.drain_s)
                if helper is not None:
                    helper.cancel()
                steps.cancel()
        except* DeviceError as group:
            error = group.exceptions[0]
            self._state.progress.phase, self._state.progress.error = "error", str(error)
            log.critical("the engine stopped: %s", error)
            self._exit_code = EXIT_FAULT

    async def _after_ready(self, after_ready: AfterReady, url: str) -> None:
        code = await after_ready(url)
        if code is not None:
            self._exit_code = code
            self._request_stop()

    def _request_stop(self) -> None:
        if self._is_stopping.is_set():
            log.warning("second signal: leaving at once")
            raise SystemExit(EXIT_FAULT)
        self._is_stopping.set()
        self._stop.set()


def _reachable(host: str) -> str:
    """An address that a client on this machine can use for a listening address."""
    if host in {"0.0.0.0", "::"}:
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
