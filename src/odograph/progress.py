"""Long operations: a progress bar without dependencies, and a pace that leaves time to other threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self, TypeAlias, TypeVar

__all__ = ["Progress", "SlowNotice", "pace", "progress_bar"]

T = TypeVar("T")

# Called with how much is done and the expected total (0 if unknown), in rows or entries; for people, in percent.
Progress: TypeAlias = Callable[[int, int], None]

_WIDTH: Final = 40  # characters
_NOTICE_AFTER: Final = 1.0  # seconds
_SLICE: Final = 0.0005  # seconds of work between two checks whether other threads are at work
_SLEEP_RATIO: Final = 2.0  # how long to sleep if they are, relative to the time worked
_MAX_SLEEP: Final = 0.1  # seconds; an item may have taken long because a disk or a reader was slow
_BUSY: Final = 0.1  # the part of a processor from which other threads count as at work


def progress_bar(done: int, expected: int) -> None:
    """Draw a progress bar on standard error: pass it as `progress=progress_bar`."""
    part = min(done, expected) / max(1, expected)
    filled = int(_WIDTH * part)
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {part:4.0%} ")
    sys.stderr.flush()


class SlowNotice:
    """Report progress after a second of work: by a bar in a terminal or notebook, by one line in a script.

    Use it as a context manager: leaving it ends the bar's line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = time.monotonic()
        self._shown = False

    def __call__(self, done: int, expected: int) -> None:
        """Report how much is done."""
        if time.monotonic() - self._begun < _NOTICE_AFTER:
            return
        if _is_interactive():
            progress_bar(done, expected)
        elif not self._shown:
            sys.stderr.write(f"odograph: {self._what}\n")
            sys.stderr.flush()
        self._shown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and _is_interactive():
            sys.stderr.write("\n")
            sys.stderr.flush()


def _is_interactive() -> bool:
    """Return whether standard error is a terminal, or the output of a notebook's cell."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def pace(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with pauses while other threads of this process are at work.

    A Python thread computes for five milliseconds at a time, and a thread that has waited for the disk must wait for
    the end of them: without pauses, a replay would make every charge of its process several times slower.
    """
    begun, used = time.perf_counter(), _used_by_others()
    for item in items:
        yield item
        took = time.perf_counter() - begun
        if took > _SLICE:
            time.sleep(0)
            if _used_by_others() - used > _BUSY * took:
                time.sleep(min(_SLEEP_RATIO * took, _MAX_SLEEP))
            begun, used = time.perf_counter(), _used_by_others()


def _used_by_others() -> float:
    """Return the processor time that the other threads of this process have used, in seconds."""
    return time.process_time() - time.thread_time()
