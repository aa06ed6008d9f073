"""A program that executes commands on a ledger, one JSON line each, and the class that starts and drives it.

    scripted.py DEFECT

    ["connect", URL]         use the ledger there
    ["spend", KEY]           charge it
    ["read", FILE]           read a file, as a program that copies or hashes it does
    ["close"]                close the ledger
    ["mount", FILE, PATH]    mount a file, and nothing else, at another path
    ["mount", "", FOLDER]    mount a file system of its own at a folder

It answers each with a line: "done", or the name and the message of the error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from broken_stores import ledger_at
from racer import ACCOUNT
from workload import COST, charges, policy

from odograph.errors import OdographError
from odograph.ledger.ledger import Ledger

LIMIT: Final = 4  # charges that fit


class Program:
    """This file as a running program."""

    def __init__(self, defect: str, *, alone: bool = False) -> None:
        command = [sys.executable, __file__, defect]
        if alone:  # with mounts of its own, as in a container
            command = ["unshare", "--mount", "--propagation", "private", *command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def __call__(self, *words: str) -> str:
        """Send a command and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer: str = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        """End the program in the ordinary way: what is open is closed."""
        self._process.communicate(timeout=60)


def new_ledger(folder: Path, number: int) -> Path:
    """Create a ledger in a folder of its own."""
    path = folder / f"{number}" / "ledger.db"
    path.parent.mkdir()
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.open_account(ACCOUNT, policy(LIMIT))
    return path


def check(path: Path, acknowledged: set[str]) -> None:
    """Check that no more was acknowledged than fits, and that all of it is there."""
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert len(acknowledged) <= LIMIT, f"{len(acknowledged)} charges were acknowledged, and {LIMIT} fit"
        lost = acknowledged - charges(ledger).keys()
        assert not lost, f"acknowledged charges are gone: {sorted(lost)}"


def mount(file: str, path: str) -> None:
    """Mount a file, or an empty file system, for this process only."""
    if file:
        Path(path).touch()
    kind = ["--bind", file] if file else ["-t", "tmpfs", "none"]
    subprocess.run(["mount", *kind, path], check=True)  # noqa: S603, S607  in a namespace of its own


def main(defect: str) -> None:
    """Follow the lines."""
    ledger: Ledger | None = None
    for line in sys.stdin:
        verb, *words = json.loads(line)
        answer = "done"
        try:
            if verb == "connect":
                ledger = ledger_at(words[0], defect)
            elif verb == "read":
                with suppress(FileNotFoundError):
                    Path(words[0]).read_bytes()
            elif verb == "mount":
                mount(*words)
            elif ledger is not None:
                ledger.spend({ACCOUNT: COST}, key=words[0]) if verb == "spend" else ledger.close()
        except OdographError as error:
            answer = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
