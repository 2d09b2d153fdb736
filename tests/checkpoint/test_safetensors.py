"""Safetensors folders and files: every layout in the field, and damage reported when opened."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from freetoken.checkpoint.safetensors import INDEX, open_safetensors
from freetoken.errors import WeightError

Shards = Mapping[str, Mapping[str, Tensor]]


def tensor(value: float) -> Tensor:
    """A small tensor of one value."""
    return torch.full((2, 3), value, dtype=torch.bfloat16)


def write_shards(folder: Path, shards: Shards, *, index: bool) -> Path:
    """Write files of tensors and, if wanted, their index."""
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
    if index:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def two_shards() -> Shards:
    """The usual pair."""
    return {
        "model-00001-of-00002.safetensors": {"a": tensor(1), "b": tensor(2)},
        "model-00002-of-00002.safetensors": {"c": tensor(3)},
    }


def write_raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    """Write a file with any header, true or not."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def opened_error(path: Path) -> str:
    """The text of the error that opening `path` ends in."""
    with pytest.raises(WeightError) as caught:
        open_safetensors(path)
    return str(caught.value)


def read_all(path: Path) -> dict[str, float]:
    """The value of each tensor."""
    source = open_safetensors(path)
    found = {name: source.read(name, torch.float32)[0, 0].item() for name in source.tensors}
    source.close()
    return found


@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_sharded_folder_is_read(tmp_path: Path, index: bool) -> None:
    """H05: a folder whose index was not downloaded loads as one with it."""
    write_shards(tmp_path, two_shards(), index=index)
    assert read_all(tmp_path) == {"a": 1, "b": 2, "c": 3}


def test_missing_index_with_several_shard_families_reads_all(tmp_path: Path) -> None:
    """H05: a repository without any index and with dense, expert and table files."""
    shards = {
        "dense-00001-of-00002.safetensors": {"a": tensor(1)},
        "dense-00002-of-00002.safetensors": {"b": tensor(2)},
        "experts-layer0.safetensors": {"c": tensor(3)},
        "experts-layer1.safetensors": {"d": tensor(4)},
        "table-00000-of-00001.safetensors": {"e": tensor(5)},
    }
    write_shards(tmp_path, shards, index=False)
    assert read_all(tmp_path) == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}


def test_single_file_by_folder_by_path_and_by_index(tmp_path: Path) -> None:
    """Catches a loader that takes folders only, or an index only by its folder."""
    write_shards(tmp_path, {"model.safetensors": {"a": tensor(1)}}, index=True)
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / INDEX):
        assert read_all(path) == {"a": 1}


def test_index_hides_files_it_does_not_name(tmp_path: Path) -> None:
    """Catches a second copy of the weights, in another naming, being loaded beside the first."""
    write_shards(tmp_path, two_shards(), index=True)
    save_file({"a": tensor(9)}, tmp_path / "consolidated.safetensors")
    assert read_all(tmp_path) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_some_shards_missing_names_them(tmp_path: Path, index: bool) -> None:
    """H06: some missing is not none found; the message has the file and, by the index, a tensor."""
    write_shards(tmp_path, two_shards(), index=index)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    (tmp_path / "model-00002-of-00002.safetensors.part").touch()
    message = opened_error(tmp_path)
    assert "1 of 2 shards missing" in message
    assert "model-00002-of-00002.safetensors" in message
    assert "unfinished downloads" in message
    assert ("'c'" in message) is index


def test_none_found_with_an_index_is_its_own_message(tmp_path: Path) -> None:
    """H06: an index without any of its shards must not be called a gap in their numbers."""
    write_shards(tmp_path, two_shards(), index=True)
    for file in two_shards():
        (tmp_path / file).unlink()
    message = opened_error(tmp_path)
    assert message.startswith("none found of the 2 shards")
    assert "missing that" not in message


@pytest.mark.parametrize(
    ("file", "meaning"),
    [
        ("config.json", "none found: no *.safetensors"),
        ("model-Q4_K_M.gguf", "give the GGUF file itself: model-Q4_K_M.gguf"),
        ("pytorch_model.bin", "pickled weights are not read: pytorch_model.bin"),
        ("model.safetensors.incomplete", "unfinished downloads lie there"),
    ],
)
def test_none_found_says_what_lies_there(tmp_path: Path, file: str, meaning: str) -> None:
    """H06: an empty folder, one of another format and an unfinished one need different advice."""
    (tmp_path / file).touch()
    assert meaning in opened_error(tmp_path)


def test_duplicate_tensor_names_both_files(tmp_path: Path) -> None:
    """Catches the last file silently winning in a folder without an index."""
    shards = {"x.safetensors": {"a": tensor(1)}, "y.safetensors": {"a": tensor(2)}}
    message = opened_error(write_shards(tmp_path, shards, index=False))
    assert "'a'" in message
    assert "x.safetensors" in message
    assert "y.safetensors" in message


def test_index_that_contradicts_its_shards_names_the_tensor(tmp_path: Path) -> None:
    """H06: a tensor deleted from a shard is found when opening, not as a KeyError while serving."""
    write_shards(tmp_path, two_shards(), index=True)
    save_file({"a": tensor(1)}, tmp_path / "model-00001-of-00002.safetensors")
    message = opened_error(tmp_path)
    assert "puts tensor 'b' into model-00001-of-00002.safetensors, but no shard holds it" in message


def test_truncated_shard_names_tensor_and_missing_bytes(tmp_path: Path) -> None:
    """R19: a short file is refused when opened, before any request."""
    write_shards(tmp_path, two_shards(), index=True)
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    message = opened_error(tmp_path)
    assert "5 bytes are missing, from tensor 'b' on" in message
    assert path.name in message


def test_shard_cut_inside_its_header_is_called_cut_short(tmp_path: Path) -> None:
    """R19: half a header is no JSON error."""
    save_file({"a": tensor(1)}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:30])
    assert "cut short inside its header" in opened_error(path)


@pytest.mark.parametrize(
    ("content", "meaning"),
    [
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"", "an empty file"),
        (bytes(64), "begins with zeros"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
    ],
    ids=["html", "lfs", "empty", "zeros", "gguf"],
)
def test_html_page_saved_as_shard_is_named(tmp_path: Path, content: bytes, meaning: str) -> None:
    """R19: an error page saved as weights is called what it is."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = opened_error(tmp_path)
    assert meaning in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("header", "meaning"),
    [
        (b'{"a": nonsense}', "no valid JSON"),
        (b'{"a": {"dtype": "F32"}}', "bad header entry of tensor 'a'"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', "offsets 8..0"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', "offsets -8..0"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "needs 12 bytes"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "8 bytes are missing"),
    ],
    ids=["json", "entry", "reversed", "negative", "size", "bounds"],
)
def test_bad_header_names_file_and_tensor(tmp_path: Path, header: bytes, meaning: str) -> None:
    """Catches offsets used unchecked: a read outside the tensor's own bytes."""
    path = write_raw(tmp_path / "model.safetensors", header, bytes(8))
    message = opened_error(path)
    assert meaning in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("content", "meaning"),
    [
        ("<html>", "an HTML page"),
        ('{"weight_map": {}}', "empty weight_map"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "file names without folders"),
        ("{}", "weight_map"),
    ],
)
def test_bad_index_is_a_weight_error(tmp_path: Path, content: str, meaning: str) -> None:
    """Catches a raw JSON error, and an index that leads out of its folder."""
    (tmp_path / INDEX).write_text(content)
    message = opened_error(tmp_path)
    assert meaning in message
    assert INDEX in message


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
)
def test_read_every_dtype_equals_what_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    """Catches a wrong name or size of a stored type, scalars and empty tensors included."""
    saved = {
        "w": torch.arange(12).reshape(3, 4).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.empty((0, 5), dtype=dtype),
    }
    save_file(saved, tmp_path / "m.safetensors")
    source = open_safetensors(tmp_path)
    for name, want in saved.items():
        assert torch.equal(source.read(name, dtype), want)
    assert torch.equal(source.read("w", torch.float32), saved["w"].float())
    source.close()


def test_fp8_is_listed_and_refused_on_read(tmp_path: Path) -> None:
    """Catches FP8 bytes taken for numbers of another format; other tensors stay readable."""
    saved = {"q": torch.ones(4, dtype=torch.float8_e4m3fn), "s": torch.ones(1)}
    save_file(saved, tmp_path / "m.safetensors")
    source = open_safetensors(tmp_path)
    assert source.tensors["q"].format == "F8_E4M3"
    assert source.read("s", torch.float32).item() == 1
    with pytest.raises(WeightError, match=r"'q' in .* is stored as F8_E4M3"):
        source.read("q", torch.float32)
    source.close()


def test_read_from_threads_and_own_memory(tmp_path: Path) -> None:
    """Catches a shared file position, and a result that aliases another."""
    saved = {f"w{i}": torch.full((50, 50), float(i)) for i in range(16)}
    save_file(saved, tmp_path / "m.safetensors")
    source = open_safetensors(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: source.read(name, torch.float32), list(saved) * 4))
    for name, got in zip(list(saved) * 4, found, strict=True):
        assert torch.equal(got, saved[name])
        got.zero_()
    assert source.read("w3", torch.float32)[0, 0].item() == 3
    source.close()


def test_read_after_close_is_a_weight_error(tmp_path: Path) -> None:
    """Catches a read from a closed, or worse a reused, descriptor."""
    save_file({"a": tensor(1)}, tmp_path / "m.safetensors")
    source = open_safetensors(tmp_path)
    source.close()
    source.close()
    with pytest.raises(WeightError, match="is closed"):
        source.read("a", torch.float32)


def test_nothing_at_the_path_is_a_weight_error(tmp_path: Path) -> None:
    """Catches a raw FileNotFoundError for a mistyped path."""
    assert "found nothing at" in opened_error(tmp_path / "typo")
