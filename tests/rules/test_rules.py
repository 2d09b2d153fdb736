"""The rules of the house that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import freetoken
import freetoken.kernels
from freetoken.config import load_config
from freetoken.native import LIBRARY
from tests.rules.size import ROOT, broken, count_all, sources

BANNED = {
    *("utils", "util", "helper", "helpers", "misc", "common", "manager", "handler", "processor"),
    *("info", "data", "impl", "base"),
}
BANNED_STARTS = ("do_", "process_", "handle_")


def names_of(path: Path) -> list[str]:
    """Names of a Python file's own functions and classes, and of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, kinds))]


def words_of(name: str) -> list[str]:
    """Lower-case words of a snake_case or CamelCase name."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def is_banned(name: str) -> bool:
    """A name that says nothing: a banned last word, file name or verb."""
    words = words_of(name)
    return bool(words) and (words[-1] in BANNED or name.lstrip("_").startswith(BANNED_STARTS))


def test_sizes_are_within_limits() -> None:
    """Files and functions that grew past what one can read at once."""
    assert [f"{c.kind} {c.number}: {c.where}" for c in broken(count_all())] == []


def test_names_avoid_banned_words() -> None:
    """Names such as utils, manager or handle_x, behind which anything may hide."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if path.suffix == ".py" and path.is_relative_to(ROOT / "freetoken")
        for name in names_of(path)
        if is_banned(name)
    ]
    assert found == []


def test_default_settings_file_states_the_defaults() -> None:
    """A file that shows other values than the ones that hold without it."""
    assert load_config(environ={}, toml=ROOT / "configs" / "default.toml") == load_config(
        environ={}
    )


@pytest.mark.limit(60)
def test_import_contracts_hold() -> None:
    """A module that imports from a row above it, or torch where the fast tests run."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tracked() -> list[Path]:
    """Files git knows or would take; everything readable outside a clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git clone")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_files_carry_no_path_of_a_machine() -> None:
    """Text that works on one machine only: a checkout, a home folder."""
    pattern = re.compile(rb"(^|[^A-Za-z0-9_.-])/(work|farm|root)/")
    found = [str(p.relative_to(ROOT)) for p in tracked() if pattern.search(p.read_bytes())]
    assert found == []


def test_kernels_come_from_the_top_folder() -> None:
    """The bare name `kernels` is a PyPI package; ours must be the folder beside the package."""
    assert freetoken.kernels.__file__ is not None
    assert Path(freetoken.kernels.__file__).resolve() == ROOT / "kernels" / "__init__.py"
    assert Path(str(freetoken.__file__)).resolve().parent == ROOT / "freetoken"


@pytest.mark.limit(120)
def test_wheel_holds_kernels_and_library(tmp_path: Path) -> None:
    """A wheel with a dangling link instead of the kernels, or without the native library."""
    hatchling = pytest.importorskip(
        "hatchling.build", reason="the build tool is not a test dependency"
    )
    del hatchling
    script = f"import hatchling.build as b; print(b.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
    ours = {f"freetoken/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "kernels").glob("*.py")}
    assert ours <= names
    is_built = (ROOT / "freetoken" / "_native" / LIBRARY).exists()
    assert (f"freetoken/_native/{LIBRARY}" in names) == is_built
