"""Versions: the files of a population. A version never changes; the ledger says which one is current.

Every step writes a folder of its own. It is on the disk before the ledger points to it, so a crash leaves the version
before or the one after, and at worst a folder that nothing points to. The current version and the one before it are
kept, others are removed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from odograph.errors import LedgerError
from odograph.ledger.sqlite_files import sync

__all__ = ["Versions", "keep_file"]

_SECRET: Final = "secret"  # noqa: S105  the file's name
_BYTES: Final = 32


class Versions:
    """The folder of a population."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def create(self) -> None:
        """Make the folder, and the secret without which digests of ids and requests say nothing."""
        try:
            self.location.mkdir(parents=True, exist_ok=True)
            file = os.open(self.location / _SECRET, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as problem:
            if (self.location / _SECRET).exists():
                raise LedgerError(
                    f"there is a population in {self.location} already: open it, or pass another location. If making"
                    " it was interrupted, so that no ledger knows it, remove the folder"
                ) from None
            raise LedgerError(f"no population can be made in {self.location}: {problem.strerror}") from problem
        with os.fdopen(file, "wb") as opened:
            opened.write(secrets.token_bytes(_BYTES))
        sync(self.location / _SECRET)
        sync(self.location)

    def undo(self, folder: Path) -> None:
        """Leave the place as it was before `create`; for a population that did not come to be."""
        self.discard(folder)
        (self.location / _SECRET).unlink(missing_ok=True)
        with suppress(OSError):  # what else is there is not ours
            self.location.rmdir()

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

    def begin(self, version: int) -> Path:
        """Make the folder of a version that nothing points to yet."""
        folder = self.location / f"{version:08}-{secrets.token_hex(8)}"
        folder.mkdir()
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
        """Remove what is older than a version and not among those kept, and what never became one."""
        for folder in self.location.glob("[0-9]" * 8 + "-*"):
            if folder.name not in kept and int(folder.name[:8]) <= version:
                self.discard(folder)


def keep_file(old: Path, new: Path) -> None:
    """Let a file be in the next version too: under a second name, or as a copy where files have one only."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
