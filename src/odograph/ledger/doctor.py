"""Doctor: what about a ledger, its place and its clock could lead to wrong times or lost charges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from odograph.ledger.entries import AHEAD, moment
from odograph.ledger.ledger import Ledger
from odograph.ledger.sql import SCHEMA
from odograph.ledger.store import Balance

__all__ = ["Finding", "examine", "examine_clock"]

_FILE: Final = "sqlite:///"
_MOUNTS: Final = Path("/proc/self/mountinfo")
# SQLite's locks and its shared memory do not work between the machines that share these.
_NETWORK: Final = frozenset(
    ["9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"]
)
_ESCAPE: Final = re.compile(r"\\(\d{3})")  # a space in the name of a folder is written \040
_LONG_LOG: Final = 256 * 2**20  # bytes; it is written back at 16 MB, unless a program keeps reading
_SHOWN: Final = 3  # accounts in one line


class Finding(NamedTuple):
    """What was looked at and found, and what to do about it; nothing if it is in order."""

    what: str
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding in plain types."""
        return {"what": self.what, "found": self.found, "advice": self.advice or None}


def examine(ledger: Ledger, now: int) -> list[Finding]:
    """Look at a ledger's place and clock; `now` is in microseconds since 1970. Nothing is replayed: see `verify`."""
    balances = ledger.books.balances()
    count = sum(balance.sequence + 1 for balance in balances.values())
    findings = [Finding("ledger", f"{ledger.url}, entries: {count}, accounts: {len(balances)}")]
    if not ledger.url.startswith(("http://", "https://")):
        findings.append(Finding("schema", f"{SCHEMA}, which this version of Odograph writes"))
    if ledger.url.startswith(_FILE):
        findings += _examine_file(Path(unquote(ledger.url.removeprefix(_FILE))).absolute())
    findings.append(examine_clock(balances.values(), now))
    return findings


def examine_clock(balances: Iterable[Balance], now: int) -> Finding:
    """Compare the last entries with a clock."""
    last = sorted((balance.time, balance.head.name) for balance in balances)
    ahead = [(time, name) for time, name in reversed(last) if time > now + AHEAD]
    if not ahead:
        found = (
            f"the last entry is of {moment(last[-1][0]):%Y-%m-%d %H:%M:%S} UTC" if last else "there are no entries"
        )
        return Finding("clock", found)
    names = ", ".join(f"{name} ({moment(time):%Y-%m-%d %H:%M:%S} UTC)" for time, name in ahead[:_SHOWN])
    more = f" and {len(ahead) - _SHOWN} more" if len(ahead) > _SHOWN else ""
    return Finding(
        "clock",
        f"the last entries of {names}{more} are later than {moment(now):%Y-%m-%d %H:%M:%S} UTC, which is now",
        "a clock was ahead when they were written, or this one is behind. Set the clock; later entries will have its"
        " time. Reservations made while it was ahead expire by the time that it showed",
    )


def _examine_file(path: Path) -> Iterator[Finding]:
    """Look at where a SQLite file is."""
    place = path.resolve()
    kind = _file_system(place)
    advice = "SQLite must not be used over a network file system: move the ledger to a local disk, or use PostgreSQL"
    yield Finding("file system", kind or "not known", advice if kind in _NETWORK else "")
    log = place.with_name(f"{place.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    advice = "a program keeps reading and so keeps the log from being written back; find and end it"
    yield Finding("log", f"{size:,} bytes", advice if size > _LONG_LOG else "")


def _file_system(path: Path) -> str:
    """Return the kind of file system that a file is on; nothing if the system does not say."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    kinds: dict[Path, str] = {}
    for line in lines:
        fields = line.split(" ")
        mounted = _ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4])
        kinds[Path(mounted)] = fields[fields.index("-") + 1]  # the last one at a place covers those before it
    return next((kinds[parent] for parent in (path, *path.parents) if parent in kinds), "")
