"""Connections to PostgreSQL that can be trusted to keep what was committed, and behind a pool."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from odograph.errors import LedgerBusy, LedgerError

__all__ = ["Connection", "connected", "line_of", "shown_url"]

Connection = psycopg.Connection[tuple[Any, ...]]


def shown_url(url: str) -> str:
    """Return a URL without its password and options: what messages and pages may show."""
    try:
        parts = urlsplit(url)
    except ValueError as problem:
        raise LedgerError(f"this is no address of a database: {problem}") from problem
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}@{host}" if name else host, query=""))


def connected(url: str, *, timeout: float, accept_fsync_off: bool) -> Connection:
    """Return a connection in autocommit; one to a server that does not sync its disk is refused."""
    shown, seconds = shown_url(url), max(2, int(timeout))  # less is taken for none
    try:
        connection = psycopg.connect(
            url,
            autocommit=True,
            prepare_threshold=None,  # a prepared statement is state, and a pool may hand the next one to others
            connect_timeout=seconds,
            application_name="odograph",
            tcp_user_timeout=1000 * seconds,
        )
    except psycopg.OperationalError as problem:
        raise LedgerBusy(f"{shown} cannot be reached ({line_of(problem)}); nothing was charged") from problem
    except psycopg.Error as problem:
        raise LedgerError(f"{shown} is not a database that can be used ({line_of(problem)})") from problem
    try:
        unsafe = connection.execute(b"SHOW fsync").fetchone() == ("off",)
    except BaseException:
        connection.close()
        raise
    if unsafe and not accept_fsync_off:
        connection.close()
        raise LedgerError(
            f"{shown} runs with fsync=off, so a crash of its machine loses what it acknowledged; refused."
            " A test may connect with accept_fsync_off=True"
        )
    return connection


def line_of(problem: psycopg.Error) -> str:
    """Return an error of PostgreSQL on one line."""
    return " ".join(str(problem).split()) or type(problem).__name__
