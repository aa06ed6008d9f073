"""A SQLite ledger that several users of the operating system share."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from broken_stores import ledger_at
from racer import ACCOUNT
from scripted import new_ledger
from workload import COST

from odograph.errors import LedgerError


def as_user(user: int, group: int, path: Path, key: str) -> str:
    """Spend as another user of the operating system, and return what came of it."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:  # pragma: no cover  in a forked process, which is not measured
        answer = "failed"
        with suppress(BaseException):
            os.setgroups([group])
            os.setgid(group)
            os.setuid(user)
            try:
                with ledger_at(f"sqlite:///{path}") as ledger:
                    answer = str(ledger.spend({ACCOUNT: COST}, key=key))
            except LedgerError as error:
                answer = str(error)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(process, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to become other users")
@pytest.mark.parametrize("first", [0, 1001, 1002])
def test_who_may_write_the_ledger_may_write_after_any_other_who_may(first: int) -> None:
    folder = Path(f"/dev/shm/odograph-{os.getpid()}-{first}")  # noqa: S108  other users can reach it
    folder.mkdir()
    try:
        path = new_ledger(folder, 0)
        for left in folder.glob("*/*-*"):
            left.unlink()
        for place, mode in ((path.parent, 0o770), (path, 0o660)):
            os.chown(place, 1001, 2000)
            place.chmod(mode)
        for user in (first, 1001, 1002, 0):
            assert f"key {user}" in as_user(user, 2000, path, str(user))
    finally:
        shutil.rmtree(folder)
