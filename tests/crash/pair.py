"""A program that uses a ledger as lines of JSON say, one after the other, beside another like it.

    pair.py TWIN

    ["connect", URL]         use the ledger there
    ["spend", KEY]           charge it
    ["read", FILE]           read a file, as a program that copies or hashes it does
    ["close"]                close the ledger
    ["mount", FILE, PLACE]   mount a file, and nothing else, at another place
    ["mount", "", FOLDER]    mount a file system of its own at a folder

It answers each with a line: "done", or the name and the message of the error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from racer import ACCOUNT
from twins import ledger_at
from workload import COST

from odograph.errors import OdographError
from odograph.ledger.ledger import Ledger


def mount(file: str, place: str) -> None:
    """Mount a file, or an empty file system, for this process only."""
    if file:
        Path(place).touch()
    kind = ["--bind", file] if file else ["-t", "tmpfs", "none"]
    subprocess.run(["mount", *kind, place], check=True)  # noqa: S603, S607  in a namespace of its own


def main(twin: str) -> None:
    """Follow the lines."""
    ledger: Ledger | None = None
    for line in sys.stdin:
        verb, *words = json.loads(line)
        answer = "done"
        try:
            if verb == "connect":
                ledger = ledger_at(words[0], twin)
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
