"""Records of a ledger: history, verify, checkpoint, erase; copies: backup, restore, export, import; and doctor."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

import typer
from rich.console import Console, Group
from rich.table import Table

from odograph.account import check_page
from odograph.cli.options import (
    AsJson,
    CheckpointFile,
    CostOptions,
    LedgerOptions,
    account_names,
    new_file,
    print_result,
    progress,
    read_checkpoint,
    with_options,
)
from odograph.compile import compile_policy, find_budget
from odograph.core.conversions import filter_time
from odograph.core.filters import Exact
from odograph.core.filters.smooth import RESERVES
from odograph.core.planning import outlook, usual_requests
from odograph.core.policy import Policy
from odograph.core.value_iteration import FAMILIES, FINE, Budget, refuted_intrinsic
from odograph.errors import InvalidArgument, InvalidPolicy, LedgerError, LedgerNotFound, OdographError
from odograph.figures import PANELS, blank_axes, draw_all
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import AHEAD, moment
from odograph.ledger.ledger import Ledger, LedgerAccount, states
from odograph.ledger.results import Checkpoint, HistoryEntry, Verification, write_csv
from odograph.ledger.stores.base import SCHEMA, Balance, Store

__all__ = [
    "Finding",
    "backup",
    "budget",
    "chart",
    "checkpoint",
    "doctor",
    "erase",
    "events",
    "examine",
    "examine_clock",
    "export",
    "figures",
    "history",
    "import_",
    "plan",
    "plot",
    "restore",
    "save_picture",
    "verify",
]

_ATTENTION_EXIT_CODE: Final = 5
_HISTORY_PAGE: Final = 20  # entries that `history` shows
_CSV_PAGE: Final = 2000  # entries in memory at a time
_SQLITE_PREFIX: Final = "sqlite:///"
_MOUNT_INFO: Final = Path("/proc/self/mountinfo")
# SQLite's locks and shared memory do not work between machines that share these.
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    ["9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"]
)
_ESCAPE: Final = re.compile(r"\\(\d{3})")  # a space in a folder name is written \040
# What is stored there is lost with it.
_VOLATILE_FILE_SYSTEMS: Final = {
    "overlay": ", a container's own layer: the ledger ends with the container, unless a volume is mounted there",
    "ramfs": ", in memory: a reboot loses the ledger",
    "tmpfs": ", in memory: a reboot loses the ledger",
}
_WAL_SIZE_WARNING: Final = 256 * 2**20  # bytes; the log is written back at 16 MB, unless a program keeps reading
_MIN_FREE: Final = 256 * 2**20  # bytes
_KEY_FILE_END: Final = "-owner-key"
_FILE_ENDS: Final = ("", "-wal", "-shm", "-access", _KEY_FILE_END)  # of the files of a ledger and its service
_SYNCHRONOUS: Final = {"0": "off", "1": "normal", "2": "full", "3": "extra"}
_MAX_SKEW: Final = 60.0  # seconds between two clocks
_MAX_ACCOUNTS_SHOWN: Final = 3  # in one finding
_MAX_ACCOUNTS_READ: Final = 20  # of which the last entries are read
_MAX_ENTRIES_READ: Final = 50  # of one account
# What a setting of PostgreSQL must be, and what to do if it is not.
_SERVER_SETTINGS: Final = {
    "fsync": (
        "on",
        "set fsync = on in postgresql.conf and reload: a crash loses charges, and other commands refuse this server",
    ),
    "full_page_writes": ("on", "set full_page_writes = on and reload: a crash may damage the tables"),
    "default_transaction_isolation": (
        "read committed",
        "ALTER DATABASE ... SET default_transaction_isolation = 'read committed': else charges fail under load",
    ),
    "default_transaction_read_only": (
        "off",
        "ALTER DATABASE ... SET default_transaction_read_only = off: no charge can be stored",
    ),
    "in_recovery": ("false", "this is a standby, which takes no charges: connect to the primary"),
}
# Tells what another process finds of a file that is locked: the error, or the number of rows.
_SECOND_PROCESS: Final = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
    print(connection.execute("SELECT count(*) FROM written").fetchone()[0])
except sqlite3.Error as error:
    print(error.sqlite_errorname)
"""


class _Erasable(StrEnum):
    """What can be erased."""

    NOTE = "note"
    PRINCIPAL = "principal"


_EVENTS_INTERVAL: Final = 1.0  # seconds between two looks for further entries


@with_options
def history(  # noqa: PLR0913  each is one option
    account: Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)],
    *,
    options: LedgerOptions,
    first: Annotated[
        int | None,
        typer.Option(
            help="The first entry to show; a negative number counts from the end. By default the last entries."
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(help="The maximum number of entries; by default 20, or all with --csv.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Write CSV with a row for each entry, for a table.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the CSV to this new file; by default to standard output."),
    ] = None,
) -> None:
    """Show a page of an account's entries: charges, refusals, reservations and how they were resolved.

    odograph history census-2030 --csv --out census.csv
    """
    if csv or out is not None:
        _write_csv(account, options, first or 0, count, out, csv=csv)
        return
    count = _HISTORY_PAGE if count is None else count
    with options.ledger() as ledger:
        own = ledger.account(account)
        size = own.size
        page = own.history(-count if first is None and count > 0 else first or 0, count)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("entry", "time (UTC)", "verb", "cost", "by", "key", "note"):
        table.add_column(name, no_wrap=name in ("entry", "time (UTC)", "verb", "key"))
    for entry in page:
        cost = "" if entry.cost is None else entry.cost.brief()
        # Notes are untrusted: characters that would control the terminal are replaced.
        plain = "".join(letter if letter.isprintable() else " " for letter in entry.note)
        table.add_row(
            str(entry.sequence),
            f"{entry.time:%Y-%m-%d %H:%M:%S}",
            entry.verb,
            cost,
            entry.principal,
            entry.key_text,
            plain,
        )
    begin = page[0].sequence if page else size
    if page and len(page) < size:
        table.caption = f"entries {begin} to {begin + len(page) - 1} of {size}; --first and --count show others"
        table.caption_justify = "left"
    form = {"account": account, "size": size, "entries": [entry.to_dict() for entry in page]}
    print_result(
        form, table if page else f"there are no entries from {first} on: {account} has {size}", as_json=options.json
    )


def _write_csv(  # noqa: PLR0913  of one command
    account: str, options: LedgerOptions, first: int, count: int | None, out: Path | None, *, csv: bool
) -> None:
    if not csv:
        raise InvalidArgument(f"--out is for --csv (got --out {out}): add --csv")
    if out is None and options.json:
        raise InvalidArgument("--json needs --out FILE here: --csv prints CSV, not one JSON document")
    check_page(first, count)
    with options.ledger() as ledger:
        own = ledger.account(account)
        size = own.size
        begin = max(0, size + first) if first < 0 else min(first, size)
        end = size if count is None else min(size, begin + count)
        pages = (own.history(start, min(_CSV_PAGE, end - start)) for start in range(begin, end, _CSV_PAGE))
        if out is None:
            write_csv(pages, sys.stdout)
            return
        with new_file(out) as file:
            write_csv(pages, file)
    rows = end - begin
    text = f"wrote {out}: {rows:,} entr{'ies' if rows != 1 else 'y'} of {account}"
    print_result({"file": str(out), "account": account, "entries": rows}, text, as_json=options.json)


@with_options
def events(
    *,
    options: LedgerOptions,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for further entries, until interrupted.")] = False,
    cursor: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue after the cursor in this file, and keep the new one there.",
        ),
    ] = None,
) -> None:
    """Show the entries of all accounts, each account's in their order; with --json one document per line.

    The cursor is written after the entries: if the command is killed between the two, they come again.

    odograph events --follow --json --cursor audit.cursor
    """
    after = cursor.read_text(encoding="ascii").strip() if cursor is not None and cursor.exists() else ""
    with options.ledger() as ledger:
        while True:
            entries, after, more = ledger.events(after=after)
            for past in entries:
                form = {"account": past.entry.account} | past.to_dict()
                typer.echo(json.dumps(form, allow_nan=False) if options.json else _event_line(past))
            sys.stdout.flush()
            if cursor is not None and entries:
                _replace(cursor, after)
            if not more and not follow:
                return
            if not more:
                time.sleep(_EVENTS_INTERVAL)


def _event_line(past: HistoryEntry) -> str:
    cost = "" if past.cost is None else f" {past.cost.brief()}"
    return f"{past.time:%Y-%m-%d %H:%M:%S} {past.entry.id} {past.verb}{cost} by {past.principal}"


def _replace(file: Path, text: str) -> None:
    """Write a file anew, so that it has the old text or the new one whenever this program ends."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(f"{text}\n", encoding="ascii")
    new.replace(file)


@with_options
def verify(*, options: LedgerOptions, checkpoint: CheckpointFile = None) -> None:
    """Replay every entry of every account, and report the first that is wrong."""
    kept = read_checkpoint(checkpoint)
    with options.ledger() as ledger, progress("verifying", quiet=options.json) as report:
        found = ledger.verify(checkpoint=kept, progress=report)
        clock = examine_clock(ledger.backend.balances().values(), time.time_ns() // 1000)
    since = "" if kept is None else ", and nothing was removed or rewritten since the checkpoint"
    ahead = f"\n{clock.found}: {clock.advice}" if clock.advice else ""
    form = found.to_dict() | {"clock": clock.to_dict()}
    print_result(form, f"{found}{since}{ahead}\nhead {found.checkpoint.head}", as_json=options.json)


@with_options
def checkpoint(
    *,
    options: LedgerOptions,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the checkpoint to this file; store it away from the ledger."),
    ] = None,
) -> None:
    """Print the state of every account, to be stored elsewhere: verify can then find removed or rewritten entries."""
    with options.ledger() as ledger:
        form = ledger.checkpoint().to_dict()
    if out is None:
        print_result(form, json.dumps(form, indent=1), as_json=options.json)
        return
    out.write_text(json.dumps(form, indent=1) + "\n", encoding="utf-8")
    accounts = len(form["accounts"])
    text = f"wrote {out}: {accounts} account{'s' * (accounts != 1)}, head {form['head']}"
    print_result(form, text, as_json=options.json)


@with_options
def erase(
    what: Annotated[_Erasable, typer.Argument(help="What to erase.")],
    name: Annotated[
        str, typer.Argument(help="The entry of the note, such as census-2030#17, or the name of the principal.")
    ],
    *,
    options: LedgerOptions,
) -> None:
    """Erase a note or a principal's name permanently. The entries remain, and still verify."""
    with options.ledger() as ledger:
        erased = ledger.erase_note(name) if what is _Erasable.NOTE else ledger.erase_principal(name)
        if not erased:
            raise LedgerError(f"there is no {what} {name!r} in {ledger.url}, or it was erased before")
    print_result({"erased": what, "name": name}, f"erased the {what} {name}", as_json=options.json)


@with_options
def backup(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A new SQLite file.")], *, options: LedgerOptions
) -> None:
    """Copy the whole ledger, in its current state, to a new SQLite file."""
    with _exit_on_signals(), options.ledger() as ledger, progress("copying", quiet=options.json) as report:
        copied = ledger.backup(path, progress=report)
    _print_copy(path, copied, options)


@with_options
def restore(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `odograph backup`.")],
    *,
    options: LedgerOptions,
    checkpoint: CheckpointFile = None,
) -> None:
    """Restore a backup to a new ledger. Without a checkpoint every account is closed.

    An old backup would restore budget that has been spent since. A checkpoint stored elsewhere proves it current.
    """
    kept = read_checkpoint(checkpoint)
    if not path.is_file():  # before a new ledger is created
        raise LedgerNotFound(f"FILE must be a backup (got {str(path)!r}): there is no such file")
    with _exit_on_signals(), options.ledger() as ledger, progress("restoring", quiet=options.json) as report:
        found = ledger.restore(path, checkpoint=kept, progress=report)
        _print_import(path, found, ledger.url, kept, options)


@with_options
def export(
    *,
    options: LedgerOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this new file; by default to standard output.")
    ] = None,
) -> None:
    """Write the whole ledger as JSON Lines, with integers as strings."""
    if out is None:
        if options.json:
            raise InvalidArgument("--json needs --out FILE here: export prints JSON Lines, not one JSON document")
        with options.ledger() as ledger, progress("exporting", quiet=sys.stdout.isatty()) as report:
            ledger.export(sys.stdout, progress=report)
        return
    with (
        _exit_on_signals(),
        options.ledger() as ledger,
        progress("exporting", quiet=options.json) as report,
        new_file(out) as file,
    ):
        copied = ledger.export(file, progress=report)
    _print_copy(out, copied, options)


@with_options
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `odograph export`.")],
    *,
    options: LedgerOptions,
    checkpoint: CheckpointFile = None,
) -> None:
    """Import an export into a new ledger, replaying every entry. Without a checkpoint every account is closed."""
    kept = read_checkpoint(checkpoint)
    with (
        path.open(encoding="utf-8") as file,
        _exit_on_signals(),
        options.ledger() as ledger,
        progress("importing", quiet=options.json) as report,
    ):
        found = ledger.import_(file, checkpoint=kept, progress=report)
        _print_import(path, found, ledger.url, kept, options)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that unfinished files are removed as after an interrupt."""

    def exit_process(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature of a handler
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])] if is_main else []
    before = {number: signal.signal(number, exit_process) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_copy(path: Path, copied: Checkpoint, options: LedgerOptions) -> None:
    accounts = len(copied.accounts)
    text = f"wrote {path}: {accounts} account{'s' * (accounts != 1)}, head {copied.head}"
    print_result({"file": str(path), "checkpoint": copied.to_dict()}, text, as_json=options.json)


def _print_import(path: Path, found: Verification, url: str, kept: Checkpoint | None, options: LedgerOptions) -> None:
    closed = kept is None
    why = (
        "every account is closed: without a checkpoint, an old copy would restore budget that has been spent since"
        if closed
        else "it is not behind its checkpoint, so its accounts are open as before"
    )
    form = found.to_dict() | {"file": str(path), "url": url, "closed": closed}
    print_result(form, f"read {path} into {url}\n{found}\n{why}", as_json=options.json)


class Finding(NamedTuple):
    """One result of an examination, with advice if something needs attention."""

    what: str
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding in plain types."""
        return {"what": self.what, "found": self.found, "advice": self.advice or None}


def examine(options: LedgerOptions) -> Iterator[Finding]:
    """Examine what a ledger depends on: first what can be seen without opening it. No entry is replayed."""
    yield Finding(
        "versions",
        f"odograph {version('odograph')}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}",
    )
    if options.url.startswith(_SQLITE_PREFIX):
        yield from _examine_file(Path(unquote(options.url.removeprefix(_SQLITE_PREFIX))).absolute().resolve())
    try:
        with options.ledger(accept_fsync_off=True) as ledger:
            yield from _examine_ledger(ledger)
    except InvalidArgument:
        raise
    except OdographError as problem:
        yield Finding("ledger", str(problem), "nothing more can be checked until this is solved")


def _examine_ledger(ledger: Ledger) -> Iterator[Finding]:
    """Examine a ledger that can be opened: its size, schema, settings, whether it can be written, its times."""
    balances = ledger.backend.balances()
    count = sum(balance.sequence + 1 for balance in balances.values())
    yield Finding("ledger", f"{ledger.url}, entries: {count}, accounts: {len(balances)}")
    now = time.time_ns() // 1000
    if isinstance(ledger.backend, LocalBackend):
        store = ledger.backend.store
        yield Finding("schema", f"{SCHEMA}, which this version of Odograph writes")
        settings = store.settings()
        yield from _examine_server(settings, now) if "fsync" in settings else _examine_sqlite(settings)
        yield _examine_writing(store)
    elif (served := getattr(ledger.backend, "version", None)) is not None:
        yield _examine_service(served)
    clock = examine_clock(balances.values(), now)
    back = [*_set_back(ledger, balances.values())]
    yield clock._replace(found=f"{clock.found}; it was set back before {', '.join(back)}") if back else clock


def _examine_service(served: str) -> Finding:
    own = version("odograph")
    same = served.split(".")[:2] == own.split(".")[:2]
    advice = "upgrade the service and its clients together: they may not understand each other"
    return Finding("service", f"odograph {served}, asked by odograph {own}", "" if same else advice)


def _examine_writing(store: Store) -> Finding:
    """Have something written and synced that changes nothing."""
    begun = time.perf_counter()
    try:
        store.probe()
    except OdographError as problem:
        return Finding("writing", str(problem), "charges fail now for the same reason; solve it, or ask its owner")
    return Finding("writing", f"a write was synced in {1e3 * (time.perf_counter() - begun):.1f} ms")


def _examine_sqlite(settings: Mapping[str, str]) -> Iterator[Finding]:
    mode, synced = settings["journal_mode"], settings["synchronous"]
    found = f"journal mode {mode}, synchronous {_SYNCHRONOUS.get(synced, synced)}"
    advice = "" if (mode, synced) == ("wal", "2") else "another program has changed them: find and stop it"
    yield Finding("settings", found, advice)


def _examine_server(settings: Mapping[str, str], now: int) -> Iterator[Finding]:
    """Examine the settings of a PostgreSQL server, and compare its clock with this one."""
    yield Finding("server", f"PostgreSQL {settings['server_version']}")
    for name, (expected, advice) in _SERVER_SETTINGS.items():
        yield Finding("settings", f"{name} = {settings[name]}", "" if settings[name] == expected else advice)
    yield Finding(
        "settings",
        f"synchronous_commit = {settings['synchronous_commit']}; Odograph sets it to on in its own transactions",
    )
    skew = (int(settings["clock"]) - now) / 1e6
    yield Finding(
        "clocks",
        f"the server's is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
        "" if abs(skew) <= _MAX_SKEW else "set the one that is wrong, by NTP: entries have the server's time",
    )


def _set_back(ledger: Ledger, balances: Iterable[Balance]) -> Iterator[str]:
    """Yield recent entries that are earlier than the one before them, of the accounts that were used last."""
    last = sorted(balances, key=lambda balance: balance.time, reverse=True)[:_MAX_ACCOUNTS_READ]
    for balance in last:
        first = max(0, balance.sequence + 1 - _MAX_ENTRIES_READ)
        entries = ledger.backend.history(balance.head.name, first, _MAX_ENTRIES_READ)
        for before, entry in pairwise(entries):
            if entry.time < before.time:
                yield f"{balance.head.name}#{entry.sequence}"


def examine_clock(balances: Iterable[Balance], now: int) -> Finding:
    """Compare the times of the last entries with a clock."""
    last = sorted((balance.time, balance.head.name) for balance in balances)
    ahead = [(time, name) for time, name in reversed(last) if time > now + AHEAD]
    if not ahead:
        found = (
            f"the last entry is of {moment(last[-1][0]):%Y-%m-%d %H:%M:%S} UTC" if last else "there are no entries"
        )
        return Finding("clock", found)
    names = ", ".join(f"{name} ({moment(time):%Y-%m-%d %H:%M:%S} UTC)" for time, name in ahead[:_MAX_ACCOUNTS_SHOWN])
    more = f" and {len(ahead) - _MAX_ACCOUNTS_SHOWN} more" if len(ahead) > _MAX_ACCOUNTS_SHOWN else ""
    return Finding(
        "clock",
        f"the last entries of {names}{more} are later than the present time, {moment(now):%Y-%m-%d %H:%M:%S} UTC",
        "a clock was ahead when they were written, or this one is behind. Set the clock; later entries will have its"
        " time. Reservations made while the clock was ahead expire by the time that it showed",
    )


def _examine_file(file: Path) -> Iterator[Finding]:
    """Examine where a SQLite file is, or will be: its file system, space, permissions, locks, write-ahead log."""
    folder = file.parent
    if not folder.is_dir():
        yield Finding("folder", f"there is no folder {folder}", "create it, or correct --url")
        return
    kind, read_only = _file_system(file)
    advice = "SQLite must not be used over a network file system: move the ledger to a local disk, or use PostgreSQL"
    remark = _VOLATILE_FILE_SYSTEMS.get(kind, "")
    yield Finding("file system", (kind or "unknown") + remark, advice if kind in _NETWORK_FILE_SYSTEMS else "")
    if read_only:
        yield Finding("mount", "read-only", "mount it for writing: no charge can be stored")
    free = shutil.disk_usage(folder).free
    advice = "make room: charges are refused on a full disk, and the log alone may take 16 MB"
    yield Finding("space", f"{free / 2**20:,.0f} MB free", advice if free < _MIN_FREE else "")
    yield from _examine_permissions(file)
    yield _examine_locks(folder)
    log = file.with_name(f"{file.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    advice = "a program keeps reading, which prevents the log from being written back; find and end it"
    yield Finding("log", f"{size:,} bytes", advice if size > _WAL_SIZE_WARNING else "")


def _examine_permissions(file: Path) -> Iterator[Finding]:
    """Examine whether this user can write the files and others cannot."""
    files = [one for end in _FILE_ENDS if (one := file.with_name(file.name + end)).exists()]
    denied = [one for one in files if not os.access(one, os.R_OK | os.W_OK)]
    if not os.access(file.parent, os.W_OK | os.X_OK):
        denied.insert(0, file.parent)
    open_to_all = [one for one in (file.parent, *files) if one.stat().st_mode & stat.S_IWOTH and not _is_sticky(one)]
    shown = [one for one in files if one.name.endswith(_KEY_FILE_END) and one.stat().st_mode & 0o077]
    if denied:
        names = ", ".join(map(str, denied))
        advice = f"run as the owner of the ledger, or let this user write there: {names}"
        yield Finding("permissions", f"this user cannot write {names}", advice)
    for one in open_to_all:
        yield Finding("permissions", f"every user can write {one}", f"chmod o-w {shlex.quote(str(one))}")
    for one in shown:
        yield Finding("permissions", f"other users can read {one}", f"chmod 600 {shlex.quote(str(one))}")
    if not (denied or open_to_all or shown):
        yield Finding("permissions", "this user can write, and not every user")


def _is_sticky(path: Path) -> bool:
    """Return whether it is a folder such as /tmp, where users cannot replace each other's files."""
    return path.is_dir() and bool(path.stat().st_mode & stat.S_ISVTX)


def _examine_locks(folder: Path) -> Finding:
    """Have two processes lock and write a file in the folder, which goes away again."""
    advice = "SQLite cannot be used here safely: move the ledger to a local disk, or use PostgreSQL"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".odograph-doctor-") as scratch:
            problem = _try_locks(f"{scratch}/locks.db")
    except OSError as error:
        return Finding("locks", f"no file can be made in {folder} ({error.strerror})", "let this user write there")
    except sqlite3.Error as error:
        problem = f"SQLite failed ({error})"
    if problem:
        return Finding("locks", f"in {folder} {problem}", advice)
    return Finding("locks", "a second process waits for the first, and then sees what it wrote")


def _try_locks(path: str) -> str:
    """Return what is wrong with locks, or an empty string."""

    def other() -> str:
        command = [sys.executable, "-I", "-c", _SECOND_PROCESS, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603  this Python
        return done.stdout.strip()

    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode = wal").fetchone()
        if mode != "wal":
            return f"there can be no write-ahead log (SQLite chose {mode})"
        connection.execute("CREATE TABLE written (number INTEGER)")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO written VALUES (1)")
        if other() != "SQLITE_BUSY":
            return "a lock of one process does not keep another one out"
        connection.execute("COMMIT")
        return "" if other() == "1" else "a process does not see what another one has written"


def _file_system(path: Path) -> tuple[str, bool]:
    """Return the type of the file system of a file, an empty string if it is unknown, and whether it is read-only."""
    try:
        lines = _MOUNT_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return "", False
    kinds: dict[Path, tuple[str, bool]] = {}
    for line in lines:
        fields = line.split(" ")
        mounted = _ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4])
        kind = fields[fields.index("-") + 1]
        kinds[Path(mounted)] = kind, "ro" in fields[5].split(",")  # the last mount on a folder covers earlier ones
    return next((kinds[parent] for parent in (path, *path.parents) if parent in kinds), ("", False))


@with_options
def doctor(*, options: LedgerOptions) -> None:
    """Check what the ledger depends on: versions, storage, locks, database settings, clocks. Changes nothing.

    Each finding that needs attention says what to do; the exit code is then 5.
    """
    findings = [*examine(options)]
    text = "\n".join(f"{one.what}: {one.found}" + (f"\n  {one.advice}" if one.advice else "") for one in findings)
    print_result({"findings": [one.to_dict() for one in findings]}, text, as_json=options.json)
    if any(one.advice for one in findings):
        raise typer.Exit(_ATTENTION_EXIT_CODE)


_HEIGHT, _MARGIN = 12, 10  # of the chart in the terminal: lines, and columns for labels
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN: Final = "   ....##"
_LATTICE: Final = 200  # spacings of the adversary's lattice in epsilon
_FILE_TYPES: Final = (".png", ".svg", ".pdf")


def figures(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help=f"Names of figures: {', '.join(PANELS)}. By default all."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("figures"),
    json: AsJson = False,
) -> None:
    """Draw the figures of the paper and the documentation, each as PNG, SVG and CSV."""
    files = [str(file) for file in draw_all(out, names or None)]
    print_result({"files": files}, "\n".join(files), as_json=json)


@with_options
def plot(
    account: Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)],
    *,
    options: LedgerOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture to this file: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Plot an account's odometer reading after each step, beside its promise: in the terminal, or to a file."""
    if out is not None and out.suffix not in _FILE_TYPES:
        raise InvalidArgument(f"--out must end in {', '.join(_FILE_TYPES)} (got {str(out)!r})")
    with options.ledger() as ledger:
        own = ledger.account(account)
        if out is not None:
            save_picture(own, out)
            print_result({"account": account, "file": str(out)}, f"wrote {out}", as_json=options.json)
            return
        balance = ledger.backend.balances([account])[account]  # one read: totals and sequence belong together
        _, *steps = states(own, balance.totals, balance.sequence)  # the first is the state at its opening
        losses = [own.compiled.reading(state.totals).loss for state in steps]
        now = str(own.compiled.reading(balance.totals))
    epsilon = None if own.policy.epsilon is None else float(own.policy.epsilon)
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    form = {"account": account, "promise": epsilon, "losses": finite}
    console = Console()
    lines = [
        f"{account}: upper bound of the loss after each of {len(losses)} steps",
        *chart(losses, epsilon, console.width - _MARGIN - 1, plain=not console.encoding.startswith("utf")),
        now,
    ]
    print_result(form, "\n".join(lines) if losses else f"{account} has spent nothing yet", as_json=options.json)


def save_picture(account: LedgerAccount, path: Path) -> None:
    """Write an account's plot as a picture."""
    account.plot(ax=blank_axes()).figure.savefig(path)


def chart(losses: Sequence[float], promise: float | None, width: int, *, plain: bool = False) -> list[str]:
    """Return a bar chart as lines of text: one column per step, or per group of steps if there are too many.

    The promised epsilon, if there is one, is a dashed line. A loss without a bound fills its column.
    """
    columns = min(max(width, 1), len(losses))
    shown = [losses[-(-(i + 1) * len(losses) // columns) - 1] for i in range(columns)]
    wide = max(1, min(6, width // max(1, columns)))
    top = (max([promise or 0.0, *(loss for loss in shown if math.isfinite(loss))]) or 1.0) * 1.05
    line = None if promise is None else math.ceil(promise / top * _HEIGHT) - 1
    marks = _PLAIN if plain else _EIGHTHS
    lines = []
    for row in reversed(range(_HEIGHT)):
        label = f"{promise:.4g}" if row == line else f"{top:.3g}" if row == _HEIGHT - 1 else "0" if row == 0 else ""
        cells = ""
        for loss in shown:
            filled = round(8 * min(1.0, max(0.0, loss / top * _HEIGHT - row)))
            mark = marks[filled]
            cells += ("-" if mark == " " and row == line else mark) * wide
        lines.append(f"{label:>{_MARGIN - 2}} |{cells}".rstrip() + (" promise" if row == line else ""))
    return lines


@with_options
def plan(
    epsilon: Annotated[str, typer.Option(help="Epsilon of the promise, read exactly as typed.", show_default=False)],
    delta: Annotated[str, typer.Option(help="Delta of the promise, read exactly as typed.", show_default=False)],
    *,
    asked: CostOptions,
    json: AsJson = False,
) -> None:
    """Print how many requests a new account would admit, by what it is made for: its reserve. Opens nothing.

    Without a cost, requests of the usual kinds are counted.

    odograph plan --epsilon 1 --delta 1e-6 --pure 0.01
    """
    with progress("solving the exact filter", quiet=json) as report:
        choices = {name: compile_policy(Policy(epsilon, delta, reserve=name), progress=report) for name in RESERVES}
    costs = [asked.guarantee()] if asked.is_given else usual_requests(epsilon)
    counts = outlook(choices, costs)
    target = choices["mixed"].policy.target
    table = Table(box=None, title=f"{target}: requests in a row, by reserve", title_justify="left", pad_edge=False)
    table.add_column("request")
    for name in RESERVES:
        table.add_column(name, justify="right")
    for cost, row in counts.items():
        table.add_row(cost.brief(), *(f"{row[name]:,}" for name in RESERVES))
    made_for = [f"{name}: {choice.gives}" for name, choice in RESERVES.items()]
    form = {
        "target": target,
        "reserves": {name: choice.gives for name, choice in RESERVES.items()},
        "requests": [{"cost": cost.to_dict(), "how_many": row} for cost, row in counts.items()],
    }
    print_result(form, Group(table, "", *made_for), as_json=json)


def budget(  # noqa: PLR0913  each is one option
    epsilon: Annotated[str, typer.Option(help="Epsilon of the target, read exactly as typed.")],
    delta: Annotated[str, typer.Option(help="Delta of the target, all of it for the filter.")],
    *,
    fine: Annotated[bool, typer.Option("--fine", help="Solve with finer units than usual: a minute or two.")] = False,
    pure_only: Annotated[
        bool, typer.Option("--pure-only", help="For pure DP steps only, without Gaussian ones.")
    ] = False,
    adversary: Annotated[
        bool, typer.Option("--adversary", help="Also print a budget that an explicit adversary refutes.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Print the certified budget of the exact filter for a target, solving for it if necessary."""
    policy = Policy(epsilon, delta, filter=Exact(takes=("pure",) if pure_only else FAMILIES))
    need = policy.need
    if need is None:  # pragma: no cover  the policy's filter is the exact one
        raise InvalidPolicy("the policy has no exact filter")
    with progress("solving", quiet=json) as report:
        found, source = find_budget(need, fineness=FINE if fine else None, progress=report)
    paper = filter_time(float(need.epsilon), float(need.delta))
    rows = [
        ("target", f"{policy.target}, for {' and '.join(found.takes)} steps of any size"),
        ("quantum", f"{float(found.quantum):.12g} of intrinsic time"),
        ("units", str(found.units)),
        ("quantum x units", f"{found.intrinsic:.6g} (for comparison; the budget is the pair)"),
        ("the paper's y*", f"{paper:.6g}"),
        ("ratio", f"{found.intrinsic / paper:.4g} times the paper's"),
        ("source", source),
    ]
    form = {
        "epsilon": float(need.epsilon),
        "delta": float(need.delta),
        "takes": [*found.takes],
        "quantum": str(found.quantum),
        "units": found.units,
        "intrinsic": found.intrinsic,
        "paper": paper,
        "source": source,
    }
    if adversary:
        refuted = float(refuted_intrinsic(need.epsilon, need.delta, float(need.epsilon) / _LATTICE))
        form["refuted"] = refuted
        rows.append(("refuted", _refuted_text(refuted, found)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    print_result(form, table, as_json=json)


def _refuted_text(refuted: float, found: Budget) -> str:
    gap = refuted / found.intrinsic - 1
    return f"{refuted:.6g} by an analyst with steps of multiples of epsilon/{_LATTICE}: {gap:.2%} above"
