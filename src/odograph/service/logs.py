"""Logs: JSON lines on standard error. A line says who asked for what and how it ended, and never what was in it.

Tokens, cookies, notes, costs and the texts of exceptions have no way in: a line has these fields and no others. What
a database, a disk or a file said is written when the service begins to fail, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Final

from msgspec import Struct
from msgspec.json import Encoder

__all__ = ["configure", "failure", "flush", "request_line", "state"]

_PACKAGE: Final = Path(__file__).parents[1]
_ENCODER: Final = Encoder()
_SERVER: Final = "uvicorn"
_SOON: Final = 0.05  # seconds
_LONGEST: Final = 500  # characters of a message


class _Line(Struct, omit_defaults=True):
    """Everything that a line may say."""

    time: datetime
    level: str
    event: str
    request_id: str = ""
    method: str = ""
    route: str = ""
    status: int = 0
    milliseconds: float = -1.0
    account: str = ""
    principal: str = ""
    key: str = ""
    error: str = ""
    where: str = ""
    logger: str = ""
    message: str = ""


class _Output:
    """Where lines go: nowhere, until `configure` says so."""

    file: BinaryIO | None = None
    level: int = logging.INFO
    gathered: ClassVar[list[_Line | tuple[Any, ...]]] = []


class _Handler(logging.Handler):
    """The lines of other loggers: of the web server what it says, of anybody else only where it was said."""

    def emit(self, record: logging.LogRecord) -> None:
        line = _Line(datetime.now(UTC), record.levelname.lower(), "log", logger=record.name)
        line.where = f"{record.module}.py:{record.lineno}"
        if record.name.partition(".")[0] == _SERVER:
            # After the first line there may be a traceback, and the text of an exception.
            line.message = record.getMessage().partition("\n")[0]
        if record.exc_info and record.exc_info[0] is not None:
            line.error = record.exc_info[0].__name__
            line.where = _where(record.exc_info[2]) or line.where
        _write(line)


def configure(level: str, file: BinaryIO | None = None) -> None:
    """Write lines of this level and above to standard error, or to a file; those of the web server too.

    The web server is started without a configuration of its own for logs (`log_config=None, access_log=False`).
    """
    _Output.file = file or open(2, "wb", buffering=0, closefd=False)  # noqa: SIM115  unbuffered: one write a line
    _Output.level = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.addHandler(_Handler(_Output.level))
    logging.getLogger(f"{_SERVER}.error").setLevel(_Output.level)
    access = logging.getLogger(f"{_SERVER}.access")
    access.handlers, access.propagate = [], False  # it would write paths and queries as they came


def request_line(  # noqa: PLR0913  these and no others
    *,
    request_id: str,
    method: str,
    route: str,
    status: int,
    milliseconds: float,
    account: str = "",
    principal: str = "",
    key: str = "",
    error: str = "",
) -> None:
    """Write a line about an answered request: `route` is the template, `key` the key's id, `error` its code."""
    if _Output.level > logging.INFO:
        return
    _gather((time(), request_id, method, route, status, milliseconds, account, principal, key, error))


def state(level: str, event: str, message: str) -> None:
    """Write a line about the service itself, such as a ledger that cannot be reached, and why."""
    if _Output.level > logging.getLevelNamesMapping()[level.upper()]:
        return
    _write(_Line(datetime.now(UTC), level, event, message=message.partition("\n")[0][:_LONGEST]))


def failure(error: BaseException, *, request_id: str = "") -> None:
    """Write a line about an exception that nobody expected: its type and where in this package, not its text."""
    where = _where(error.__traceback__)
    _write(_Line(datetime.now(UTC), "error", "failure", request_id, error=type(error).__name__, where=where))


def _where(trace: TracebackType | None) -> str:
    """Return the last line of this package that an exception went through."""
    found = ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            found = f"{path.relative_to(_PACKAGE.parent).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def flush() -> None:
    """Write the lines that were gathered."""
    gathered, _Output.gathered = _Output.gathered, []
    if not gathered or _Output.file is None:
        return
    lines = [_of_request(line) if isinstance(line, tuple) else line for line in gathered]
    try:
        text = _ENCODER.encode_lines(lines)
    except UnicodeEncodeError:  # half a character, from somebody who tries things out
        text = _ENCODER.encode_lines([_mended(line) for line in lines])
    with suppress(OSError, ValueError):  # nobody reads the log any more, and that is no reason not to answer
        _Output.file.write(text)


def _of_request(line: tuple[Any, ...]) -> _Line:
    when, request_id, method, route, status, took, *who = line
    now = datetime.fromtimestamp(when, UTC)
    return _Line(now, "info", "request", request_id, method, route, status, round(took, 3), *who)


def _gather(line: tuple[Any, ...]) -> None:
    """Write a line soon, with others: a system call for every request would give other threads a turn each time."""
    if _Output.file is None:
        return
    if not _Output.gathered:
        try:
            asyncio.get_running_loop().call_later(_SOON, flush)
        except RuntimeError:  # nobody would come back to it
            _write(line)
            return
    _Output.gathered.append(line)


def _write(line: _Line | tuple[Any, ...]) -> None:
    """Write a line at once, after those that were gathered."""
    if _Output.file is not None:
        _Output.gathered.append(line)
        flush()


def _mended(line: _Line) -> _Line:
    for name in _Line.__struct_fields__:
        if isinstance(value := getattr(line, name), str):
            setattr(line, name, value.encode(errors="replace").decode())
    return line
