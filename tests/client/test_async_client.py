"""The async client: many tasks at once, canceled tasks, event loops, sessions, and sentences for what it is not."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from faulty_proxy import Proxy, slow
from service_server import ServiceThread

import odograph as odo
from odograph.client import asynchronous, transport
from odograph.client.asynchronous import AsyncAccount
from odograph.errors import (
    BudgetExceeded,
    IdempotencyConflict,
    InvalidArgument,
    LedgerError,
    ServiceUnavailable,
)
from odograph.ledger.ledger import LedgerAccount

COST = odo.PureDP("0.001")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceThread]:
    """One service for all: every test has an account and a principal of its own."""
    with ServiceThread(f"sqlite:///{tmp_path_factory.mktemp('served')}/ledger.db") as running:
        yield running


@pytest.fixture
def own(service: ServiceThread) -> Iterator[LedgerAccount]:
    """An account with room for a hundred charges, straight from the service: what is really there."""
    name = f"a{secrets.token_hex(8)}"
    with odo.connect(service.url, token=service.token(name)) as ledger:
        yield ledger.open_account(name, odo.Policy("0.1", 0, filter="basic"))


Use = Callable[[Callable[[AsyncAccount], Awaitable[None]]], None]


@pytest.fixture
def use(service: ServiceThread, own: LedgerAccount) -> Use:
    """Run a test in an event loop with the account."""

    def run(test: Callable[[AsyncAccount], Awaitable[None]]) -> None:
        async def with_account() -> None:
            async with reach(service, own.name) as account:
                await test(account)

        asyncio.run(with_account())

    return run


def limit_connections(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (transport, asynchronous):
        monkeypatch.setattr(module, "CONNECTIONS", most)


@asynccontextmanager
async def reach(service: ServiceThread, name: str, url: str = "", **options: Any) -> AsyncIterator[AsyncAccount]:
    async with odo.aconnect(url or service.url, token=service.token(name), **options) as ledger:
        yield await ledger.account(name)


def test_two_hundred_spends_at_once_are_admitted_up_to_the_limit_and_no_further(use: Use, own: LedgerAccount) -> None:
    async def spend_all(account: AsyncAccount) -> None:
        outcomes = await asyncio.gather(
            *(account.spend(COST, key=f"q-{number}") for number in range(200)), return_exceptions=True
        )
        receipts = [one for one in outcomes if isinstance(one, odo.Receipt)]
        assert len({receipt.id for receipt in receipts}) == len(receipts) == 100
        assert sum(isinstance(one, BudgetExceeded) for one in outcomes) == 100

    use(spend_all)
    assert (own.totals.steps, own.spent) == (100, 1.0)
    assert sum(entry.verb == "spend" for entry in own.history()) == 100


def test_one_key_in_fifty_tasks_is_charged_once(use: Use, own: LedgerAccount) -> None:
    async def spend_all(account: AsyncAccount) -> None:
        receipts = await asyncio.gather(*(account.spend(COST, key="q") for _ in range(50)))
        assert {receipt.id for receipt in receipts} == {receipts[0].id}
        assert sum(not receipt.repeated for receipt in receipts) == 1

    use(spend_all)
    assert own.totals.steps == 1


def test_there_are_never_more_connections_than_the_limit(
    use: Use, own: LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_connections(monkeypatch, 4)
    connections: set[object] = set()

    async def spend_all(account: AsyncAccount) -> None:
        client = account._ledger.transport._pool.client  # noqa: SLF001  the test reads its connections
        pool = client._transport._pool  # type: ignore[attr-defined]  # noqa: SLF001  httpx has no public name
        tasks = [asyncio.ensure_future(account.spend(COST)) for _ in range(40)]
        while not all(task.done() for task in tasks):
            assert len(pool.connections) <= 4
            connections.update(pool.connections)
            await asyncio.sleep(0)
        assert len([task.result() for task in tasks]) == 40

    use(spend_all)
    assert len(connections) > 1  # so it would have seen more
    assert own.totals.steps == 40


def test_with_all_connections_in_use_nothing_was_sent_and_the_error_says_so(
    service: ServiceThread, own: LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_connections(monkeypatch, 1)

    async def crowd(url: str) -> None:
        async with odo.aconnect(url, token=service.token(own.name), timeout=0.4) as ledger:
            account = await ledger.account(own.name)
            proxy.faults = [slow(1)]
            replay = asyncio.ensure_future(ledger.verify())  # it waits for its answer longer than others
            await asyncio.sleep(0.1)
            with pytest.raises(ServiceUnavailable, match=r"connections were in use; nothing was sent\. Try again"):
                await account.spend(COST)
            assert (await replay).entries > 0

    with Proxy(service.settings.port) as proxy:
        asyncio.run(crowd(proxy.url))


@pytest.mark.parametrize("carried_out", [False, True], ids=["before it arrived", "after it was charged"])
def test_a_canceled_spend_may_stand_and_the_same_key_tells(
    service: ServiceThread, own: LedgerAccount, *, carried_out: bool
) -> None:
    def never_answered(forward: Callable[[], bytes]) -> bytes:
        answer = forward() if carried_out else b""
        time.sleep(0.6)
        return answer

    async def cancel(url: str) -> None:
        async with reach(service, own.name, url) as account:
            proxy.faults = [never_answered]
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.3):
                    await account.spend(COST, key="mine")
            (note,) = caught.value.__cause__.__notes__  # type: ignore[union-attr]
            assert "may have been carried out; ask again with key='mine' to know the outcome" in note
            receipt = await account.spend(COST, key="mine")
            assert receipt.repeated == carried_out
            assert await account.size() == 2

    with Proxy(service.settings.port) as proxy:
        asyncio.run(cancel(proxy.url))
    assert own.totals.steps == 1


def test_a_canceled_read_gets_no_note(service: ServiceThread, own: LedgerAccount) -> None:
    """Negative control: the note is for what may have changed something."""

    async def cancel(url: str) -> None:
        async with reach(service, own.name, url) as account:
            proxy.faults = [slow(0.4)]
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.2):
                    await account.decide(COST)
            assert not hasattr(caught.value.__cause__, "__notes__")

    with Proxy(service.settings.port) as proxy:
        asyncio.run(cancel(proxy.url))


def test_a_block_whose_task_is_canceled_is_committed(use: Use, own: LedgerAccount) -> None:
    async def cancel(account: AsyncAccount) -> None:
        begun = asyncio.Event()

        async def block() -> None:
            async with account.spending(COST, key="q") as held:
                assert [one.id for one in await account.pending()] == [held.id]
                begun.set()
                await asyncio.sleep(60)

        task = asyncio.ensure_future(block())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await account.pending() == ()
        with pytest.raises(IdempotencyConflict, match="the answer is not stored"):
            async with account.spending(COST, key="q"):
                pytest.fail("it ran again")

    use(cancel)
    assert [entry.verb for entry in own.history()] == ["open", "reserve", "commit"]
    assert own.totals.steps == 1


def test_a_ledger_is_used_in_one_event_loop(service: ServiceThread, own: LedgerAccount) -> None:
    ledger = odo.aconnect(service.url, token=service.token(own.name))
    loops = [asyncio.Runner(), asyncio.Runner()]
    account = loops[0].run(ledger.account(own.name))
    with pytest.raises(InvalidArgument, match=r"one event loop \(got a second one\); call odograph\.aconnect again"):
        loops[1].run(account.spend(COST))
    assert loops[0].run(account.totals()).steps == 0
    loops[0].run(ledger.close())
    with pytest.raises(LedgerError, match="closed"):
        loops[0].run(account.spend(COST))
    for loop in loops:
        loop.close()
    assert own.totals.steps == 0


def test_a_ledger_may_be_awaited_and_acts_as_others_over_the_same_connections(
    service: ServiceThread, own: LedgerAccount
) -> None:
    async def act() -> None:
        async with await odo.aconnect(service.url, token=service.token(own.name)) as ledger:
            other = await ledger.acting_as("ben")
            assert (await other.principal(), await ledger.principal()) == ("ben", own.name)
            receipt = await (await other.account(own.name)).spend(COST, note="as ben")
            await other.close()
            with pytest.raises(LedgerError, match="closed"):
                await other.accounts()
            assert await ledger.erase_note(receipt.id)
            assert own.name in [account.name for account in await ledger.accounts()]
            assert (await ledger.verify(checkpoint=await ledger.checkpoint())).entries > 0
            held = await ledger.reserve({own.name: COST})
            again = await ledger.reservation(held.id)
            await again.void("not run")
            assert again.voided
            assert repr(held).startswith(f"<AsyncReservation {held.id}: PureDP(0.001) of {own.name}")

    asyncio.run(act())
    assert [entry.principal for entry in own.history() if entry.verb == "spend"] == ["ben"]


@pytest.mark.parametrize("url", ["memory://", "sqlite:///privacy.db", "postgresql://h/d", "privacy.db", 3])
def test_only_a_service_is_awaited(url: Any) -> None:  # noqa: ANN401  also what is no address
    with pytest.raises(InvalidArgument, match=r"^url must be that of a service .*\(got .*asyncio\.to_thread"):
        odo.aconnect(url)


def test_an_async_ledger_is_not_opened_with_a_plain_with(service: ServiceThread) -> None:
    ledger = odo.aconnect(service.url, token=service.token())
    with pytest.raises(InvalidArgument, match=r"`async with odograph\.aconnect"), ledger:
        pytest.fail("it was opened")


def test_a_session_needs_an_account_of_connect(use: Use, own: LedgerAccount) -> None:
    async def open_session(account: AsyncAccount) -> None:
        with pytest.raises(InvalidArgument, match=r"odograph\.connect \(got an async account\).*asyncio\.to_thread"):
            odo.session(account)  # type: ignore[arg-type]

    use(open_session)
    assert own.totals.steps == 0
