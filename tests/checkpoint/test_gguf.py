"""The GGUF reader: right values, and damage reported before anything is used."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from freetoken.checkpoint.gguf import open_gguf
from freetoken.checkpoint.gguf_header import TYPES
from freetoken.errors import WeightError
from tests.checkpoint.gguf_files import dense_model, random_blocks, read_by_oracle, write_gguf


def opened_error(path: Path) -> str:
    """The text of the error that opening `path` ends in."""
    with pytest.raises(WeightError) as caught:
        open_gguf(path)
    return str(caught.value)


def header_bytes(*, version: int = 3, tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    """A header with any counts, true or not."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def text(value: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_line(name: str, dims: tuple[int, ...], type_id: int, offset: int = 0) -> bytes:
    """A line of the tensor list with any content, true or not."""
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", type_id, offset)


def test_read_every_tensor_equals_gguf_py(tmp_path: Path) -> None:
    """Catches wrong offsets, reversed shapes and a mixed-up format in a file of several types."""
    path = write_gguf(
        tmp_path / "a.gguf",
        {
            "odd": np.arange(3, dtype=np.float32),
            "half": np.arange(10, dtype=np.float16).reshape(2, 5),
            "q8": (random_blocks("Q8_0", (3, 64)), "Q8_0"),
            "q6": (random_blocks("Q6_K", (2, 2, 512)), "Q6_K"),
            "counts": np.array([[1, 2], [3, 4]], dtype=np.int32),
        },
    )
    source = open_gguf(path)
    assert source.tensors["q6"].shape == (2, 2, 512)
    assert source.tensors["q6"].format == "Q6_K"
    for name, tensor in source.tensors.items():
        got = source.read(name, torch.float32)
        assert tuple(got.shape) == tensor.shape
        want = np.arange(1, 5).reshape(2, 2) if name == "counts" else read_by_oracle(path, name)
        assert np.array_equal(got.numpy(), want.reshape(tensor.shape))
    source.close()


def test_metadata_values_are_plain(tmp_path: Path) -> None:
    """Catches numpy values or bytes in metadata, which JSON and templates cannot take."""
    metadata = {
        "a.text": "naïve <|x|>",
        "a.flag": True,
        "a.count": 7,
        "a.ratio": 0.5,
        "a.words": ["x", "", "é"],
        "a.numbers": [3, 1, 2],
    }
    source = open_gguf(write_gguf(tmp_path / "a.gguf", {}, metadata))
    assert {key: source.metadata[key] for key in metadata} == metadata
    assert type(source.metadata["a.flag"]) is bool
    assert type(source.metadata["a.count"]) is int
    source.close()


def test_read_returns_own_memory(tmp_path: Path) -> None:
    """Catches a tensor that aliases the file: writing to it must not be seen by the next read."""
    source = open_gguf(write_gguf(tmp_path / "a.gguf", {"w": np.ones(4, dtype=np.float32)}))
    source.read("w", torch.float32).zero_()
    assert source.read("w", torch.float32).tolist() == [1, 1, 1, 1]
    source.close()


def test_read_from_eight_threads_gives_the_same(tmp_path: Path) -> None:
    """Catches a shared file position."""
    arrays = {f"w{i}": np.full((64, 64), i, dtype=np.float32) for i in range(32)}
    source = open_gguf(write_gguf(tmp_path / "a.gguf", arrays))
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda name: source.read(name, torch.float32), list(arrays) * 4)
    for name, tensor in zip(list(arrays) * 4, found, strict=True):
        assert np.array_equal(tensor.numpy(), arrays[name])
    source.close()


def test_read_unknown_name_says_which_file(tmp_path: Path) -> None:
    """Catches a bare KeyError (H06)."""
    source = open_gguf(write_gguf(tmp_path / "a.gguf", {"w": np.ones(4, dtype=np.float32)}))
    with pytest.raises(WeightError, match=r"'v' in .*a\.gguf"):
        source.read("v", torch.float32)
    source.close()


def test_read_of_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    """Catches a bus fault, or stale bytes, when a file is replaced while the model loads."""
    path = write_gguf(tmp_path / "a.gguf", {"w": np.ones(4096, dtype=np.float32)})
    source = open_gguf(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(WeightError, match="'w' misses 100 of 16384 bytes"):
        source.read("w", torch.float32)
    source.close()


def test_truncated_gguf_names_file_tensor_and_missing_bytes(tmp_path: Path) -> None:
    """R19: a download that stopped must be refused when opened, with how much is missing."""
    path = dense_model(tmp_path / "model.gguf")
    whole = path.stat().st_size
    source = open_gguf(path)
    last = list(source.tensors)[-1]
    source.close()
    path.write_bytes(path.read_bytes()[:-1000])
    message = opened_error(path)
    assert f"expected {whole} bytes, got {whole - 1000}, 1000 bytes are missing" in message
    assert "model.gguf" in message
    assert last in message


@pytest.mark.parametrize("keep", [5, 23, 40, 200, 330])
def test_gguf_cut_inside_its_header_is_called_cut_short(tmp_path: Path, keep: int) -> None:
    """R19: a struct error or an index error must never leave the parser."""
    path = dense_model(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    message = opened_error(path)
    assert "cut short inside its header" in message
    assert f"ends at byte {keep}" in message


def test_first_part_of_a_cut_file_says_join_the_pieces(tmp_path: Path) -> None:
    """R19: `.part1of2` has a good header and only half of the data."""
    content = dense_model(tmp_path / "model.gguf").read_bytes()
    first, second = tmp_path / "model.gguf.part1of2", tmp_path / "model.gguf.part2of2"
    first.write_bytes(content[: len(content) // 2])
    second.write_bytes(content[len(content) // 2 :])
    assert "cut short" in opened_error(first)
    assert "join the pieces" in opened_error(first)
    assert "expected a GGUF file" in opened_error(second)
    assert "join the pieces" in opened_error(second)


@pytest.mark.parametrize(
    ("content", "meaning"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
        (b"\n <HTML><head>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"", "an empty file"),
        (bytes(4096), "begins with zeros"),
        (b"PK\x03\x04junk", "zip archive"),
        (b"junkjunkjunk", "begins with b'junkjunk'"),
    ],
    ids=["html", "html-late", "lfs", "empty", "zeros", "zip", "junk"],
)
def test_html_page_saved_as_weights_is_named(tmp_path: Path, content: bytes, meaning: str) -> None:
    """R19: an error page with the model's name must be called what it is."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = opened_error(path)
    assert meaning in message
    assert "model.gguf" in message


def test_complete_moe_gguf_is_not_called_truncated(tmp_path: Path) -> None:
    """R20: a file without dense feed-forward tensors is whole; the container asks for no name."""
    experts = random_blocks("Q4_K", (4, 8, 256))
    path = write_gguf(
        tmp_path / "moe.gguf",
        {
            "blk.0.ffn_gate_inp.weight": np.ones((4, 256), dtype=np.float32),
            "blk.0.ffn_up_exps.weight": (experts, "Q4_K"),
        },
        architecture="some-new-architecture",
    )
    source = open_gguf(path)
    assert source.tensors["blk.0.ffn_up_exps.weight"].shape == (4, 8, 256)
    assert source.metadata["general.architecture"] == "some-new-architecture"
    source.close()


@pytest.mark.parametrize(
    ("type_id", "label"), [(23, "IQ4_XS"), (10, "Q2_K"), (39, "MXFP4"), (99, "number 99")]
)
def test_unreadable_tensor_type_is_one_line_with_its_name(
    tmp_path: Path, type_id: int, label: str
) -> None:
    """R21: what it is and what is supported, instead of a traceback."""
    path = tmp_path / "model.gguf"
    line = tensor_line("blk.0.ffn_up.weight", (256, 2), type_id)
    path.write_bytes(header_bytes(tensors=1, rest=line) + bytes(4096))
    message = opened_error(path)
    assert "\n" not in message
    assert f"'blk.0.ffn_up.weight' in {path} has type {label}" in message
    assert "Q4_K" in message


def test_type_numbers_equal_gguf_py() -> None:
    """Catches a shifted row in the table of types: Q5_K read as Q6_K."""
    known = {t.value: t.name for t in GGMLQuantizationType}
    common = known.keys() & TYPES.keys()
    assert len(common) >= 30
    assert {number: known[number] for number in common} == {n: TYPES[n] for n in common}


@pytest.mark.parametrize(
    ("content", "meaning"),
    [
        (header_bytes(version=1), "expected GGUF version 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file"),
        (header_bytes(tensors=1 << 60), "cut short inside its header"),
        (header_bytes(pairs=1 << 60), "cut short inside its header"),
        (header_bytes(pairs=1, rest=text("k") + struct.pack("<I", 77)), "unknown value type 77"),
        (
            header_bytes(pairs=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 1 << 50)),
            "'k' needs at least",
        ),
        (
            header_bytes(pairs=2, rest=2 * (text("k") + struct.pack("<IB", 0, 1))),
            "'k' appears twice",
        ),
        (
            header_bytes(
                pairs=1, rest=text("general.alignment") + struct.pack("<II", 4, 24)
            ),
            "expected a power of two as general.alignment, got 24",
        ),
        (header_bytes(tensors=2, rest=2 * tensor_line("w", (1,), 0)), "'w' appears twice"),
        (header_bytes(tensors=1, rest=tensor_line("w", (1,) * 5, 0)), "has 5 dimensions"),
        (header_bytes(tensors=1, rest=tensor_line("w", (48, 2), 2)), "multiple of 32"),
        (header_bytes(tensors=1, rest=tensor_line("w", (4,), 0, 1 << 62)), "bytes are missing"),
        (header_bytes(tensors=1, rest=tensor_line("w", (1 << 62, 4), 0)), "bytes are missing"),
    ],
    ids=[
        "version-1", "big-endian", "tensor-count", "pair-count", "value-type", "array-count",
        "key-twice", "alignment", "tensor-twice", "dimensions", "row-length", "offset", "size",
    ],
)  # fmt: skip
def test_damaged_header_is_a_weight_error(tmp_path: Path, content: bytes, meaning: str) -> None:
    """Catches a traceback, a huge allocation or a wrong read from numbers that cannot be true."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content + bytes(64))
    message = opened_error(path)
    assert meaning in message
    assert str(path) in message


def test_version_2_is_read(tmp_path: Path) -> None:
    """Catches a refusal of older files, whose layout is the same."""
    path = write_gguf(tmp_path / "a.gguf", {"w": np.ones(4, dtype=np.float32)})
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)
    source = open_gguf(path)
    assert source.read("w", torch.float32).tolist() == [1, 1, 1, 1]
    source.close()


def split_model(folder: Path) -> list[Path]:
    """Three pieces of one tensor each."""
    pieces = []
    for number in range(3):
        path = folder / f"m-{number + 1:05d}-of-00003.gguf"
        metadata = {"split.no": number, "split.count": 3, "own.number": number}
        array = np.full(4, number, dtype=np.float32)
        pieces.append(write_gguf(path, {f"w{number}": array}, metadata))
    return pieces


@pytest.mark.parametrize("given", [0, 2])
def test_split_file_is_read_from_any_piece(tmp_path: Path, given: int) -> None:
    """Catches a loader that sees only the piece it was given."""
    source = open_gguf(split_model(tmp_path)[given])
    assert [source.read(f"w{i}", torch.float32)[0].item() for i in range(3)] == [0, 1, 2]
    assert source.metadata["own.number"] == 0
    source.close()


def test_split_file_with_a_missing_piece_names_it(tmp_path: Path) -> None:
    """Catches half a model being served, or a missing tensor reported instead of a missing file."""
    pieces = split_model(tmp_path)
    pieces[1].unlink()
    message = opened_error(pieces[0])
    assert "1 of 3 pieces missing" in message
    assert pieces[1].name in message


def test_split_file_under_wrong_names_is_refused(tmp_path: Path) -> None:
    """Catches pieces whose names were swapped, or a single piece renamed to look whole."""
    pieces = split_model(tmp_path)
    pieces[1].rename(tmp_path / "whole.gguf")
    assert "got piece 1 (from 0) of 3" in opened_error(tmp_path / "whole.gguf")


def test_missing_and_unreadable_paths_are_weight_errors(tmp_path: Path) -> None:
    """Catches a raw FileNotFoundError or IsADirectoryError at start."""
    assert "cannot open" in opened_error(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "folder.gguf" in opened_error(tmp_path / "folder.gguf")
