"""Commands in the writer process: each has its own outcome, clients are served fairly, and the library agrees."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attacks
import httpx
import msgspec
import pytest
from service_process import held, wait_until
from service_server import ServiceThread

import odograph as odo
from odograph.connection import store_at
from odograph.core.guarantees import Guarantee, Parallel
from odograph.errors import ERROR_TABLE, LedgerBusy, OdographError
from odograph.ledger.commands import Author
from odograph.ledger.engine import GROUP_SIZE, FairQueue
from odograph.service import writer as writer_module
from odograph.service.schemas import CostForm
from odograph.service.writer import LENGTH, Answers, Charged, ChargeRequest, Pickled

SMALL = attacks.pure("0.00001")
POLICY = odo.Policy(1, 1e-6, filter="basic")
LONG_NUMBER = "1" * 100_000
ONE = odo.PureDP("0.00001")

# What is asked of which account, as it is sent and as the library says it; good ones and bad ones in turn.
ORDERS: list[tuple[dict[str, Any], Callable[[], dict[str, Guarantee]]]] = [
    ({"a": SMALL}, lambda: {"a": ONE}),
    ({"a": attacks.pure(LONG_NUMBER)}, lambda: {"a": odo.PureDP(LONG_NUMBER)}),
    ({"a": SMALL, "b": SMALL}, lambda: {"a": ONE, "b": ONE}),
    ({"a": {"kind": "pure", "epsilon": 2**70}}, lambda: {"a": odo.PureDP(2**70)}),
    ({"a": {"kind": "pure", "epsilon": 2**63}}, lambda: {"a": odo.PureDP(2**63)}),
    ({"a": {"kind": "approx", "epsilon": 0.00001, "delta": 1e-9}}, lambda: {"a": odo.ApproxDP(0.00001, 1e-9)}),
    ({"a": attacks.pure("1e400")}, lambda: {"a": odo.PureDP("1e400")}),
    ({"a": attacks.pure("1e-999999999")}, lambda: {"a": odo.PureDP("1e-999999999")}),
    ({"a": attacks.pure("nan")}, lambda: {"a": odo.PureDP("nan")}),
    ({"a": attacks.pure("\U0001f600")}, lambda: {"a": odo.PureDP("\U0001f600")}),
    ({"a": {"kind": "pure", "epsilon": -1}}, lambda: {"a": odo.PureDP(-1)}),
    ({"a": {"kind": "pure", "epsilon": 0}}, lambda: {"a": odo.PureDP(0)}),
    ({"a": {"kind": "zcdp", "rho": "0.1"}}, lambda: {"a": odo.ZCDP("0.1")}),
    ({"a": {"kind": "rdp", "orders": [2], "values": [0.1]}}, lambda: {"a": odo.RDP((2,), (0.1,))}),
    ({"a": {"kind": "parallel", "parts": [SMALL]}}, lambda: {"a": Parallel((ONE,))}),
    ({"nothing": SMALL}, lambda: {"nothing": ONE}),
    ({"a": SMALL, "nothing": SMALL}, lambda: {"a": ONE, "nothing": ONE}),
    ({"a#1": SMALL}, lambda: {"a#1": ONE}),
    ({"x" * 10_000: SMALL}, lambda: {"x" * 10_000: ONE}),
    ({"shut": SMALL}, lambda: {"shut": ONE}),
    ({"a": attacks.pure("7")}, lambda: {"a": odo.PureDP(7)}),
    ({"b": SMALL}, lambda: {"b": ONE}),
]


def url_in(folder: Path, name: str = "ledger") -> str:
    return f"sqlite:///{folder}/{name}.db"


def open_accounts(url: str) -> None:
    with odo.connect(url) as ledger:
        for name in ("a", "b", "shut"):
            ledger.open_account(name, POLICY)
        ledger.account("shut").close()


def charged(url: str, name: str = "a") -> list[str]:
    """Return the keys that were charged, in order; the ledger is in order too."""
    with odo.connect(url) as ledger:
        ledger.verify()
        return [past.entry.key for past in ledger.account(name).history(0, 10**6) if past.entry.verb == "spend"]


def batch(client: httpx.Client, items: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Spend under many keys in one request, and return the answers."""
    spends = [{"key": key, "costs": costs} for key, costs in items]
    answer = attacks.post(client, "/v1/batches", {"spends": spends})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def code_of(status: int, form: dict[str, Any]) -> str:
    """Return what an answer says became of an order."""
    if "code" in form:
        assert status == ERROR_TABLE[getattr(odo.errors, form["code"])].status
        return str(form["code"])
    assert status == 201, form
    return "charged"


def locally(ledger: odo.Ledger, make: Callable[[], dict[str, Guarantee]], key: str) -> str:
    """Return what becomes of the same order in a ledger that is kept here."""
    try:
        ledger.spend(make(), key=key)
    except OdographError as error:
        return type(error).__name__
    return "charged"


def compare(folder: Path) -> None:
    """Send good and bad orders together and one by one: each becomes the same, and the same as in the library."""
    for name in ("together", "alone", "local"):
        open_accounts(url_in(folder, name))
    items = [(f"k-{number}", costs) for number, (costs, _) in enumerate(ORDERS)]
    with ServiceThread(url_in(folder, "together")) as service, attacks.owner_of(service) as client:
        results = batch(client, items)
        together = [code_of(one["status"], one.get("problem") or {}) for one in results]
    with ServiceThread(url_in(folder, "alone")) as service, attacks.owner_of(service) as client:
        answers = [attacks.post(client, "/v1/spends", {"costs": costs}, key=key) for key, costs in items]
        alone = [code_of(answer.status_code, answer.json()) for answer in answers]
    with odo.connect(url_in(folder, "local")) as ledger:
        here = [locally(ledger, make, f"k-{number}") for number, (_, make) in enumerate(ORDERS)]
    assert together == alone == here
    assert len({*here}) > 5
    for name in ("a", "b"):
        found = {*charged(url_in(folder, "local"), name)}
        assert found == {*charged(url_in(folder, "together"), name)} == {*charged(url_in(folder, "alone"), name)}


def test_good_and_bad_orders_of_one_frame_become_what_each_becomes_alone_and_in_the_library(tmp_path: Path) -> None:
    compare(tmp_path)


def test_a_writer_that_lets_one_order_spoil_a_batch_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = writer_module._carry_out_batch  # noqa: SLF001  broken on purpose

    def spoilt(*args: Any) -> Answers:
        found = carry_out(*args)
        bad = next((answer for answer in found.answers if isinstance(answer, Pickled)), None)
        return found if bad is None else Answers(found.seconds, [bad for _ in found.answers])

    monkeypatch.setattr(writer_module, "_carry_out_batch", spoilt)
    with pytest.raises(AssertionError):
        compare(tmp_path)


# Messages that no worker sends: they cannot be decoded, or are not commands.
GARBAGE: list[object] = [
    None,
    7,
    "text",
    [],
    {},
    [["i", "k"], "spend", {"a": SMALL}],
    [["i", "k", "", "", ""], "spend", {"a": SMALL}, None],
    [["i"], "spend", {"a": SMALL}, None],
    [["i", "k"], 5, {"a": SMALL}, None],
    [["i", "k"], "spend", {"a": None}, None],
    [["i", "k"], "spend", {"a": {"kind": "unheard of"}}, None],
    [["i", "k"], "spend", {"a": {"kind": "pure"}}, None],
    [["i", "k"], "spend", {"a": {"kind": "pure", "epsilon": float("inf")}}, None],
    [["i", "k"], "spend", {"a": {"kind": "pure", "epsilon": float("nan")}}, None],
    [["i", "k"], "spend", {"a": {"kind": "pure", "epsilon": True}}, None],
    [["i", "k"], "spend", {"a": {"kind": "pure", "epsilon": b"\xff"}}, None],
    [["i", "k"], "spend", {}, None],
    [["i", "k"], "spend", [SMALL], None],
    [["i", "k"], "spend", {"a": SMALL}, "soon"],
    [["i", "k"], "spend", {"a": SMALL}, 0.5],
]
HALF = (
    b"\x94\x92\xa1i\xa3\xed\xa0\x80\xa5spend\x81\xa1a\x82\xa4kind\xa4pure\xa7epsilon\xa30.1\xc0"  # half a surrogate
)


@contextmanager
def writing(url: str) -> Iterator[Callable[[list[msgspec.Raw]], Answers]]:
    """Run a writer at the other end of a socket: yield how to send it a batch and read the answers."""
    ours, its_end = socket.socketpair()
    thread = threading.Thread(target=writer_module.serve_worker, args=(its_end, store_at(url)))
    thread.start()
    with ours, ours.makefile("rb") as answers:
        assert answers.read(4) == writer_module.READY

        def ask(messages: list[msgspec.Raw]) -> Answers:
            content = writer_module.encode_batch(messages)
            ours.sendall(LENGTH.pack(len(content)) + content)
            (size,) = LENGTH.unpack(answers.read(4))
            return writer_module.decode_answers(answers.read(size))

        yield ask
        ours.shutdown(socket.SHUT_WR)
        thread.join(60)
    assert not thread.is_alive()


def good(key: str) -> msgspec.Raw:
    cost = msgspec.convert(attacks.pure("0.00001"), CostForm)
    message = writer_module.encode_quick_charge(ChargeRequest(Author("somebody", key), "spend", {"a": cost}, None))
    assert message is not None
    return message


def test_orders_that_cannot_be_read_hurt_no_other_of_their_frame(tmp_path: Path) -> None:
    open_accounts(url_in(tmp_path))
    bad = [msgspec.Raw(msgspec.msgpack.encode(one)) for one in GARBAGE] + [msgspec.Raw(HALF)]
    messages = [one for number, garbage in enumerate(bad) for one in (good(f"k-{number}"), garbage)]
    with writing(url_in(tmp_path)) as ask:
        answers = ask(messages).answers
        found = [writer_module.decode_outcome(one) if isinstance(one, Pickled) else one for one in answers]
        assert all(isinstance(one, Charged) for one in found[::2])
        assert all(isinstance(one, OdographError) for one in found[1::2]), found[1::2]
        assert all(str(one) for one in found[1::2])
        (last,) = ask([good("l")]).answers
        assert isinstance(last, Charged)
    assert charged(url_in(tmp_path)) == [*[f"k-{number}" for number in range(len(bad))], "l"]


class Recorded(FairQueue[Any]):
    """A queue that says how many have come."""

    came: ClassVar[int] = 0

    def add(self, client: str, one: object) -> None:
        super().add(client, one)
        Recorded.came += 1


class WholeQueue(Recorded):
    """Takes all of one client before the next one has a turn."""

    def take(self, group: list[Any], most: int = GROUP_SIZE) -> None:
        while self.clients and len(group) < most:
            client = next(iter(self.clients))
            group.append(self.clients[client][0])
            self.remove(client, group[-1])


def written_before_a_single(folder: Path, monkeypatch: pytest.MonkeyPatch, queue: type[Recorded]) -> int:
    """Let one principal wait with thousands, and then another with one; say how many were written before that one."""
    monkeypatch.setattr(writer_module, "FairQueue", queue)
    open_accounts(url_in(folder))
    with ServiceThread(url_in(folder)) as service:
        tokens = [service.token(name) for name in ("greedy", "modest")]
        for token in tokens:
            with attacks.reach(service, token) as client:
                assert batch(client, [(f"first of {token}", {"a": SMALL})])[0]["status"] == 201
        Recorded.came = 0

        def send(token: str, keys: list[str]) -> None:
            with attacks.reach(service, token) as client:
                assert {one["status"] for one in batch(client, [(key, {"a": SMALL}) for key in keys])} == {201}

        greedy = [[f"{part}-{number}" for number in range(1000)] for part in range(4)]
        threads = [threading.Thread(target=send, args=(tokens[0], keys)) for keys in greedy]
        threads.append(threading.Thread(target=send, args=(tokens[1], ["single"])))
        with held(url_in(folder)):
            for thread in threads[:-1]:
                thread.start()
            wait_until(lambda: Recorded.came == 4000)
            threads[-1].start()
            wait_until(lambda: Recorded.came == 4001)
        for thread in threads:
            thread.join(60)
    keys = charged(url_in(folder))
    assert len(keys) == 4003
    return keys.index("single") - 2


def test_a_single_spend_does_not_wait_for_the_whole_queue_of_another_principal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the writer has, what is on its way, and one of the other client.
    assert written_before_a_single(tmp_path, monkeypatch, Recorded) <= 2 * GROUP_SIZE + 1


def test_a_writer_client_that_takes_the_whole_queue_of_one_client_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written_before_a_single(tmp_path, monkeypatch, WholeQueue) == 4000


def fill_up(folder: Path, monkeypatch: pytest.MonkeyPatch, queue: type[FairQueue[Any]]) -> None:
    """Send more than there are places for: those without one are told so, one by one, and nothing else is charged."""
    monkeypatch.setattr(writer_module, "_CAPACITY", 20)
    monkeypatch.setattr(writer_module, "FairQueue", queue)
    open_accounts(url_in(folder))
    keys = [f"k-{number}" for number in range(50)]
    with ServiceThread(url_in(folder)) as service, attacks.owner_of(service) as client:
        results = batch(client, [(key, {"a": SMALL}) for key in keys])
        made = [key for key, one in zip(keys, results, strict=True) if one["status"] == 201]
        busy = [one["problem"] for one in results if one["status"] != 201]
        assert made == keys[:10]  # half of the places are for one principal
        assert {(one["status"], one["code"], one["retryable"]) for one in busy} == {(503, "LedgerBusy", True)}
        assert charged(url_in(folder)) == made
        assert [one["status"] for one in batch(client, [(key, {"a": SMALL}) for key in keys[8:12]])] == [
            200,
            200,
            201,
            201,
        ]


class AdmitsWhatItRejects(FairQueue[Any]):
    """Says that it is full, and keeps the order all the same."""

    def add(self, client: str, one: object) -> None:
        try:
            super().add(client, one)
        except LedgerBusy:
            self.clients[client].append(one)
            self.count += 1
            raise


def test_orders_that_find_no_place_are_told_so_and_not_charged_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_up(tmp_path, monkeypatch, FairQueue)


def test_a_queue_that_keeps_whom_it_turned_away_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        fill_up(tmp_path, monkeypatch, AdmitsWhatItRejects)
