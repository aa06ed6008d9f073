"""Files that only their owner can read: they are made so, whatever the umask is, and older ones are corrected.

The mode is given when a file or folder is made: a change afterwards would leave a moment in which others could open
it, and the umask belongs to the whole process, with all its threads.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

__all__ = ["keep_file", "make_file", "make_folder", "restrict", "write_file"]

_FOLDER: Final = 0o700
_FILE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder that only its owner can enter; its parents, if they are missing too, as the umask says."""
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(_FOLDER)


def make_file(path: Path) -> BinaryIO:
    """Make a file that only its owner can read, and open it for writing; it must not be there.

    It has a buffer, which writes everything or raises: without one, a disk that is almost full takes some of it.
    """
    return open(path, "xb", opener=_opened)


def write_file(path: Path, content: bytes) -> None:
    """Make a file that only its owner can read, with this in it; it must not be there."""
    with make_file(path) as file:
        file.write(content)


def keep_file(old: Path, new: Path) -> None:
    """Let a file be in the next version too: under a second name, or as a copy where files have one only."""
    try:
        os.link(old, new)
    except OSError:
        with old.open("rb") as source, make_file(new) as file:
            shutil.copyfileobj(source, file)


def restrict(path: Path) -> None:
    """Take every right from others than the owner: on a file, or on a folder and everything in it.

    Links are not followed, and what vanishes meanwhile is left out. Folders come before what is in them, so that
    no other user can put something else in its place. It raises `OSError` where the mode cannot be changed.
    """
    for found in _under(path):
        with suppress(FileNotFoundError):
            mode = found.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & _OTHERS:
                found.chmod(stat.S_IMODE(mode) & ~_OTHERS)


def _under(path: Path) -> Iterator[Path]:
    yield path
    for where, folders, files in os.walk(path):  # a file, or a link, has nothing under it
        yield from (Path(where) / name for name in (*folders, *files))


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE)
