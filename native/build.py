"""Compile the native library with whatever C++ compiler is there. Standard library only; run it by
hand with `make native`.

No compiler is not an error: the package works without the library, slower, and says so when it
starts. Each kernel file is compiled once for every instruction set of the target, and the library
chooses at run time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libfreetoken.dylib" if sys.platform == "darwin" else "libfreetoken.so"

# Exact files promise bit-equality with a reference that rounds after every operation.
KERNELS = {"dense.cpp": "fast", "attention.cpp": "fast", "quant.cpp": "off"}
PLAIN = ["pool.cpp", "watch.cpp", "api.cpp"]
VARIANTS = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        # The two warnings come from GCC 12's own AVX-512 header, once for every use of a reduction.
        "avx512": [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mfma",
            "-mf16c",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
        ],
    },
}
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror=return-type",
]


def machine() -> str:
    """Name the target as in VARIANTS; anything else gets the plain build."""
    name = platform.machine().lower()
    return "x86_64" if name in {"x86_64", "amd64"} else name


def find_compiler() -> list[str] | None:
    """Return the compiler's command, or None. CXX wins, as everywhere."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    found = next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    return [found] if found else None


def compile_steps(compiler: list[str], objects: Path) -> dict[Path, list[str]]:
    """Map each object file to the command that makes it."""

    def ends(source: str, target: Path) -> list[str]:
        return ["-c", str(HERE / source), "-o", str(target)]

    steps: dict[Path, list[str]] = {}
    for source in PLAIN:
        target = objects / f"{source}.o"
        steps[target] = [*compiler, *COMMON, *ends(source, target)]
    for source, contract in KERNELS.items():
        for variant, flags in VARIANTS.get(machine(), {"baseline": []}).items():
            target = objects / f"{source}.{variant}.o"
            extra = [f"-DVARIANT={variant}", f"-ffp-contract={contract}", *flags]
            steps[target] = [*compiler, *COMMON, *extra, *ends(source, target)]
    return steps


def compile_and_link(compiler: list[str], work: Path, library: Path) -> None:
    """Make `library` with intermediate files in the folder `work`."""
    steps = compile_steps(compiler, work)
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for done in [workers.submit(subprocess.run, step, check=True) for step in steps.values()]:
            done.result()
    # The C++ runtime goes inside and stays hidden: torch brings its own, perhaps another release.
    inside = ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
    static = [] if sys.platform == "darwin" else inside
    names = [str(target) for target in steps]
    fresh = work / LIBRARY
    link = [*compiler, "-shared", "-pthread", *static, *names, "-o", str(fresh)]
    subprocess.run(link, check=True)
    fresh.replace(library)  # a process that has the old one mapped keeps it whole


def is_fresh(target: Path) -> bool:
    """True if `target` is newer than every source and than this file."""
    sources = [p for p in HERE.iterdir() if p.suffix in {".cpp", ".h", ".py"}]
    return target.exists() and all(p.stat().st_mtime <= target.stat().st_mtime for p in sources)


def build(out: Path) -> Path | None:
    """Build the library into the folder `out`; return its path, or None without a compiler.

    Raises subprocess.CalledProcessError if a compiler is there and fails: that is a fault to mend,
    not to hide.
    """
    library = out / LIBRARY
    if is_fresh(library):
        return library
    compiler = find_compiler()
    if compiler is None or shutil.which(compiler[0]) is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as work:
        compile_and_link(compiler, Path(work), library)
    return library


def main() -> int:
    """Build into the folder named by --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parent / "freetoken" / "_native")
    library = build(parser.parse_args().out)
    if library is None:
        print(
            "no C++ compiler found (CXX, g++, clang++, c++): the native library is left out; "
            "FreeToken will run on torch alone, slower",
            file=sys.stderr,
        )
    else:
        print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
