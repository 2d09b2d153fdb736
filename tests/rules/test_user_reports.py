"""The list of user reports says what is there."""

from __future__ import annotations

import re

from tests.rules.user_reports import PAGE, REPORTS, REQUIRED, rows

REMEDY = "run `python -m tests.rules.user_reports`"


def listed() -> set[tuple[str, str, str]]:
    """Report, file and test of every row of the page."""
    found: set[tuple[str, str, str]] = set()
    report = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## ([HR]\d\d): ", line):
            report = heading[1]
        elif row := re.match(r"\| `([^`:]+)::([^`]+)` \|", line):
            found.add((report, row[1], row[2]))
    return found


def test_every_listed_test_exists_and_names_its_report() -> None:
    """A page that promises tests which were renamed, moved or deleted."""
    gone = listed() - {(row.report, row.file, row.test) for row in rows()}
    assert not gone, REMEDY
    assert len(listed()) > len(REQUIRED)


def test_every_required_report_has_a_test() -> None:
    """A report whose last test was lost."""
    assert not set(REQUIRED) - {report for report, _, _ in listed()}, REMEDY


def test_every_test_of_a_report_is_listed() -> None:
    """A new test that nobody finds by its report, or an id with a slip in it."""
    found = {(row.report, row.file, row.test) for row in rows()}
    assert {report for report, _, _ in found} <= set(REPORTS)
    assert not found - listed(), REMEDY
