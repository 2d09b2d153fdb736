"""The bar that a person sees while a model is fetched and loaded. Reads `Progress`; changes
nothing.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freetoken.types import Progress


class LoadingBar:
    """Shows a bar on stderr from `__enter__` to `close`, on a terminal only: logs need no
    animation.
    """

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        view = _View(progress)
        self._live = (
            Live(view, console=console, transient=True, refresh_per_second=8)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LoadingBar:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar. Closing twice is harmless."""
        if self._live is not None:
            self._live.stop()


class _View:
    """Drawn anew several times a second from what the loader has written."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich__(self) -> Table | Text:
        progress = self._progress
        if progress.phase not in ("starting", "loading"):
            return Text("")
        step = progress.step or progress.phase
        if not progress.total_bytes:
            return Text(f"{step} ...")
        row = Table.grid(padding=(0, 1))
        row.add_row(
            step,
            ProgressBar(total=progress.total_bytes, completed=progress.done_bytes, width=40),
            f"{decimal(progress.done_bytes)} of {decimal(progress.total_bytes)}",
        )
        return row
