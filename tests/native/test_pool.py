"""Threads, loading, and what happens without the library."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from freetoken.native import FOLDER, LIBRARY, Linear, Native, NativeError, Type, load


def call_of(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Linear:
    """A linear call over fp32 tensors."""
    return Linear(
        type=Type.F32,
        tokens=x.shape[0],
        rows=weight.shape[0],
        columns=weight.shape[1],
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
    )


def test_pool_shared_by_two_threads_keeps_their_results_apart(native: Native) -> None:
    """Two operations inside one pool at once, each taking the other's units."""
    weight = torch.randn(4000, 64)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.full((1, 64), float(seed))
        out = torch.empty(1, 4000)
        want = torch.empty(1, 4000)
        native.linear(call_of(x, weight, want))
        for _ in range(200):
            out.fill_(float("nan"))
            native.linear(call_of(x, weight, out))
            if not torch.equal(out, want):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("pin", [False, True], ids=["free", "pinned"])
def test_pool_with_more_threads_than_cpus_finishes(pin: bool) -> None:
    """A thread that wakes after the work is done and holds the caller, or works on the next call's
    data.
    """
    native = load(threads=9, pin=pin)
    assert native is not None
    x, weight, out = torch.ones(1, 32), torch.ones(640, 32), torch.empty(1, 640)
    with native:
        for _ in range(500):
            out.zero_()
            native.linear(call_of(x, weight, out))
            assert bool((out == 32).all())


def test_pool_opened_and_closed_often_leaves_no_threads() -> None:
    """Threads that outlive their pool."""
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(50):
        native = load(threads=3)
        assert native is not None
        native.close()
        native.close()
    assert len(list(Path("/proc/self/task").iterdir())) <= before


def test_pool_with_no_threads_is_refused() -> None:
    """A size of nought from a container without CPUs set."""
    with pytest.raises(NativeError, match="1 to 1024 threads"):
        load(threads=-1)


def test_closed_pool_refuses_calls(native: Native) -> None:
    """Use after close must be an error, not a crash."""
    native.close()
    with pytest.raises(NativeError, match="null pointer"):
        native.linear(Linear())


def test_missing_library_is_said_once_with_its_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An installation without a compiler that is slow without a word."""
    with caplog.at_level(logging.WARNING):
        assert load(folder=tmp_path) is None
    [record] = caplog.records
    assert "slower" in record.getMessage()
    assert "make native" in record.getMessage()


def test_damaged_library_is_refused_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A library of another machine, or an error page saved under its name."""
    (tmp_path / LIBRARY).write_bytes(b"<html>not found</html>")
    with caplog.at_level(logging.WARNING):
        assert load(folder=tmp_path) is None
    assert str(tmp_path) in caplog.text


def test_library_links_neither_torch_nor_python() -> None:
    """One build must fit every torch and every Python."""
    needed = (FOLDER / LIBRARY).read_bytes()
    assert b"libpython" not in needed
    assert b"libtorch" not in needed


def test_switched_off_library_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """A setting that is read and then ignored."""
    with caplog.at_level(logging.INFO):
        assert load(enabled=False) is None
    assert "switched off" in caplog.text
