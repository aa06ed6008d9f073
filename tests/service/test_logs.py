"""Lines of the log: one JSON document each, and no secret in any of them."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odograph import PureDP
from odograph.errors import InvalidGuarantee
from odograph.service import logs

TOKEN = "odo_" + "t0ken" * 8 + "abc"
SECRETS = [TOKEN, "odograph_session=c00kie", "a note about bob", "0.123456789"]

Lines = list[dict[str, Any]]


def leaks(text: str) -> list[str]:
    """The checker: which secrets are in a text."""
    return [secret for secret in SECRETS if secret in text]


def read(text: str) -> Lines:
    return [json.loads(line) for line in text.splitlines()]


class Output(io.BytesIO):
    """A file in memory that counts how often it was written to."""

    writes = 0

    def write(self, text: Any, /) -> int:  # noqa: ANN401  as the base class
        self.writes += 1
        return super().write(text)

    def text(self) -> str:
        return self.getvalue().decode()


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    """Everything that `configure` changes, put back afterwards."""
    monkeypatch.setattr("odograph.service.logs._Output.file", None)
    monkeypatch.setattr("odograph.service.logs._Output.level", logging.INFO)
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers])
    for name in ("uvicorn.error", "uvicorn.access"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    level = logging.getLogger("uvicorn.error").level
    found = Output()
    logs.configure("info", found)
    yield found
    logging.getLogger("uvicorn.error").setLevel(level)


def answered(**changed: str) -> None:
    fields: dict[str, Any] = {
        "request_id": "f00d",
        "method": "POST",
        "route": "/v1/accounts/{name}/spends",
        "status": 201,
        "milliseconds": 1.23456,
        "account": "census",
        "principal": "alice",
        "api_key_id": "0123456789ab",
    }
    logs.request_line(**fields | changed)


def failed() -> InvalidGuarantee:
    """An exception that passed through this package, with secrets in its text."""
    try:
        PureDP(" ".join(SECRETS))
    except InvalidGuarantee as error:
        return error
    raise AssertionError


def test_a_request_is_one_line_of_these_fields_in_one_write(output: Output) -> None:
    answered()
    (line,) = read(output.text())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "f00d",
        "method": "POST",
        "route": "/v1/accounts/{name}/spends",
        "status": 201,
        "milliseconds": 1.235,
        "account": "census",
        "principal": "alice",
        "key": "0123456789ab",
    }
    assert output.writes == 1


def test_what_a_request_does_not_have_is_left_out(output: Output) -> None:
    logs.request_line(request_id="f00d", method="GET", route="/health", status=200, milliseconds=0.0)
    (line,) = read(output.text())
    assert set(line) == {"time", "level", "event", "request_id", "method", "route", "status", "milliseconds"}


@given(st.text(), st.text())
def test_any_text_stays_on_its_line(account: str, principal: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = Output()
        patch.setattr("odograph.service.logs._Output.file", found)
        patch.setattr("odograph.service.logs._Output.level", logging.INFO)
        answered(account=account, principal=principal)
    (line,) = [json.loads(line) for line in found.text().split("\n")[:-1]]
    assert line.get("account", "") == account
    assert line.get("principal", "") == principal


def test_half_a_character_is_written_as_a_question_mark(output: Output) -> None:
    answered(account="a\ud800b")
    assert read(output.text())[0]["account"] == "a?b"


def test_a_failure_is_its_type_and_place_and_not_its_text(output: Output) -> None:
    error = failed()
    assert leaks(str(error)) != []
    logs.failure(error, request_id="f00d")
    (line,) = read(output.text())
    assert (line["event"], line["level"], line["error"]) == ("failure", "error", "InvalidGuarantee")
    assert line["request_id"] == "f00d"
    file, _, number = line["where"].partition(":")
    assert file.startswith("odograph/core/")
    assert number.isdecimal()
    assert leaks(output.text()) == []


def test_a_failure_outside_this_package_has_no_place(output: Output) -> None:
    logs.failure(ValueError(TOKEN))
    assert "where" not in read(output.text())[0]
    assert leaks(output.text()) == []


def test_other_loggers_say_where_and_not_what(output: Output) -> None:
    logging.getLogger("asyncio").error("Task exception was never retrieved: %s", TOKEN, exc_info=failed())
    logging.getLogger("psycopg.pool").warning("connecting with %s", TOKEN)
    first, second = read(output.text())
    assert (first["logger"], first["error"], first["level"]) == ("asyncio", "InvalidGuarantee", "error")
    assert (second["logger"], second["where"].split(":")[0]) == ("psycopg.pool", "test_logs.py")
    assert leaks(output.text()) == []


def test_of_the_web_server_the_first_line_is_kept(output: Output) -> None:
    server = logging.getLogger("uvicorn.error")
    server.info("Started server process [%d]", 7)
    server.error(f"Traceback (most recent call last):\n ValueError: {TOKEN}")
    logging.getLogger("uvicorn.access").info("GET /?token=%s", TOKEN)
    first, second = read(output.text())
    assert first["message"] == "Started server process [7]"
    assert second["message"] == "Traceback (most recent call last):"
    assert leaks(output.text()) == []


def test_the_level_is_kept(output: Output) -> None:
    logs.configure("warning", output)
    answered()
    logging.getLogger("uvicorn.error").info("hello")
    assert output.text() == ""
    logs.failure(ValueError())
    logging.getLogger("uvicorn.error").warning("hello")
    assert [line["event"] for line in read(output.text())] == ["failure", "log"]


def test_nobody_reading_is_no_reason_to_fail(output: Output) -> None:
    output.close()
    answered()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        logs.configure("info", pipe)
        answered()
        logs.failure(ValueError())


# The web server itself: an application that breaks with a secret in its exception, asked with one in its query.
SERVED = """
import socket, sys
import uvicorn
from odograph.service import logs

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    raise RuntimeError(scope["query_string"].decode())

options = {}
if sys.argv[1] == "ours":
    logs.configure("info")
    options = {"log_config": None, "access_log": False}
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[listening])
"""


def served(whose: str) -> str:
    """Run the web server, ask it once, end it, and return what it wrote."""
    with subprocess.Popen(  # noqa: S603  our own
        [sys.executable, "-c", SERVED, whose], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=20)
        connection.request("GET", f"/?token={TOKEN}", headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 500
        connection.close()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    return out + err


def test_the_web_servers_own_lines_are_json_without_secrets() -> None:
    text = served("ours")
    lines = read(text)
    assert "Application startup complete." in [line.get("message") for line in lines]
    assert [line["message"] for line in lines if line.get("error") == "RuntimeError"] == [
        "Exception in ASGI application"
    ]
    assert leaks(text) == []
    # Control: its usual log has the token in the line of the request, and in the exception.
    assert leaks(served("its own")) == [TOKEN]
