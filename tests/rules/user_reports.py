"""Writes docs/user-reports.md: which test stands for which user report: `python -m
tests.rules.user_reports`.

A test stands for a report when its docstring begins with the report's id (`H02 (c): what is
caught`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.rules.size import ROOT

PAGE = ROOT / "docs" / "user-reports.md"

REPORTS = {
    "H01": "A prompt longer than the KV pool waits for ever, or is answered 500.",
    "H02": "After a client leaves, its request is computed to the end.",
    "H03": "Nonsense sampling values reach the sampler.",
    "H05": "A model folder without its index, or with several shard families, is not read.",
    "H06": "A checkpoint that lacks a tensor or a shard ends in a bare KeyError.",
    "H07": "Under concurrent chats one KV page gets two owners.",
    "H08": "A long prompt stops somebody else's stream.",
    "H20": "Several choices share one finish or one index.",
    "H21": "A stop string across two tokens is missed, or its first half leaks.",
    "H22": "Characters whose bytes span tokens become U+FFFD.",
    "H23": "The model runs past its turn, since only one of its end ids is known.",
    "H24": "A model without a chat template breaks the reply off after status 200.",
    "R01": "The prompt is cut to the context without a word.",
    "R02": "max_tokens near the end of the context turns negative.",
    "R03": "Sending several tokens at once loses some.",
    "R09": "Aborting batch_1 also ends batch_10.",
    "R10": "An abort between prefill and first token commits the late result.",
    "R11": "The turn after a cancelled one sees tokens that its client never got.",
    "R13": "The last held-back text goes round the stop strings.",
    "R14": "Text decoded after the stop match leaks.",
    "R15": "Pending bytes are flushed at a space.",
    "R16": "Usage comes unasked, or not when asked.",
    "R19": "A truncated file or an HTML page is taken for weights.",
    "R20": "A complete file of another layout is called truncated.",
    "R21": "An unsupported architecture ends in a traceback.",
    "H25": "Not enough memory for KV is found after minutes of loading; flags are overridden.",
    "R22": "a kernel for another GPU than the visible one; the first request dies",
    "R27": "with a cached prefix the prefill is slower than without",
    "R29": "After one long request all later ones answer wrongly.",
    "R36": "The server goes on after its engine died.",
}
"""The reports that have tests, each in a line. More ids: the survey they come from."""

REQUIRED = (
    *("H01", "H02", "H03", "H05", "H07", "H21", "H22", "H23", "H24"),
    *("R01", "R02", "R09", "R10", "R11", "R14", "R15", "R19", "R20", "R21"),
)
"""Reports that must not lose their last test."""

_IDS = re.compile(r"(?:[HR]\d\d(?: \([a-z]\)|, general| together)?,? ?)+:")


@dataclass(frozen=True, slots=True)
class Row:
    """One test of one report."""

    report: str
    file: str
    test: str
    catches: str


def rows() -> Iterator[Row]:
    """Every test whose docstring begins with a report's id."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = " ".join((ast.get_docstring(node) or "").split())
                if ids := _IDS.match(text):
                    catches = text[ids.end() :].strip()
                    for report in re.findall(r"[HR]\d\d", ids[0]):
                        file = path.relative_to(ROOT).as_posix()
                        yield Row(report, file, node.name, catches[:1].upper() + catches[1:])


def page() -> str:
    """The whole page."""
    lines = [
        "# User reports that became tests",
        "",
        "Complaints about this and other engines, each with the tests that would catch it here.",
        "Made from the tests' docstrings by `python -m tests.rules.user_reports`.",
    ]
    found = sorted(rows(), key=lambda row: row.report)
    for report, complaint in REPORTS.items():
        lines += [
            "",
            f"## {report}: {complaint}",
            "",
            "| test | what it catches |",
            "| --- | --- |",
        ]
        lines += [
            f"| `{row.file}::{row.test}` | {row.catches} |" for row in found if row.report == report
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
