"""The server's life: ready line, signals, drain, faults, exit codes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from freetoken import app, assembly
from freetoken.app import EXIT_CUT_OFF, EXIT_FAULT, EXIT_OK
from freetoken.assembly import Assembly, IsStopping, Stopped
from freetoken.config import Config
from freetoken.engine.fake import ScriptRunner
from freetoken.engine.request import StepResult
from freetoken.errors import ConfigError, DeviceError
from freetoken.types import Progress
from tests.app.scripted import Served, chat, fake_config, script, serve
from tests.server.serving import ScriptedFault

SLOW = {"text": "0123456789", "delay_ms": 5}


def events(text: str) -> list[str]:
    """Payloads of a stream."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def content(payloads: list[str]) -> str:
    """Text of a streamed chat."""
    chunks = [json.loads(p) for p in payloads if p != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if "choices" in c)


def test_process_prints_ready_line_finishes_stream_on_sigterm_and_exits_0(tmp_path: Path) -> None:
    """A stop that cuts running replies, takes new ones, hangs, or is reported as a failure."""
    path = script(tmp_path, {"text": "0123456789" * 3, "delay_ms": 20})
    command = [sys.executable, "-m", "freetoken", "serve", "--fake", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith("API server is ready to serve on 127.0.0.1:")
    url = f"http://127.0.0.1:{line.rsplit(':', 1)[1].strip()}/v1/chat/completions"

    async def main() -> tuple[str, int]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=chat(stream=True)) as response,
        ):
            first = await response.content.readany()
            process.send_signal(signal.SIGTERM)
            rest = first + await response.content.readuntil(b"5")
            async with session.post(url, json=chat()) as refused:
                status = refused.status
            return (rest + await response.read()).decode(), status

    text, status = asyncio.run(main())
    assert content(events(text)) == "0123456789" * 3
    assert events(text)[-1] == "[DONE]"
    assert status == 503
    out, errors = process.communicate(timeout=10)
    assert (process.returncode, out) == (EXIT_OK, "")
    assert "Traceback" not in errors


def test_after_ready_stops_the_server_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make smoke` that exits 0 whatever the answer was."""

    async def client(url: str) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            assert (response.status, (await response.json())["status"]) == (200, "ok")
        return 7

    assert app.run(fake_config(script(tmp_path, {"text": "x"})), after_ready=client) == 7
    assert capsys.readouterr().out.startswith("API server is ready to serve on 127.0.0.1:")


def test_replies_cut_off_at_the_drain_deadline_show_in_the_exit_code(tmp_path: Path) -> None:
    """A shutdown that waits for ever for a long reply, or hides that it cut one."""
    got: list[str] = []

    async def client(served: Served) -> None:
        body = chat(stream=True, ignore_eos=True, max_tokens=2000)
        async with served.session.post(f"{served.url}/v1/chat/completions", json=body) as response:
            got.append((await response.content.readany()).decode())
            os.kill(os.getpid(), signal.SIGINT)
            got.append((await response.read()).decode())

    assert serve(script(tmp_path, SLOW), client, drain_s=0.05) == EXIT_CUT_OFF
    last = json.loads(events("".join(got))[-1])
    assert "closing" in last["error"]["message"]


@pytest.mark.parametrize("fault", [DeviceError("device lost"), ScriptedFault("a bug")], ids=repr)
def test_engine_fault_ends_streams_with_an_error_event_and_the_process_with_1(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R36: the server goes on after its engine died, or its clients wait for ever."""
    whole_wait = ScriptRunner.wait

    async def wait(runner: ScriptRunner, number: int) -> StepResult:
        if number == 4:
            raise fault
        return await whole_wait(runner, number)

    monkeypatch.setattr(ScriptRunner, "wait", wait)
    ends: list[str] = []

    async def one(served: Served, *, is_stream: bool) -> None:
        body = chat(stream=is_stream)
        async with served.session.post(f"{served.url}/v1/chat/completions", json=body) as response:
            text = await response.text()
            assert response.status == (200 if is_stream else 500)
            ends.append(json.loads(events(text)[-1] if is_stream else text)["error"]["message"])
        text_model = served.server._state.text
        assert text_model is not None
        assert text_model.engine.fault is not None

    async def client(served: Served) -> None:
        async with asyncio.TaskGroup() as tasks:
            for is_stream in (True, False):
                tasks.create_task(one(served, is_stream=is_stream))

    assert serve(script(tmp_path, SLOW), client) == EXIT_FAULT
    assert len(ends) == 2
    assert all("the engine stopped after a fault" in end for end in ends)


def test_health_is_error_after_a_fault(tmp_path: Path) -> None:
    """R36: a monitor that sees a healthy server whose engine is dead."""

    async def client(served: Served) -> None:
        text = served.server._state.text
        assert text is not None
        text.engine.fault = DeviceError("device lost")  # pyright: ignore[reportAttributeAccessIssue]
        async with served.session.get(f"{served.url}/health") as response:
            answer = await response.json()
            assert (response.status, answer["status"]) == (500, "error")
            assert "device lost" in answer["error"]

    assert serve(script(tmp_path, {"text": "x"}), client) == EXIT_OK


def test_second_signal_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person whose second Ctrl-C is swallowed by a drain of 30 seconds."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    async def client(served: Served) -> None:
        clock = [100.0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.server, "_time", lambda: clock[0])
            for clock[0], expected in ((100.0, []), (100.5, []), (101.6, [EXIT_FAULT])):
                served.server._request_stop()
                assert codes == expected

    assert serve(script(tmp_path, {"text": "x"}), client) == EXIT_OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_while_loading_gives_the_start_up(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C that waits until minutes of loading are over, or serves after all."""
    seen: list[tuple[int, dict[str, object]]] = []
    loaded = asyncio.Event()

    @asynccontextmanager
    async def slow_assemble(
        config: Config, progress: Progress, is_stopping: IsStopping
    ) -> AsyncGenerator[Assembly, None]:
        progress.step, progress.done_bytes, progress.total_bytes = "loading weights", 3, 9
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/health") as response:
                seen.append((response.status, await response.json()))
            async with session.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=chat()
            ) as response:
                seen.append((response.status, await response.json()))
                assert int(response.headers["Retry-After"]) > 0
        os.kill(os.getpid(), number)
        while not is_stopping():  # noqa: ASYNC110 - as the weight reader does between tensors
            await asyncio.sleep(0)
        raise Stopped("the start was interrupted")
        yield  # an async generator

    monkeypatch.setattr(app, "assemble", slow_assemble)

    async def client(_served: Served) -> None:
        loaded.set()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert serve(script(tmp_path, {"text": "x"}), client, port=port) == EXIT_OK
    assert not loaded.is_set()
    (health_status, health), (chat_status, refused) = seen
    assert (health_status, health["status"], health["phase"]) == (503, "loading", "loading")
    assert (health["step"], health["done_bytes"], health["total_bytes"]) == (
        "loading weights",
        3,
        9,
    )
    assert (chat_status, refused["error"]["code"]) == (503, "model_loading")  # pyright: ignore


def test_collector_leaves_the_loaded_model_alone(tmp_path: Path) -> None:
    """A stall of a tenth of a second in every stream, whenever Python collects everything."""
    found: list[int] = []

    async def client(_served: Served) -> None:
        found.append(gc.get_freeze_count())

    assert serve(script(tmp_path, {"text": "x"}), client) == EXIT_OK
    assert found[0] > 10_000
    assert gc.get_freeze_count() == 0


def test_port_in_use_is_a_wrong_setting(tmp_path: Path) -> None:
    """A second server that loads for minutes and then dies with a traceback."""

    async def client(_served: Served) -> None:
        raise AssertionError("served on a port of somebody else's")

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=r"--port: expected a free port on 127\.0\.0\.1"):
            serve(script(tmp_path, {"text": "x"}), client, port=other.getsockname()[1])


def test_unreadable_file_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback for a model whose files somebody else owns."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "weights.gguf")

    async def client(_served: Served) -> None:
        raise AssertionError("served without weights")

    monkeypatch.setattr(assembly, "read_script", refuse)
    with pytest.raises(ConfigError, match=r"got Permission denied for weights\.gguf; check"):
        serve(script(tmp_path, {"text": "x"}), client)
