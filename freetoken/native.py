"""The native library through ctypes: threads, unpacking, and the decode operations for a CPU.

Knows addresses and sizes, no tensors: callers pass `data_ptr()` and keep the memory alive for the
length of the call. Every call frees the interpreter lock while it runs. A wrong address crashes the
process, so callers check shapes and contiguity first.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum, IntFlag
from pathlib import Path

LOG = logging.getLogger(__name__)

ABI = 1
"""Must equal FT_ABI of native/freetoken.h."""

FOLDER = Path(__file__).parent / "_native"
LIBRARY = "libfreetoken.dylib" if sys.platform == "darwin" else "libfreetoken.so"

SPIN_US = 20
"""How long an idle thread looks for work. Below 10 the operations of one layer each pay a wake-up
(about 30 us on the 2-core EPYC machine); above 100 it takes the core that the event loop and
torch's own threads want."""


class NativeError(RuntimeError):
    """The library refused a call: a mistake of ours, not of a client. Text is the library's own."""


class Isa(IntEnum):
    """Instruction sets the library was compiled for; each includes those before it."""

    BEST = -1
    BASELINE = 0
    AVX2 = 1
    AVX512 = 2


class Cpu(IntFlag):
    """What this CPU can do."""

    AVX2 = 1
    FMA = 2
    F16C = 4
    AVX512 = 8
    AVX512_BF16 = 16
    AVX512_VNNI = 32
    AMX_BF16 = 64


class Type(IntEnum):
    """Element types of weights, KV and unpacked values."""

    F32 = 0
    BF16 = 1


class Format(IntEnum):
    """Packed formats, numbered as in GGUF."""

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14


class _PoolOptions(ctypes.Structure):
    _fields_ = (
        ("threads", c_int32), ("isa", c_int32), ("spin_us", c_int32), ("pin", c_int32),
    )  # fmt: skip


class Unpack(ctypes.Structure):
    """Unpack `elements` values (whole blocks) of `format` from address `packed` to `out`, which is
    of `type`.

    F32 is bit-equal to gguf-py; BF16 rounds that to nearest even.
    """

    _fields_ = (
        ("format", c_int32), ("type", c_int32), ("elements", c_int64), ("packed", c_void_p), ("out",
        c_void_p),
    )  # fmt: skip


class Linear(ctypes.Structure):
    """out[tokens, rows] = x[tokens, columns] @ weight[rows, columns].T; x and out fp32, `weight` of
    `type`, all contiguous.

    Made for few tokens; a token's result is the same bit for bit whatever shares the call.
    """

    _fields_ = (
        ("type", c_int32), ("_reserved", c_int32), ("tokens", c_int64), ("rows", c_int64),
        ("columns", c_int64), ("x", c_void_p), ("weight", c_void_p), ("out", c_void_p),
    )  # fmt: skip


class Moe(ctypes.Structure):
    """The whole expert part of a layer for few tokens: gate, up, SiLU, product, down, weighted sum.

    x, out          [tokens, hidden] fp32
    expert_ids      [tokens, top_k] int64, each in [0, experts)
    expert_weights  [tokens, top_k] fp32
    gate_up         [experts, 2 * inter, hidden] of `type`, gate rows first
    down            [experts, hidden, inter] of `type`
    An expert that several tokens chose is read once. A token's result is the same bit for bit
    whatever shares the call.
    """

    _fields_ = (
        ("type", c_int32), ("top_k", c_int32),
        ("tokens", c_int64), ("experts", c_int64), ("hidden", c_int64), ("inter", c_int64),
        ("x", c_void_p), ("expert_ids", c_void_p), ("expert_weights", c_void_p),
        ("gate_up", c_void_p), ("down", c_void_p), ("out", c_void_p),
    )  # fmt: skip


class Attention(ctypes.Structure):
    """One query of each sequence over its paged KV; fp32 softmax; grouped heads.

    q, out        [sequences, heads, head_dim] fp32
    keys, values  [slots, kv_heads, head_dim] of `type`; slot = page * page_tokens + offset
    page_table    [sequences, table_columns] int32
    kv_lens       [sequences] int64, each >= 1, the query's own token included
    window        0 sees everything, w only the last w positions
    A sequence's result is the same bit for bit whatever shares the call.
    """

    _fields_ = (
        ("type", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("page_tokens", c_int32), ("window", c_int32),
        ("sequences", c_int64), ("table_columns", c_int64), ("slots", c_int64),
        ("scale", c_float), ("_reserved", c_int32),
        ("q", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("page_table", c_void_p), ("kv_lens", c_void_p), ("out", c_void_p),
    )  # fmt: skip


class Native:
    """Owns the library's threads and working memory; close it, or use `with`.

    One call runs at a time; a second thread waits.
    """

    def __init__(self, library: ctypes.CDLL, *, threads: int, isa: Isa, pin: bool) -> None:
        """Start `threads - 1` threads; the caller of each operation is the last one.

        Raises NativeError if refused.
        """
        self._library = library
        self._pool = c_void_p()
        self.threads = threads
        options = _PoolOptions(threads=threads, isa=isa, spin_us=SPIN_US, pin=pin)
        self._run(library.ft_pool_open, byref(options), byref(self._pool))
        self.isa = Isa(library.ft_pool_isa(self._pool))

    def unpack(self, call: Unpack) -> None:
        self._run(self._library.ft_run_unpack, self._pool, byref(call))

    def linear(self, call: Linear) -> None:
        self._run(self._library.ft_run_linear, self._pool, byref(call))

    def moe(self, call: Moe) -> None:
        self._run(self._library.ft_run_moe, self._pool, byref(call))

    def attention(self, call: Attention) -> None:
        self._run(self._library.ft_run_attention, self._pool, byref(call))

    def close(self) -> None:
        """End and join the threads. No call may be running. Closing twice does nothing."""
        self._library.ft_pool_close(self._pool)
        self._pool = c_void_p()

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _run(function: Callable[..., int], *arguments: object) -> None:
        text = ctypes.create_string_buffer(256)
        if function(*arguments, text, len(text)):
            raise NativeError(text.value.decode())


class Watch:
    """Owns a thread that turns changes of a word of memory into eventfd events; see Completion."""

    def __init__(self, library: ctypes.CDLL, word_address: int, eventfd: int) -> None:
        """Start the thread. The word must stay readable until `close`. Raises NativeError."""
        self._library = library
        self._watch = c_void_p()
        status = library.ft_watch_open(word_address, eventfd, byref(self._watch))
        if status:
            raise NativeError(f"expected a new thread to watch the device, got status {status}")

    def arm(self, number: int) -> None:
        """Say that `number` is going to be written: the thread looks without pause until then."""
        self._library.ft_watch_arm(self._watch, number)

    def seen_ns(self) -> int:
        """When the last change was seen, on the clock of time.monotonic_ns()."""
        return self._library.ft_watch_seen_ns(self._watch)

    def close(self) -> None:
        """End and join the thread. Closing twice does nothing."""
        self._library.ft_watch_close(self._watch)
        self._watch = c_void_p()


def _declare(library: ctypes.CDLL) -> None:
    """Give every function its types, so that a wrong argument is a TypeError and not a crash."""
    library.ft_cpu_features.restype = c_uint32
    library.ft_pool_open.argtypes = [POINTER(_PoolOptions), POINTER(c_void_p), c_char_p, c_size_t]
    library.ft_watch_open.argtypes = [c_void_p, c_int32, POINTER(c_void_p)]
    library.ft_watch_arm.argtypes = [c_void_p, c_uint64]
    library.ft_watch_arm.restype = None
    library.ft_watch_seen_ns.argtypes = [c_void_p]
    library.ft_watch_seen_ns.restype = c_int64
    library.ft_watch_close.argtypes = [c_void_p]
    library.ft_watch_close.restype = None
    library.ft_pool_close.argtypes = [c_void_p]
    library.ft_pool_close.restype = None
    library.ft_pool_isa.argtypes = [c_void_p]
    library.ft_run_unpack.argtypes = [c_void_p, POINTER(Unpack), c_char_p, c_size_t]
    library.ft_run_linear.argtypes = [c_void_p, POINTER(Linear), c_char_p, c_size_t]
    library.ft_run_moe.argtypes = [c_void_p, POINTER(Moe), c_char_p, c_size_t]
    library.ft_run_attention.argtypes = [c_void_p, POINTER(Attention), c_char_p, c_size_t]


def _explain(reason: str) -> None:
    LOG.warning("running on torch alone, slower: %s; install g++ and run `make native`", reason)


def open_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Load the library, or say once in the log why it is not used and return None."""
    path = folder / LIBRARY
    if not path.exists():
        _explain(f"{path} is missing, because no C++ compiler was found at installation")
        return None
    try:
        library = ctypes.CDLL(str(path))
        abi = library.ft_abi()
    except (OSError, AttributeError) as error:
        _explain(f"{path} cannot be used: {error}")
        return None
    if abi != ABI:
        _explain(f"expected interface {ABI} of {path}, got {abi}")
        return None
    _declare(library)
    return library


def cpu_features(library: ctypes.CDLL) -> Cpu:
    """What this CPU can do, as far as the library asks."""
    return Cpu(library.ft_cpu_features())


def usable_cpus() -> int:
    """CPUs this process may run on: containers and `taskset` give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def load(
    *,
    enabled: bool = True,
    threads: int | None = None,
    isa: Isa = Isa.BEST,
    pin: bool = False,
    folder: Path = FOLDER,
) -> Native | None:
    """Load the library and start its threads: `threads` in all (all usable CPUs if None).

    Returns None, after one line in the log, if it is switched off, missing or of another version.
    """
    if not enabled:
        LOG.info("running on torch alone, slower: the native library is switched off")
        return None
    library = open_library(folder)
    if library is None:
        return None
    native = Native(library, threads=threads or usable_cpus(), isa=isa, pin=pin)
    LOG.info("native library: %s, %d threads", native.isa.name, native.threads)
    return native
