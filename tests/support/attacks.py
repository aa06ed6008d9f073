"""HTTP helpers for tests of the service: clients, accounts, and what every refusal must look like."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from service_server import ServiceThread

from odograph.errors import ERROR_TABLE, OdographError
from odograph.service.endpoint import Route

POLICY: Final = {"epsilon": "1", "delta": "1e-6", "filter": "basic"}
CODES: Final = {error.__name__ for error in ERROR_TABLE}
JSON: Final = {"Content-Type": "application/json"}
# Words of Python's own errors, and paths of tests and of this project: no answer may contain them.
_TELLTALE: Final = re.compile(
    r"Traceback|Error\(|\bobject (?:has no|is not)|unhashable|NoneType|__\w+__|positional argument|keyword argument"
    r"|set_int_max_str_digits|not subscriptable|could not convert|\.py\b|site-packages|sqlite"
    f"|{re.escape(gettempdir())}|{re.escape(str(Path(__file__).parents[2]))}"
)


def reach(service: ServiceThread, token: str | None) -> httpx.Client:
    """Return a client that sends this token, or no token."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=service.url, headers=headers, timeout=60)


def owner_of(service: ServiceThread) -> httpx.Client:
    """Return a client with a new owner's key."""
    return reach(service, service.token("olga"))


def pure(epsilon: str) -> dict[str, Any]:
    """Return a pure cost in its JSON form."""
    return {"kind": "pure", "epsilon": epsilon}


def open_account(owner: httpx.Client, name: str, policy: Mapping[str, object] = POLICY, **relatives: str) -> None:
    """Open an account."""
    answer = post(owner, "/v1/accounts", {"name": name, "policy": policy, **relatives}, key=f"open {name}")
    assert answer.status_code == 201, answer.text


def create_population(
    owner: httpx.Client, name: str, *, engine: str = "numpy", ids: Iterable[object] = (), **choices: object
) -> None:
    """Create a population with these people."""
    form = {"name": name, "policy": POLICY, "engine": engine, **choices}
    answer = post(owner, "/v1/populations", form, key=f"create {name}")
    assert answer.status_code == 201, answer.text
    joined = post(owner, f"/v1/populations/{name}/joins", {"ids": [*ids]}, key=f"join {name}")
    assert joined.status_code == 201, joined.text


def post(client: httpx.Client, path: str, form: object, *, key: str = "") -> httpx.Response:
    """Post JSON, with an idempotency key if one is given."""
    return client.post(path, json=form, headers={"Idempotency-Key": key.replace(" ", "%20")} if key else {})


def path_of(route: Route, **names: str) -> str:
    """Return a path of the route; parameters that are not given get valid names of things that do not exist."""
    names = {
        "name": "nothing",
        "reservation": "nothing%230",
        "entry": "nothing%230",
        "principal": "nobody",
        "key": "0" * 12,
        "round": "nothing",
    } | names
    return route.path.format(**names)


def state(owner: httpx.Client) -> object:
    """Return the checkpoint and the API keys: what a refused request must not change."""
    return owner.get("/v1/checkpoint").json(), owner.get("/v1/keys").json()


def check_problem(answer: httpx.Response, *statuses: int) -> None:
    """Assert that an answer is a problem document of the usual form that reveals nothing about the machine."""
    told = f"{answer.request.method} {str(answer.request.url)[:200]} -> {answer.status_code} {answer.text[:500]}"
    assert 400 <= answer.status_code < 500, told
    assert not statuses or answer.status_code in statuses, told
    assert answer.headers["content-type"] == "application/problem+json", told
    form = answer.json()
    assert form["status"] == answer.status_code, told
    assert form["code"] in CODES, told
    assert form["request_id"] == answer.headers["x-request-id"], told
    assert form["title"], told
    assert form["detail"], told
    sent = f"{answer.request.url} {answer.request.content.decode(errors='replace')}"  # may be quoted back
    assert all(word[0] in sent for word in _TELLTALE.finditer(answer.text)), told
    assert len(answer.content) < 5000 or "decision" in form, f"{told}... and {len(answer.content)} bytes in all"


def same_words(answer: httpx.Response) -> tuple[object, ...]:
    """Return everything of an answer except its request id, date and length."""
    form = answer.json()
    form.pop("request_id", None)
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("x-request-id", "date", "content-length")
    }
    return answer.status_code, form, headers


@contextmanager
def refused_by_us() -> Iterator[None]:
    """Allow an OdographError with a message, and no other exception."""
    try:
        yield
    except OdographError as error:
        if not str(error):
            raise


def raw(service: ServiceThread, data: bytes, *, end: bool = False, timeout: float = 10.0) -> bytes:
    """Send raw bytes, close the sending side if `end`, and return all bytes that come back.

    An answer that leaves the connection open ends after half a second without a byte.
    """
    where = urlsplit(service.url)
    found = b""
    with socket.create_connection((where.hostname, where.port), timeout=timeout) as line:
        try:
            line.sendall(data)
            if end:
                line.shutdown(socket.SHUT_WR)
            while part := line.recv(1 << 16):
                found += part
                line.settimeout(0.5)
        except (ConnectionError, TimeoutError):
            pass
    return found
