"""A network that loses, delays, cuts and garbles what the service answers: the client charges once, and says so."""

from __future__ import annotations

import io
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias

import httpx
import pytest
from async_accounts import LoopThread, WaitedAccount
from faulty_proxy import GARBAGE, Fault, Proxy, cut, lost, says, slow, unsent
from service_server import ServiceThread

import odograph as odo
from odograph.client import transport
from odograph.errors import (
    IdempotencyConflict,
    InvalidArgument,
    NotAuthenticated,
    NotPermitted,
    OutcomeUnknown,
    RemoteError,
    ServiceUnavailable,
)
from odograph.ledger.ledger import LedgerAccount

COST = odo.PureDP(0.001)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceThread]:
    """One service for all: every test has an account and a principal of its own."""
    with ServiceThread(f"sqlite:///{tmp_path_factory.mktemp('served')}/ledger.db") as running:
        yield running


@pytest.fixture
def proxy(service: ServiceThread) -> Iterator[Proxy]:
    with Proxy(service.settings.port) as running:
        yield running


@pytest.fixture
def own(service: ServiceThread) -> Iterator[LedgerAccount]:
    """An account, straight from the service: what is really there. It has its principal's name."""
    name = f"a{secrets.token_hex(8)}"
    with odo.connect(service.url, token=service.token(name)) as ledger:
        yield ledger.open_account(name, odo.Policy(10, 1e-6, filter="basic"))


Reach: TypeAlias = Callable[..., odo.Account]


with_both_clients = pytest.mark.parametrize("reach", ["threads", "event loop"], indirect=True)


@pytest.fixture
def reach(
    request: pytest.FixtureRequest, service: ServiceThread, proxy: Proxy, own: LedgerAccount
) -> Iterator[Reach]:
    """The same account through the proxy, with either client; what is asked once has been asked."""
    client = getattr(request, "param", "threads")
    with ExitStack() as opened:

        def through(timeout: float = 10.0, role: str = "owner") -> odo.Account:
            token = service.token(own.name, role)
            if client == "event loop":
                run = opened.enter_context(LoopThread())
                awaited = odo.aconnect(proxy.url, token=token, timeout=timeout)
                opened.callback(lambda: run(awaited.close()))
                assert run(awaited.principal()) == own.name
                return WaitedAccount(run, run(awaited.account(own.name)))
            ledger = opened.enter_context(odo.connect(proxy.url, token=token, timeout=timeout))
            assert ledger.principal == own.name
            return ledger.account(own.name)

        yield through


FAULTS: dict[str, list[Fault]] = {
    "lost": [lost],
    "lost twice": [lost, lost],
    "never arrived": [unsent, unsent],
    "502": [says(502), says(502)],
    "503 after it was carried out": [says(503, carried_out=True)],
    "504 that is empty": [says(504, b"")],
    "503 that is JSON": [says(503, b"[]"), says(503, b'{"code": 1}'), says(503, b'"detail"')],
    "503 with a time": [says(503, GARBAGE, "Retry-After: 1\r\n")],
    "not HTTP": [lambda _: b"SSH-2.0-OpenSSH_9.6\r\n"],
    "one after the other": [lost, says(502), unsent, cut(40), says(503, carried_out=True)],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_whatever_happens_on_the_way_the_client_asks_again_under_the_same_key_and_is_charged_once(
    reach: Reach, proxy: Proxy, own: LedgerAccount, faults: list[Fault]
) -> None:
    account = reach()
    for number, key in enumerate(("mine", None)):
        proxy.faults, proxy.keys = [*faults], []
        receipt = account.spend(COST, key=key)
        assert proxy.keys == [receipt.key] * (len(faults) + 1)
        assert key in (None, receipt.key)
        assert own.totals.steps == number + 1
    assert own.spend(COST, key="mine").repeated


@with_both_clients
def test_a_client_with_a_new_key_for_every_try_is_caught(
    reach: Reach, proxy: Proxy, own: LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = reach()

    def anew(build: Callable[..., httpx.Request]) -> Callable[..., httpx.Request]:
        def build_anew(*args: Any, headers: dict[str, str], **kwargs: Any) -> httpx.Request:
            return build(*args, headers=headers | {"Idempotency-Key": f"k{time.monotonic_ns()}"}, **kwargs)

        return build_anew

    for kind in (httpx.Client, httpx.AsyncClient):
        monkeypatch.setattr(kind, "build_request", anew(kind.build_request))
    proxy.faults = [lost]
    account.spend(COST, key="mine")
    monkeypatch.undo()
    assert own.totals.steps == 2


@pytest.mark.parametrize("reach", ["event loop"], indirect=True)
def test_the_async_client_asks_again_under_the_same_key_too(reach: Reach, proxy: Proxy, own: LedgerAccount) -> None:
    account = reach()
    faults = FAULTS["one after the other"]
    proxy.faults = [*faults]
    receipt = account.spend(COST)
    assert proxy.keys == [receipt.key] * (len(faults) + 1)
    assert (receipt.repeated, own.totals.steps) == (False, 1)


def test_an_answer_that_is_cut_at_any_byte_is_asked_for_again(
    reach: Reach, proxy: Proxy, own: LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_FIRST_WAIT", 0.001)
    account = reach()
    sizes: list[int] = []

    def measure(forward: Callable[[], bytes]) -> bytes:
        answer = forward()
        sizes.append(len(answer))
        return answer

    proxy.faults = [measure]
    account.spend(COST, key="0000")
    for size in range(sizes[0]):
        proxy.faults, proxy.keys = [cut(size)], []
        receipt = account.spend(COST, key=f"{size + 1:04}")
        assert proxy.keys == [receipt.key] * 2, size
    assert own.totals.steps == sizes[0] + 1


def test_a_service_that_is_down_for_a_while_is_waited_for(reach: Reach, proxy: Proxy, own: LedgerAccount) -> None:
    account = reach()
    proxy.down()
    timer = threading.Timer(0.5, proxy.up)
    timer.start()
    assert not account.spend(COST, key="k").repeated
    timer.join()
    assert own.totals.steps == 1


@with_both_clients
def test_when_nothing_can_have_been_charged_the_client_says_so(
    reach: Reach, proxy: Proxy, own: LedgerAccount
) -> None:
    account = reach(timeout=0.4)
    proxy.down()
    with pytest.raises(ServiceUnavailable, match=r"cannot be reached .*; nothing was sent\. Try again") as caught:
        account.spend(COST, key="k")
    assert caught.value.charged is False
    assert own.totals.steps == 0
    proxy.up()
    assert not account.spend(COST, key="k").repeated


@pytest.mark.parametrize("fault", [slow(1), lost, says(502, carried_out=True), unsent])
@pytest.mark.parametrize("key", ["mine", None])
def test_when_something_may_have_been_charged_the_client_names_the_key_under_which_to_ask(
    reach: Reach, proxy: Proxy, own: LedgerAccount, fault: Fault, key: str | None
) -> None:
    account = reach(timeout=0.4)
    proxy.faults = [fault] * 20
    with pytest.raises(OutcomeUnknown, match="ask again with the same key") as caught:
        account.spend(COST, key=key)
    used = proxy.keys[-1]
    assert caught.value.key == used
    assert caught.value.charged is None
    assert str(caught.value).endswith(f" (key {used!r})")
    assert "nothing was" not in str(caught.value)
    proxy.faults = []
    charged = own.totals.steps
    assert charged == (fault is not unsent)
    assert account.spend(COST, key=used).repeated == (charged == 1)
    assert own.totals.steps == 1


@with_both_clients
def test_a_lost_answer_and_then_nobody_there_may_have_been_charged(
    reach: Reach, proxy: Proxy, own: LedgerAccount
) -> None:
    account = reach(timeout=0.4)

    def lost_for_good(forward: Callable[[], bytes]) -> bytes:
        proxy.down()
        return lost(forward)

    proxy.faults = [lost_for_good]
    with pytest.raises(OutcomeUnknown, match=r"cannot be reached .*; ask again with the same key") as caught:
        account.spend(COST, key="k")
    assert caught.value.charged is None
    proxy.up()
    assert account.spend(COST, key="k").repeated
    assert own.totals.steps == 1


def test_a_read_without_an_answer_has_charged_nothing(reach: Reach, proxy: Proxy) -> None:
    account = reach(timeout=0.4)
    reads: list[Callable[[], object]] = [
        lambda: account.totals,
        lambda: account.decide(COST),
        lambda: account.quote([COST]),
        lambda: account.largest(odo.PureDP),
        lambda: account.calibrate(odo.laplace),
        lambda: account.how_many(COST),
    ]
    for read in reads:
        proxy.faults = [lost] * 20
        with pytest.raises(ServiceUnavailable, match=r"did not answer .*; try again$") as caught:
            read()
        assert caught.value.charged is False


@with_both_clients
def test_a_write_without_a_key_that_was_not_answered_may_have_happened(reach: Reach, proxy: Proxy) -> None:
    account = reach(timeout=0.4)
    proxy.faults = [lost] * 20
    with pytest.raises(OutcomeUnknown, match=r"; ask again to know the outcome$") as caught:
        account.close()
    assert (caught.value.key, caught.value.charged) == ("", None)


@pytest.mark.parametrize("named", [False, True])
def test_a_problem_of_status_504_is_an_unknown_outcome(reach: Reach, proxy: Proxy, *, named: bool) -> None:
    account = reach(timeout=0.4)
    detail = "the ledger did not respond" + " (key 'mine')" * named
    problem = json.dumps({"code": "OutcomeUnknown", "detail": detail}).encode()
    proxy.faults = [says(504, problem)] * 20
    with pytest.raises(OutcomeUnknown) as caught:
        account.spend(COST, key="mine")
    assert str(caught.value) == "the ledger did not respond (key 'mine')"
    assert (caught.value.key, caught.value.charged) == ("mine", None)


@with_both_clients
def test_reservations_are_made_and_resolved_once_whatever_is_lost(
    reach: Reach, proxy: Proxy, own: LedgerAccount
) -> None:
    account = reach()
    proxy.faults = [lost]
    first = account.reserve(COST, key="first")
    proxy.faults = [lost, lost]
    first.commit()
    second = account.reserve(COST, key="second")
    proxy.faults = [lost]
    second.void("not run")
    assert second.voided
    assert own.totals.steps == 1
    assert [past.entry.verb for past in own.history()] == ["open", "reserve", "commit", "reserve", "void"]


@with_both_clients
def test_a_block_runs_once_when_the_answer_to_its_charge_was_lost(
    reach: Reach, proxy: Proxy, own: LedgerAccount
) -> None:
    account = reach()
    ran: list[str] = []
    proxy.faults = [lost]
    with account.spending(COST):
        ran.append("block")
    proxy.faults = [lost]
    with odo.session(account) as session:
        session.run(ran.append, "session", cost=COST)
    assert ran == ["block", "session"]
    assert own.totals.steps == 2


def test_a_key_that_was_used_before_does_not_run_a_block_again(reach: Reach, own: LedgerAccount) -> None:
    account = reach()
    with account.spending(COST, key="k"):
        pass
    with pytest.raises(IdempotencyConflict), account.spending(COST, key="k"):
        pytest.fail("it ran again")
    assert own.totals.steps == 1


@with_both_clients
@pytest.mark.parametrize(
    ("role", "verbs"),
    [("owner", ["reserve", "commit"]), ("runner", ["reserve", "commit"]), ("analyst", ["spend"])],
)
def test_blocks_and_sessions_charge_first_for_every_role_that_may_charge(
    reach: Reach, own: LedgerAccount, role: str, verbs: list[str]
) -> None:
    account = reach(role=role)
    with odo.session(account) as session:
        assert session.run(lambda: own.totals.steps, cost=COST) == 1
    with suppress(ZeroDivisionError), account.spending(COST, key="k"):
        assert 1 / (own.totals.steps - 2) == 0  # it raises, and stays charged
    assert [past.entry.verb for past in own.history()] == ["open", *verbs, *verbs]
    assert own.totals.steps == 2
    if role == "analyst":
        reservation = account.reserve(COST)
        with pytest.raises(NotPermitted):
            reservation.commit()
        with pytest.raises(NotPermitted):
            reservation.void("not run")
        assert own.totals.steps == 3


@pytest.mark.parametrize("role", ["owner", "runner"])
def test_a_block_that_did_not_run_its_mechanism_may_void(reach: Reach, own: LedgerAccount, role: str) -> None:
    with reach(role=role).spending(COST) as reservation:
        reservation.void("not run")
    assert own.totals.steps == 0


STRANGERS: dict[str, Fault] = {
    "a page": says(200, GARBAGE),
    "JSON of something else": says(200, b'{"hello": "world"}'),
    "a list": says(200, b"[1, 2]"),
    "nothing there": says(404, GARBAGE),
    "JSON of another framework": says(404, b'{"detail": "Not Found"}'),
    "moved": says(301, b"", "Location: https://elsewhere.example/\r\n"),
    "an error": says(500, GARBAGE),
    "a wrong encoding": says(200, GARBAGE, "Content-Encoding: gzip\r\n"),
}


@pytest.mark.parametrize("fault", STRANGERS.values(), ids=STRANGERS)
def test_an_address_where_something_else_is_gives_an_error_that_says_so(
    service: ServiceThread, proxy: Proxy, fault: Fault
) -> None:
    ledger = odo.connect(proxy.url, token=service.token("ana"), timeout=0.4)
    asks: list[Callable[[], object]] = [
        lambda: ledger.account("a"),
        lambda: ledger.spend({"a": COST}),
        lambda: ledger.principal,
        ledger.accounts,
        ledger.verify,
        ledger.checkpoint,
    ]
    for ask in asks:
        proxy.faults = [fault] * 20
        with pytest.raises(RemoteError, match="is it Odograph"):
            ask()
    ledger.close()


def test_an_address_or_a_key_that_cannot_be_one_is_refused_at_once(service: ServiceThread) -> None:
    for address in ("http://", "http://ana:secret@localhost", f"{service.url}/?a=b", "http://[::1"):
        with pytest.raises(InvalidArgument, match=r"^url must be "):
            odo.connect(address, token="odo_x")  # noqa: S106  no secret
    for token in (None, "", " ", "odo\n_x", "odö"):
        with pytest.raises(NotAuthenticated):
            odo.connect(service.url, token=token)
    begun = time.monotonic()
    with pytest.raises(NotAuthenticated), odo.connect(service.url, token="odo_x") as ledger:  # noqa: S106  as above
        ledger.accounts()
    assert time.monotonic() - begun < 5


def test_a_service_that_does_not_speak_tls_is_named_at_once(service: ServiceThread) -> None:
    secure = service.url.replace("http://", "https://")
    begun = time.monotonic()
    with odo.connect(secure, token=service.token("ana"), timeout=10) as ledger:
        asks: list[Callable[[], object]] = [
            ledger.accounts,
            lambda: ledger.spend({"a": COST}),
            lambda: ledger.export(io.StringIO()),
            lambda: ledger.import_(io.StringIO()),
        ]
        for ask in asks:
            with pytest.raises(InvalidArgument, match=r"^url must be that of a service with TLS") as caught:
                ask()
            assert str(caught.value).endswith(f"Is it {service.url}?")
    assert time.monotonic() - begun < 5


def test_a_name_that_nobody_has_is_what_the_error_is_about() -> None:
    with (
        odo.connect("https://nowhere.invalid", token="odo_x", timeout=0.2) as ledger,  # noqa: S106  no secret
        pytest.raises(ServiceUnavailable, match=r"cannot be reached .*[Nn]ame"),
    ):
        ledger.accounts()


FORKING = """
import os, signal, sys
import odograph as odo
from odograph.client import transport
url, token, name, defect = sys.argv[1:]
if defect == "shares":  # a forked process keeps the connections of its parent
    transport.Pool.after_fork = lambda self: None
def sockets():
    found = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    return {one for one in found if one.startswith("socket:")}
with odo.connect(url, token=token) as ledger:
    account = ledger.account(name)
    account.spend(odo.PureDP(0.001), key="before")
    before = sockets()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # what hangs has failed
        account.spend(odo.PureDP(0.001), key="child")
        os._exit(0 if sockets() - before else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    account.spend(odo.PureDP(0.001), key="parent")
    assert sockets() == before
sys.exit(code)
"""

FORKED_BUSY = """
import os, signal, sys, threading, time
import httpx
import odograph as odo
made = httpx.Client.__init__
def slowly(self, *args, **kwargs):
    time.sleep(0.5)
    made(self, *args, **kwargs)
httpx.Client.__init__ = slowly
url, token, name, _ = sys.argv[1:]
ledger = odo.connect(url, token=token)
threading.Thread(target=ledger.accounts).start()
time.sleep(0.1)  # it is making its connections
child = os.fork()
if child == 0:
    signal.alarm(10)  # what hangs has failed
    ledger.spend({name: odo.PureDP(0.001)})
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(program: str, service: ServiceThread, name: str, defect: str = "") -> int:
    """Run a program on the account of that name."""
    command = [sys.executable, "-c", program, service.url, service.token(name), name, defect]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode  # noqa: S603  ours


def test_a_forked_process_has_connections_of_its_own(service: ServiceThread, own: LedgerAccount) -> None:
    assert run(FORKING, service, own.name) == 0
    assert own.totals.steps == 3


def test_forked_processes_that_share_connections_are_caught(service: ServiceThread, own: LedgerAccount) -> None:
    assert run(FORKING, service, own.name, "shares") == 1


def test_a_process_forked_while_another_thread_connects_can_charge(
    service: ServiceThread, own: LedgerAccount
) -> None:
    assert run(FORKED_BUSY, service, own.name) == 0
    assert own.totals.steps == 1


@pytest.mark.parametrize("host", ["budgets.example.org", "10.0.0.5", "[2001:db8::1]", "localhost.example.org"])
def test_a_token_is_not_sent_in_the_clear_to_another_machine(host: str) -> None:
    for port in ("", ":8300"):
        url = f"http://{host}{port}"
        with pytest.raises(InvalidArgument, match=r"url must begin with https.*in the clear.*accept_plain_http=True"):
            odo.connect(url, token="odo_x")  # noqa: S106  no secret
        with odo.connect(url, token="odo_x", accept_plain_http=True) as ledger:  # noqa: S106  as above
            assert ledger.url == url
    with odo.connect(f"https://{host}", token="odo_x") as ledger:  # noqa: S106  as above
        assert ledger.url == f"https://{host}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "[::1]", "localhost", "LOCALHOST"])
def test_a_service_on_this_machine_needs_no_tls(host: str) -> None:
    odo.connect(f"http://{host}:8300", token="odo_x").close()  # noqa: S106  as above
