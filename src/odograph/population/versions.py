"""Versions: the files of a population. A version never changes; the ledger says which one is current.

Every step writes a folder of its own. It is on the disk before the ledger points to it, so a crash leaves the version
before or the one after, and at worst a folder that nothing points to. The current version and the one before it are
kept, others are removed. They are the owner's alone: what is in them is as private as the data.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import shutil
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from odograph.errors import InvalidPolicy, LedgerError
from odograph.ledger.sqlite_files import sync
from odograph.population.files import make_folder, restrict, write_file
from odograph.population.lease import LOCKS, is_pinned, leased

__all__ = ["Versions", "parse_location"]

_SECRET: Final = "secret"  # noqa: S105  the file's name
_BYTES: Final = 32
_VERSION: Final = re.compile(r"[0-9]{8,}-[0-9a-f]{16}")
_OWN: Final = re.compile("|".join(["secret", *map(re.escape, LOCKS), _VERSION.pattern]))  # what is in the folder
# As of an address. Path makes one slash of two.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)[/\\]")


def parse_location(location: object) -> Path:
    """Return the absolute path of a folder, or raise `InvalidPolicy`: all engines keep a population in one.

    Otherwise an address such as s3a://bucket would be a folder of that name, where the program happens to run.
    """
    text = os.fspath(location) if isinstance(location, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidPolicy(f"location must be the path of a folder (got a {type(location).__name__})")
    scheme = _SCHEME.match(text)
    if scheme is not None and not (os.name == "nt" and len(scheme[1]) == len("C:")):
        # The rest of it may have a password in it.
        raise InvalidPolicy(
            f"location must be the path of a folder (got an address that begins with {scheme[1]!r}): no engine"
            " reads or writes at addresses. Mount it as a folder, and pass the path of that"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        plain = False
    else:
        plain = bool(text) and "\0" not in text and text[0] != "~"
    if not plain:
        raise InvalidPolicy(
            f"location must be the path of a folder (got {text!r}): write out where the home folder is, and use no"
            " characters that are not in Unicode"
        )
    return Path(text).absolute()


class Versions:
    """The folder of a population."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def create(self) -> None:
        """Make the folder, and the secret without which digests of ids and requests say nothing."""
        try:
            self._make()
        except FileExistsError:  # another process was first
            raise LedgerError(self._taken()) from None
        except OSError as problem:
            raise LedgerError(
                f"no population can be made in {self.location}: {problem.strerror}. Pass the path of a new folder"
            ) from problem
        sync(self.location / _SECRET)
        sync(self.location)

    def _make(self) -> None:
        real = Path(os.path.realpath(self.location))  # which takes a link to itself, too
        around = next(filter(_is_population, real.parents), None)
        if around is not None:
            raise LedgerError(
                f"location must not be within the folder of another population, {around}, which removes what it does"
                " not know. Pass the path of a new folder elsewhere"
            )
        try:
            make_folder(self.location, parents=True)
        except FileExistsError:
            if any(self.location.iterdir()):
                raise LedgerError(self._taken()) from None
            restrict(real)
        write_file(self.location / _SECRET, secrets.token_bytes(_BYTES))

    def _taken(self) -> str:
        if (self.location / _SECRET).exists():
            return (
                f"there is a population in {self.location} already: open it, or pass another location. If making"
                " it was interrupted, so that no ledger knows it, remove the folder"
            )
        return f"location must be a new folder, or an empty one, and there is something in {self.location}"

    def undo(self, folder: Path) -> None:
        """Leave the place as it was before `create`; for a population that did not come to be."""
        self.discard(folder)
        (self.location / _SECRET).unlink(missing_ok=True)
        with suppress(OSError):  # what else is there is not ours
            self.location.rmdir()

    def restrict(self) -> None:
        """Close the files of a population to other users, as a release that left it to the umask made them.

        The folder itself keeps its mode if there is more in it than the population.
        """
        if not _is_population(self.location):
            return  # or not to be read by this user: the first step says so
        names = sorted(path.name for path in self.location.iterdir())
        own = [name for name in names if _OWN.fullmatch(name)]
        try:
            if own == names:
                restrict(self.location.resolve())
            for name in own:
                restrict(self.location / name)
        except OSError as problem:
            raise LedgerError(
                f"the population in {self.location} may be read by others, and its files cannot be closed to them:"
                f" {problem.strerror}. Let their owner run: chmod -R go= {self.location}"
            ) from problem

    def digest(self, *parts: bytes | memoryview) -> str:
        """Return a digest that nobody can guess from who has not the secret."""
        mac = hmac.new(self.secret(), digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest()

    def secret(self) -> bytes:
        """Return the secret."""
        try:
            found = (self.location / _SECRET).read_bytes()
        except OSError as problem:
            raise LedgerError(f"there is no population in {self.location}: {problem.strerror}") from problem
        if len(found) != _BYTES:
            raise LedgerError(f"the secret of the population in {self.location} is damaged; restore it from a copy")
        return found

    def lease(self) -> AbstractContextManager[bool]:
        """Return what lets one process step at a time, as far as it can; it says whether another one was first."""
        return leased(self.location)

    def begin(self, version: int) -> Path:
        """Make the folder of a version that nothing points to yet."""
        folder = self.location / f"{version:08}-{secrets.token_hex(8)}"
        make_folder(folder)
        return folder

    def folder(self, state: str) -> Path:
        """Return the folder of a version that the ledger points to."""
        return self.location / state

    def finish(self, folder: Path) -> None:
        """Bring everything in a new version to the disk, and the folder itself."""
        for where, _, files in os.walk(folder, topdown=False):
            for name in files:
                sync(Path(where) / name)
            sync(Path(where))
        sync(self.location)

    def discard(self, folder: Path) -> None:
        """Remove a version that nothing points to."""
        shutil.rmtree(folder, ignore_errors=True)

    def clean(self, version: int, kept: Collection[str]) -> None:
        """Remove what is older than a version, and not among those kept or in use, and what never became one."""
        for folder in self.location.iterdir():
            if folder.name in kept or not _VERSION.fullmatch(folder.name):
                continue
            if int(folder.name.partition("-")[0]) <= version and not is_pinned(folder):
                self.discard(folder)


def _is_population(folder: Path) -> bool:
    """Say whether a folder holds a population that this user can read."""
    try:
        whole = (folder / _SECRET).stat().st_size == _BYTES
        return whole and any(_VERSION.fullmatch(one.name) for one in folder.iterdir())
    except OSError:
        return False
