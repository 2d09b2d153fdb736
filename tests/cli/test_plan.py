"""`ft plan` on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken.cli.main import main
from tests.models.oracle import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixture-of-Experts; no tokenizer, which a plan does not need."""
    path = tmp_path_factory.mktemp("mixtral")
    build("mixtral", path)
    return path


def test_plan_describes_this_machine_and_its_bound(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that needs a GPU, a tokenizer or the weights."""
    assert main(["plan", "--model", str(folder), "--device", "cpu", "--gbps", "30"]) == 0
    out = capsys.readouterr().out
    for words in ("RAM, free", "expert weights", "KV cache", "usable context", "tok/s"):
        assert words in out


def test_plan_for_a_described_gpu_is_json_for_programs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without a GPU that cannot plan for one with."""
    flags = ["--vram", "8", "--ram", "16", "--json", "--max-seq-len", "64"]
    assert main(["plan", "--model", str(folder), *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["dtype"] == "bfloat16"
    assert plan["plan"]["context"] == 64
    assert [m["name"] for m in plan["plan"]["memories"]] == ["GPU memory", "RAM"]


def test_plan_prints_the_spec(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--spec that is accepted and does nothing."""
    assert main(["plan", "--model", str(folder), "--ram", "8", "--spec"]) == 0
    assert "DecoderSpec(hidden=48" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--vram", "0.7"], "short"),
        (["--vram", "-1"], "--vram: expected a number above 0"),
        ([], "expected a model to plan for"),
    ],
    ids=["too-small", "negative", "no-model"],
)
def test_plan_that_fails_is_one_line_and_exit_2(
    folder: Path, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """H25: the planner's refusal as a traceback, or as success."""
    model = ["--model", str(folder)] if flags else []
    assert main(["plan", *model, *flags]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
