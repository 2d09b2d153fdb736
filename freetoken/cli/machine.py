"""What `ft doctor` finds on this machine. Looks; judges nothing."""

from __future__ import annotations

import ctypes
import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from freetoken.config import Config
from freetoken.device.host import available_ram_bytes
from freetoken.native import ABI, FOLDER, LIBRARY, Cpu

PIN_BYTES = 256 << 20
"""How much is pinned to see whether it can be: a double-buffered expert layer of a large model."""

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""There if a GPU's driver is, under WSL the last."""

_CUDA_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    pin_error: str | None
    """Why PIN_BYTES of RAM could not be pinned; None: they were."""


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch. `error`: why it cannot be imported."""

    version: str
    cuda: str | None = None
    """Release of its CUDA libraries; None: built without."""
    architectures: tuple[str, ...] = ()
    gpu: Gpu | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The library beside the package: its fastest instruction set here, or why it is not used."""

    isa: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of this machine. None: not there."""

    python: tuple[int, ...]
    has_driver: bool
    """Whether there is a sign of an NVIDIA driver."""
    driver_cuda: tuple[int, int] | None
    """Newest CUDA that the driver runs; None if it does not answer."""
    torch: Torch
    triton: str | None
    native: NativeLibrary
    compiler: str | None
    c_compiler: str | None
    ram_bytes: int
    cache: Path
    disk_bytes: int | None
    """Free for the cache folder; None if it cannot be made."""
    port_error: str | None


def look(config: Config) -> Machine:
    """Find everything out. Imports torch, which takes seconds; pins PIN_BYTES for a moment if there
    is a GPU.
    """
    cache = Path(config.model.cache_dir)
    return Machine(
        python=tuple(sys.version_info[:3]),
        has_driver=any(path.exists() for path in _DRIVER_FILES),
        driver_cuda=_driver_cuda(),
        torch=_torch(),
        triton=_version("triton"),
        native=_native(),
        compiler=_first("g++", "clang++", "c++"),
        c_compiler=_first("gcc", "clang", "cc"),
        ram_bytes=available_ram_bytes(),
        cache=cache,
        disk_bytes=_disk_bytes(cache),
        port_error=_port_error(config.server.host, config.server.port),
    )


def _first(*names: str) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver_cuda() -> tuple[int, int] | None:
    for name in _CUDA_LIBRARIES:
        number = ctypes.c_int(0)
        try:
            status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if status == 0 and number.value:
            return number.value // 1000, number.value % 1000 // 10
    return None


def _torch() -> Torch:
    found = _version("torch")
    if found is None:
        return Torch("", error="not installed")
    try:
        import torch
    except (ImportError, OSError) as error:
        return Torch(found, error=str(error).splitlines()[0])
    cuda = torch.version.cuda
    if not torch.cuda.is_available():
        return Torch(torch.__version__, cuda)
    try:
        free, total = torch.cuda.mem_get_info()
        gpu = Gpu(
            torch.cuda.get_device_name(),
            torch.cuda.get_device_capability(),
            free,
            total,
            _pin_error(),
        )
    except RuntimeError as error:
        return Torch(torch.__version__, cuda, error=str(error).splitlines()[0])
    return Torch(torch.__version__, cuda, tuple(torch.cuda.get_arch_list()), gpu)


def _pin_error() -> str | None:
    import torch

    try:
        torch.empty(PIN_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _native() -> NativeLibrary:
    path = FOLDER / LIBRARY
    if not path.exists():
        return NativeLibrary(None, f"{path} is missing")
    try:
        library = ctypes.CDLL(str(path))
        abi = int(library.ft_abi())
        features = Cpu(library.ft_cpu_features())
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, f"{path} cannot be used: {error}")
    if abi != ABI:
        return NativeLibrary(None, f"expected interface {ABI} of {path}, got {abi}")
    if Cpu.AVX512 in features:
        return NativeLibrary("AVX512")
    has_avx2 = Cpu.AVX2 in features and Cpu.FMA in features and Cpu.F16C in features
    return NativeLibrary("AVX2" if has_avx2 else f"baseline {platform.machine()}")


def _disk_bytes(folder: Path) -> int | None:
    """Free bytes where `folder` is or would be made."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _port_error(host: str, port: int) -> str | None:
    """Why nobody can listen there now; None if somebody can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None
