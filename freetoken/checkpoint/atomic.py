"""Files that appear whole or not at all, and one process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from freetoken.errors import WeightError

_RETRY_S = 0.2
"""Between two looks at a lock somebody else holds. Longer delays the second starter, shorter only
burns."""

_SPARE_BYTES = 64 << 20
"""Kept free beside what is written: a disk filled to the last byte breaks other programs."""


@contextmanager
def write_whole(target: Path) -> Generator[BinaryIO]:
    """Give a file to write; at the end it is on the disk and becomes `target`, on any error it is
    removed.

    Blocks on the disk. Raises WeightError if the disk is full or the folder cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        staged = Path(name)
        try:
            with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
                yield file
                file.flush()
                os.fsync(file.fileno())
            staged.chmod(0o644)
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise WeightError(
            f"cannot write {target}: {error.strerror or error}{_advice(error)}"
        ) from error


@contextmanager
def locked(folder: Path, report: Callable[[], None]) -> Generator[None]:
    """Hold `folder` against other processes and threads; calls `report` while somebody else holds
    it.

    The lock ends with its holder, however that dies. Blocks; made for worker threads.
    """
    with (folder / ".lock").open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report()
                time.sleep(_RETRY_S)
        yield


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise WeightError if `folder` has no room for `needed_bytes` more."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise WeightError(
            f"expected {(needed_bytes + _SPARE_BYTES) >> 20} MiB free in {folder}, got"
            f" {free >> 20} MiB;"
            " make room or choose another cache folder"
        )


def _advice(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "; make room or choose another cache folder"
    return "; choose a cache folder that can be written"
