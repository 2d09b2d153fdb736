"""One table on the terminal and one JSON on disk, with what the figures need to be believed."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    note: str = ""


def machine() -> dict[str, object]:
    """Processor, cores, memory and Python of this machine."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def publish(title: str, rows: list[Row], path: Path | None, **settings: object) -> None:
    """Print the table; write the JSON if a path is given."""
    facts = machine() | settings
    print(f"{title}: {', '.join(f'{k} {v}' for k, v in facts.items())}")
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"  {row.name:<{width}}  {row.value:>10.2f} {row.unit:<8} {row.note}")
    if path is not None:
        path.write_bytes(msgspec.json.encode({"title": title, "facts": facts, "rows": rows}))
