"""`ft doctor`: what this machine has for serving a model, and what to do about what it lacks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from freetoken.cli.flags import add_config_flags, read_config
from freetoken.cli.machine import PIN_BYTES, Gpu, Machine, look
from freetoken.cli.main import EXIT_FAULT
from freetoken.config import Config
from freetoken.device.memory_plan import gb

_PYTHONS = ((3, 11), (3, 14))
_OLDEST_GPU = (8, 0)
"""The kernels are compiled for tensor cores of this generation and later."""

_LITTLE_RAM = 2 << 30
"""The demo model takes this much; half runs nothing, double warns machines that serve it well."""

_LITTLE_VRAM = 3 << 30
"""Driver, working memory and the demo model."""

_LITTLE_DISK = 1 << 30
"""Fetching and converting the demo model takes 0.7 GB."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, what was found, and what to do unless it is ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    cure: str = ""

    def as_text(self) -> str:
        """The line, the cure under it."""
        line = f"{self.status:<4}  {self.name:<15}  {self.found}"
        return f"{line}\n{'':<23}{self.cure}" if self.cure else line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all settings: device, cache folder and port are what is looked at."""
    add_config_flags(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Print a line a check. Returns 1 if one failed."""
    config = read_config(arguments)
    checks = list(judge(look(config), config))
    print(*(check.as_text() for check in checks), sep="\n")
    failed = [check.name for check in checks if check.status == "fail"]
    warned = [check.name for check in checks if check.status == "warn"]
    print(f"{len(checks)} checks: {len(failed)} failed, {len(warned)} to look at")
    return EXIT_FAULT if failed else 0


def judge(machine: Machine, config: Config) -> Iterator[Check]:
    """Say of each thing whether it will do for these settings."""
    yield _python(machine)
    yield _torch(machine)
    yield from _gpu_checks(machine, config)
    yield _native(machine)
    yield _compiler(machine)
    yield _ram(machine)
    yield _disk(machine)
    yield _port(machine, config)


def _python(machine: Machine) -> Check:
    found = ".".join(map(str, machine.python))
    lowest, end = _PYTHONS
    if lowest <= machine.python[:2] < end:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "install Python 3.11 to 3.13: make setup PYTHON=...")


def _torch(machine: Machine) -> Check:
    torch = machine.torch
    if torch.error is not None:
        text = f"{torch.version or 'none'}: {torch.error}"
        return Check("torch", "fail", text, "install it anew: make clean && make setup")
    cuda = "without CUDA" if torch.cuda is None else f"with CUDA {torch.cuda}"
    return Check("torch", "ok", f"{torch.version} {cuda}")


def _gpu_checks(machine: Machine, config: Config) -> Iterator[Check]:
    if config.model.device == "cpu":
        yield Check("gpu", "ok", "not looked at: --device cpu")
        return
    if not machine.has_driver and machine.driver_cuda is None:
        if config.model.device == "cuda":
            yield Check(
                "driver",
                "fail",
                "none",
                "install NVIDIA's driver, or in a container pass the GPU through; or --device cpu",
            )
        else:
            yield Check("gpu", "ok", "none: models run on the CPU")
        return
    yield _driver(machine)
    gpu = machine.torch.gpu
    if gpu is None:
        yield Check("gpu", "fail", "torch sees none", _gpu_cure(machine))
        return
    yield _architecture(machine, gpu)
    yield _triton(machine)
    yield _vram(gpu)
    yield _pinned(gpu)


def _driver(machine: Machine) -> Check:
    runs, needs = machine.driver_cuda, machine.torch.cuda
    if runs is None:
        return Check(
            "driver", "fail", "its library does not answer", "install NVIDIA's driver anew"
        )
    found = f"runs CUDA up to {runs[0]}.{runs[1]}"
    if needs is not None and int(needs.split(".")[0]) > runs[0]:
        return Check(
            "driver",
            "fail",
            f"{found}, torch is built with {needs}",
            f"update the driver to one for CUDA {needs}, or install torch for CUDA {runs[0]}",
        )
    return Check("driver", "ok", found)


def _gpu_cure(machine: Machine) -> str:
    if machine.torch.cuda is None:
        return "this torch is built without CUDA: install one with, or use --device cpu"
    return "see the driver's line; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"


def _architecture(machine: Machine, gpu: Gpu) -> Check:
    major, minor = gpu.capability
    found = f"{gpu.name}, compute capability {major}.{minor}"
    if gpu.capability < _OLDEST_GPU:
        cure = "the kernels need compute capability 8.0 (Ampere) or later: use --device cpu"
        return Check("gpu", "fail", found, cure)
    if not runs_on(machine.torch.architectures, gpu.capability):
        built = " ".join(machine.torch.architectures)
        cure = f"install a torch built for sm_{major}{minor}, or use --device cpu"
        return Check("gpu", "fail", f"{found}; torch is built for {built}", cure)
    return Check("gpu", "ok", found)


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for `architectures` (sm_90, compute_80, ...) runs on this GPU: machine code of
    the same generation and no later, or any earlier intermediate code.
    """
    number = capability[0] * 10 + capability[1]
    for name in architectures:
        kind, _, digits = name.partition("_")
        built = int("".join(c for c in digits if c.isdigit()) or 0)
        is_exact = not digits.isdigit()  # sm_90a runs on 9.0 alone
        if kind == "compute" and built <= number:
            return True
        if kind == "sm" and built // 10 == number // 10:
            if is_exact and built == number:
                return True
            if not is_exact and built <= number:
                return True
    return False


def _triton(machine: Machine) -> Check:
    if machine.triton is None:
        return Check("triton", "fail", "none", "pip install 'freetoken[cuda]'")
    if machine.c_compiler is None:
        return Check(
            "triton",
            "fail",
            f"{machine.triton}, without a C compiler for its launchers",
            "install gcc (Debian, Ubuntu: apt install gcc libc6-dev)",
        )
    return Check("triton", "ok", f"{machine.triton}, C compiler {machine.c_compiler}")


def _vram(gpu: Gpu) -> Check:
    found = f"{gb(gpu.free_bytes)} free of {gb(gpu.total_bytes)}"
    if gpu.free_bytes < _LITTLE_VRAM:
        return Check("gpu memory", "warn", found, "end other programs on the GPU; see nvidia-smi")
    return Check("gpu memory", "ok", found)


def _pinned(gpu: Gpu) -> Check:
    if gpu.pin_error is None:
        return Check("pinned memory", "ok", f"{gb(PIN_BYTES)} could be pinned")
    cure = "raise the limit of locked memory (ulimit -l); under WSL give it more memory"
    return Check("pinned memory", "warn", f"{gb(PIN_BYTES)}: {gpu.pin_error}", cure)


def _native(machine: Machine) -> Check:
    native = machine.native
    if native.isa is not None:
        return Check("native library", "ok", f"instruction set {native.isa}")
    cure = "install g++ and run `make native`; until then the CPU computes slower"
    return Check("native library", "warn", native.error or "none", cure)


def _compiler(machine: Machine) -> Check:
    if machine.compiler is not None:
        return Check("c++ compiler", "ok", machine.compiler)
    if machine.native.isa is not None:
        return Check("c++ compiler", "ok", "none; the native library is built already")
    return Check("c++ compiler", "warn", "none", "install g++ (Debian, Ubuntu: apt install g++)")


def _ram(machine: Machine) -> Check:
    found = f"{gb(machine.ram_bytes)} free"
    if machine.ram_bytes < _LITTLE_RAM:
        return Check("ram", "warn", found, "end other programs, or raise the container's limit")
    return Check("ram", "ok", found)


def _disk(machine: Machine) -> Check:
    if machine.disk_bytes is None:
        return Check("disk", "fail", f"{machine.cache} cannot be made", "choose another --cache-dir")
    found = f"{gb(machine.disk_bytes)} free for {machine.cache}"
    if machine.disk_bytes < _LITTLE_DISK:
        return Check("disk", "warn", found, "make room, or choose another --cache-dir")
    return Check("disk", "ok", found)


def _port(machine: Machine, config: Config) -> Check:
    where = f"{config.server.host}:{config.server.port}"
    if machine.port_error is None:
        return Check("port", "ok", f"{where} is free")
    cure = "choose another --port or --host, or end the program that listens there"
    return Check("port", "fail", f"{where}: {machine.port_error}", cure)
