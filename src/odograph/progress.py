"""Long work: a bar to show its progress that needs nothing, and a pace that leaves other threads their time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias, TypeVar

__all__ = ["Progress", "paced", "progress_bar"]

T = TypeVar("T")

# Told how much is done, and of about how much, 0 if that is not known: rows, entries; for people only percents.
Progress: TypeAlias = Callable[[int, int], None]

_WIDTH = 40
_SLICE: Final = 0.0005  # seconds of work between two looks at whether other threads have work too
_REST: Final = 2.0  # how much longer than that a thread rests if they have
_LONGEST: Final = 0.1  # seconds of rest, where an item was long because a disk or a reader was slow
_BUSY: Final = 0.1  # the part of a processor that they use then


def progress_bar(done: int, expected: int) -> None:
    """Draw how far a long computation has come, on standard error: pass it as `progress=progress_bar`."""
    part = min(done, expected) / max(1, expected)
    filled = int(_WIDTH * part)
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {part:4.0%} ")
    sys.stderr.flush()


def paced(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with pauses while other threads of this process are at work.

    Python lets a thread compute for five milliseconds at a time, and one that has waited for the disk gets its turn
    only after those: a replay would slow down every charge of its process several times.
    """
    begun, used = time.perf_counter(), _used_by_others()
    for item in items:
        yield item
        took = time.perf_counter() - begun
        if took > _SLICE:
            time.sleep(0)
            if _used_by_others() - used > _BUSY * took:
                time.sleep(min(_REST * took, _LONGEST))
            begun, used = time.perf_counter(), _used_by_others()


def _used_by_others() -> float:
    """Return how much processor time the other threads of this process have used, in seconds."""
    return time.process_time() - time.thread_time()
