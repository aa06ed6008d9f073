"""Print every function of Odograph that one spend runs through on its way to the store and back.

    python tools/trace_spend.py

The spend is a warm one: the account was charged before, so caches are filled as in a program that has been running
for a second. In this process the way begins at `account.spend`, over HTTP at the handler; it ends at `Store.write`,
and what a store does inside is not followed, except for the commands that it applies. Every thread is traced. Over
HTTP the writer runs in a thread of this process, so that both ends of its socket are seen.

A function counts once, however often it is called; a comprehension or lambda belongs to the function around it. A
representation is a type that holds the key or the cost of the spend as text, or bytes that hold them; a type that
only contains representations, such as a queued message or a reply, is a container, and the types of the store's
contract are the store's. The limits are in `tests/service/test_spend_path.py`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import msgspec

import odograph as odo
from odograph.ledger.engine import carry_out
from odograph.ledger.ledger import LedgerAccount
from odograph.ledger.stores.base import State
from odograph.service.endpoint import send_response
from odograph.service.routes import charges

ROOT = str(Path(odo.__file__).parent)
STORES = str(Path(ROOT, "ledger", "stores"))
SUPPORT = Path(__file__).parents[1] / "tests" / "support"
KEY = "traced-spend"
COST = "0.0123456789"
_DEPTH = 5  # of values within values
_CONTAINERS = (dict, frozenset, list, set, tuple)
_APPLY = next(one for one in carry_out.__code__.co_consts if isinstance(one, CodeType) and one.co_argcount == 1)


@dataclass
class Trace:
    """The functions between a first and a last one, by file and name, and the representations that they handle."""

    first: CodeType
    last: CodeType | None = None  # None: until the first one returns
    functions: dict[str, None] = field(default_factory=dict)
    representations: dict[str, None] = field(default_factory=dict)
    armed: bool = False
    active: bool = False

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        """Note a call or a return: what `sys.setprofile` asks for."""
        code = frame.f_code
        if not self.armed or event not in {"call", "return"} or not code.co_filename.startswith(ROOT):
            return
        if event == "call":
            if code is self.first:
                self.active = True
            if code is self.last:
                self.active = self.armed = False
        if self.active and not _is_in_store(frame.f_back):
            self._note(frame, result if event == "return" else None)
        if event == "return" and code is self.first and self.last is None:
            self.active = self.armed = False

    def _note(self, frame: FrameType, result: object) -> None:
        name = frame.f_code.co_qualname.partition(".<locals>.<")[0]
        self.functions[f"{Path(frame.f_code.co_filename).relative_to(ROOT)}: {name}"] = None
        if not frame.f_code.co_filename.startswith(STORES):
            for value in (*frame.f_locals.values(), result):
                self._find(value, _DEPTH)

    def _find(self, value: Any, depth: int) -> None:  # noqa: ANN401  whatever a function handles
        if isinstance(value, bytes | msgspec.Raw):
            if KEY.encode() in bytes(value) or COST.encode() in bytes(value):
                self.representations["bytes"] = None
            return
        parts = _parts(value)
        is_ours = type(value) not in _CONTAINERS and type(value).__module__ != State.__module__
        if is_ours and any(map(_is_fact, parts)):
            self.representations[f"{type(value).__module__}.{type(value).__qualname__}"] = None
        if depth:
            for part in parts:
                self._find(part, depth - 1)


def _is_in_store(frame: FrameType | None) -> bool:
    """Whether a store is at work, other than by applying a command."""
    while frame is not None:
        if frame.f_code is _APPLY:
            return False
        if frame.f_code.co_filename.startswith(STORES):
            return True
        frame = frame.f_back
    return False


def _is_fact(value: object) -> bool:
    """Whether a value is text that holds the key or the cost, or a plain container of such text."""
    if type(value) in _CONTAINERS:
        return any(map(_is_fact, _parts(value)))
    return isinstance(value, str) and (KEY in value or COST in value)


def _parts(value: Any) -> list[object]:  # noqa: ANN401  whatever a function handles
    if isinstance(value, odo.Guarantee):
        return [repr(value)]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, tuple | list | set | frozenset):
        return [*value]
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if type(value).__module__.startswith("odograph.ledger"):
        return [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return []


@contextmanager
def _profiling(trace: Trace) -> Iterator[None]:
    """Show calls to the trace: of this thread, and of those that are started in here."""
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_in_process(folder: Path) -> Trace:
    """Trace a spend of an account in a SQLite file."""
    trace = Trace(LedgerAccount.spend.__code__)
    with _profiling(trace), odo.connect(f"sqlite:///{folder}/local.db") as ledger:
        account, cost = ledger.open_account("census", odo.Policy(1, 1e-6, filter="basic")), odo.PureDP(COST)
        account.spend(cost, key="first")
        trace.armed = True
        account.spend(cost, key=KEY)
    return trace


def trace_over_http(folder: Path) -> Trace:
    """Trace a spend through a service over a SQLite file."""
    sys.path.insert(0, str(SUPPORT))
    from service_server import ServiceThread  # noqa: PLC0415  of the tests

    trace = Trace(charges.spend.__code__, send_response.__code__)
    with _profiling(trace), ServiceThread(f"sqlite:///{folder}/served.db") as service:
        token = service.token("ana")
        with odo.connect(service.settings.url) as ledger:
            ledger.open_account("census", odo.Policy(1, 1e-6, filter="basic"))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = msgspec.json.encode({"cost": {"kind": "pure", "epsilon": COST}})
        with httpx.Client(base_url=service.url, headers=headers) as client:
            for key in ("first", KEY):
                trace.armed = key == KEY
                path = "/v1/accounts/census/spends"
                client.post(path, headers={"Idempotency-Key": key}, content=body).raise_for_status()
    return trace


def main() -> None:
    """Trace both ways and print them."""
    with tempfile.TemporaryDirectory() as folder:
        traces = {"in this process": trace_in_process(Path(folder)), "over HTTP": trace_over_http(Path(folder))}
    for title, trace in traces.items():
        print(f"{title}: {len(trace.functions)} functions", *trace.functions, sep="\n  ")
        print(f"{title}: {len(trace.representations)} representations", *trace.representations, sep="\n  ")


if __name__ == "__main__":
    main()
