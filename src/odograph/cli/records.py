"""Records of a ledger: history, verify, checkpoint, erase; copies: backup, restore, export, import; and doctor."""

from __future__ import annotations

import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

import typer
from rich.console import Console
from rich.table import Table

from odograph.cli.options import (
    AsJson,
    CheckpointFile,
    LedgerOptions,
    account_names,
    new_file,
    print_result,
    progress,
    read_checkpoint,
    with_options,
)
from odograph.compile import find_budget
from odograph.core.conversions import filter_time
from odograph.core.filters import Exact
from odograph.core.policy import Policy
from odograph.core.value_iteration import COARSE, FAMILIES, FINE, Budget, refuted_intrinsic
from odograph.errors import InvalidArgument, InvalidPolicy, LedgerError, LedgerNotFound
from odograph.figures import PANELS, blank_axes, draw_all
from odograph.ledger.entries import AHEAD, moment
from odograph.ledger.ledger import Ledger, LedgerAccount, states
from odograph.ledger.results import Checkpoint, Verification
from odograph.ledger.stores.base import SCHEMA, Balance

__all__ = [
    "Finding",
    "backup",
    "budget",
    "chart",
    "checkpoint",
    "doctor",
    "erase",
    "examine",
    "examine_clock",
    "export",
    "figures",
    "history",
    "import_",
    "plot",
    "restore",
    "save_picture",
    "verify",
]

_RANDOM_KEY: Final = re.compile("[0-9a-f]{32}")  # an idempotency key that was generated; it is shortened
_ATTENTION_EXIT_CODE: Final = 5
_SQLITE_PREFIX: Final = "sqlite:///"
_MOUNT_INFO: Final = Path("/proc/self/mountinfo")
# SQLite's locks and shared memory do not work between machines that share these.
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    ["9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"]
)
_ESCAPE: Final = re.compile(r"\\(\d{3})")  # a space in a folder name is written \040
_WAL_SIZE_WARNING: Final = 256 * 2**20  # bytes; the log is written back at 16 MB, unless a program keeps reading
_MAX_ACCOUNTS_SHOWN: Final = 3  # in one finding


class _Erasable(StrEnum):
    """What can be erased."""

    NOTE = "note"
    PRINCIPAL = "principal"


@with_options
def history(
    account: Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)],
    *,
    options: LedgerOptions,
    first: Annotated[
        int | None,
        typer.Option(
            help="The first entry to show; a negative number counts from the end. By default the last entries."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="The maximum number of entries to show.")] = 20,
) -> None:
    """Show a page of an account's entries: charges, refusals, reservations and how they were resolved."""
    with options.ledger() as ledger:
        own = ledger.account(account)
        size = own.size
        page = own.history(-count if first is None and count > 0 else first or 0, count)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("entry", "time (UTC)", "verb", "cost", "by", "key", "note"):
        table.add_column(name, no_wrap=name in ("entry", "time (UTC)", "verb", "key"))
    for entry in page:
        key = f"{entry.key[:6]}..." if _RANDOM_KEY.fullmatch(entry.key) else entry.key
        cost = "" if entry.cost is None else str(entry.cost)
        # Notes are untrusted: characters that would control the terminal are replaced.
        plain = "".join(letter if letter.isprintable() else " " for letter in entry.note)
        table.add_row(
            str(entry.sequence), f"{entry.time:%Y-%m-%d %H:%M:%S}", entry.verb, cost, entry.principal, key, plain
        )
    begin = page[0].sequence if page else size
    if page and len(page) < size:
        table.caption = f"entries {begin} to {begin + len(page) - 1} of {size}; --first and --count show others"
        table.caption_justify = "left"
    form = {"account": account, "size": size, "entries": [entry.to_dict() for entry in page]}
    print_result(
        form, table if page else f"there are no entries from {first} on: {account} has {size}", as_json=options.json
    )


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


def examine(ledger: Ledger, now: int) -> list[Finding]:
    """Examine the storage and the clock of a ledger; `now` is in microseconds since 1970. No entry is replayed."""
    balances = ledger.backend.balances()
    count = sum(balance.sequence + 1 for balance in balances.values())
    findings = [Finding("ledger", f"{ledger.url}, entries: {count}, accounts: {len(balances)}")]
    if not ledger.url.startswith(("http://", "https://")):
        findings.append(Finding("schema", f"{SCHEMA}, which this version of Odograph writes"))
    if ledger.url.startswith(_SQLITE_PREFIX):
        findings += _examine_file(Path(unquote(ledger.url.removeprefix(_SQLITE_PREFIX))).absolute())
    findings.append(examine_clock(balances.values(), now))
    return findings


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


def _examine_file(path: Path) -> Iterator[Finding]:
    """Examine the file system and the write-ahead log of a SQLite file."""
    file = path.resolve()
    kind = _file_system(file)
    advice = "SQLite must not be used over a network file system: move the ledger to a local disk, or use PostgreSQL"
    yield Finding("file system", kind or "unknown", advice if kind in _NETWORK_FILE_SYSTEMS else "")
    log = file.with_name(f"{file.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    advice = "a program keeps reading, which prevents the log from being written back; find and end it"
    yield Finding("log", f"{size:,} bytes", advice if size > _WAL_SIZE_WARNING else "")


def _file_system(path: Path) -> str:
    """Return the type of the file system of a file; an empty string if it is unknown."""
    try:
        lines = _MOUNT_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    kinds: dict[Path, str] = {}
    for line in lines:
        fields = line.split(" ")
        mounted = _ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4])
        kinds[Path(mounted)] = fields[fields.index("-") + 1]  # the last mount on a folder covers earlier ones
    return next((kinds[parent] for parent in (path, *path.parents) if parent in kinds), "")


@with_options
def doctor(*, options: LedgerOptions) -> None:
    """Examine the storage and the clock of the ledger. Exits with 5 if something needs attention."""
    with options.ledger() as ledger:
        findings = examine(ledger, time.time_ns() // 1000)
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


def budget(  # noqa: PLR0913  each is one option
    epsilon: Annotated[str, typer.Option(help="Epsilon of the target, read exactly as typed.")],
    delta: Annotated[str, typer.Option(help="Delta of the target, all of it for the filter.")],
    *,
    fine: Annotated[
        bool, typer.Option("--fine", help="Solve at the resolution of the shipped table: a minute or two.")
    ] = False,
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
        found, source = find_budget(need, fineness=FINE if fine else COARSE, progress=report)
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
