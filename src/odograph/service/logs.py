"""Logs: JSON lines on standard error. A line has the caller, the route and the outcome, never the content.

A line has a fixed set of fields, none of which can hold a token, cookie, note, cost or exception text. The message of
a database, disk or file is logged only when the service begins to fail. structlog would format each line while the
request waits; here request lines are collected as tuples and encoded together, every 50 milliseconds.
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
_FLUSH_INTERVAL: Final = 0.05  # seconds
_MAX_MESSAGE: Final = 500  # characters


class _Line(Struct, omit_defaults=True):
    """All the fields of a line."""

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
    """Where lines are written: nowhere before `configure`."""

    file: BinaryIO | None = None
    level: int = logging.INFO
    pending: ClassVar[list[_Line | tuple[Any, ...]]] = []


class _Handler(logging.Handler):
    """Takes records of other loggers: the message of the web server's, only the location of all others."""

    def emit(self, record: logging.LogRecord) -> None:
        line = _Line(datetime.now(UTC), record.levelname.lower(), "log", logger=record.name)
        line.where = f"{record.module}.py:{record.lineno}"
        if record.name.partition(".")[0] == _SERVER:
            # The lines after the first may hold a traceback with the text of an exception.
            line.message = record.getMessage().partition("\n")[0]
        if record.exc_info and record.exc_info[0] is not None:
            line.error = record.exc_info[0].__name__
            line.where = _where(record.exc_info[2]) or line.where
        _write(line)


def configure(level: str, file: BinaryIO | None = None) -> None:
    """Write lines of this level and above, including the web server's, to standard error or to a file.

    The web server must have no logging configuration of its own (`log_config=None, access_log=False`).
    """
    _Output.file = file or open(2, "wb", buffering=0, closefd=False)  # noqa: SIM115  unbuffered: one write per flush
    _Output.level = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.addHandler(_Handler(_Output.level))
    logging.getLogger(f"{_SERVER}.error").setLevel(_Output.level)
    access = logging.getLogger(f"{_SERVER}.access")
    access.handlers, access.propagate = [], False  # it would write paths and queries unredacted


def request_line(  # noqa: PLR0913  the fields of a line
    *,
    request_id: str,
    method: str,
    route: str,
    status: int,
    milliseconds: float,
    account: str = "",
    principal: str = "",
    api_key_id: str = "",
    error: str = "",
) -> None:
    """Log a request: `route` is the template of its path, `error` the code of its error."""
    if _Output.level > logging.INFO:
        return
    _write_soon((time(), request_id, method, route, status, milliseconds, account, principal, api_key_id, error))


def state(level: str, event: str, message: str) -> None:
    """Log a state of the service itself, such as an unreachable ledger, with its reason."""
    if _Output.level > logging.getLevelNamesMapping()[level.upper()]:
        return
    _write(_Line(datetime.now(UTC), level, event, message=message.partition("\n")[0][:_MAX_MESSAGE]))


def failure(error: BaseException, *, request_id: str = "") -> None:
    """Log an unexpected exception: its type and location in this package, not its text."""
    where = _where(error.__traceback__)
    _write(_Line(datetime.now(UTC), "error", "failure", request_id, error=type(error).__name__, where=where))


def _where(trace: TracebackType | None) -> str:
    """Return the last line of this package in a traceback."""
    found = ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            found = f"{path.relative_to(_PACKAGE.parent).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def flush() -> None:
    """Write the pending lines."""
    pending, _Output.pending = _Output.pending, []
    if not pending or _Output.file is None:
        return
    lines = [_line_from(line) if isinstance(line, tuple) else line for line in pending]
    try:
        text = _ENCODER.encode_lines(lines)
    except UnicodeEncodeError:  # a lone surrogate in what a caller sent
        text = _ENCODER.encode_lines([_without_surrogates(line) for line in lines])
    with suppress(OSError, ValueError):  # a closed log must not fail requests
        _Output.file.write(text)


def _line_from(line: tuple[Any, ...]) -> _Line:
    when, request_id, method, route, status, took, *who = line
    now = datetime.fromtimestamp(when, UTC)
    return _Line(now, "info", "request", request_id, method, route, status, round(took, 3), *who)


def _write_soon(line: tuple[Any, ...]) -> None:
    """Write a line with the next flush: a system call per request would let other threads take the interpreter."""
    if _Output.file is None:
        return
    if not _Output.pending:
        try:
            asyncio.get_running_loop().call_later(_FLUSH_INTERVAL, flush)
        except RuntimeError:  # without an event loop there is no later flush
            _write(line)
            return
    _Output.pending.append(line)


def _write(line: _Line | tuple[Any, ...]) -> None:
    """Write a line at once, after the pending ones."""
    if _Output.file is not None:
        _Output.pending.append(line)
        flush()


def _without_surrogates(line: _Line) -> _Line:
    for name in _Line.__struct_fields__:
        if isinstance(value := getattr(line, name), str):
            setattr(line, name, value.encode(errors="replace").decode())
    return line
