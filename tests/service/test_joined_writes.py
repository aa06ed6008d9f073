"""The head of a response is sent together with its body: nothing is lost, delayed or reordered by that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attacks
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from service_server import ServiceThread

from odograph.service import server
from odograph.service.server import JoiningTransport

TICK = None  # let the event loop do what is ready
# What is written to a connection, with pauses; it is closed at the end.
STEPS = st.lists(st.one_of(st.just(TICK), st.binary(max_size=4)), max_size=12)


class Recorder(asyncio.Transport):
    """A connection that keeps what is sent, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "this was written after the connection was closed"
        assert data, "an empty write"
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    abort = close


async def send(steps: Sequence[bytes | None], kind: type[JoiningTransport] = JoiningTransport) -> list[bytes]:
    recorder = Recorder()
    transport = kind(recorder, asyncio.get_running_loop())
    for step in steps:
        if step is TICK:
            await asyncio.sleep(0)
        else:
            transport.write(step)
    transport.close()
    await asyncio.sleep(0)
    assert recorder.closed
    return recorder.sent


def check(steps: Sequence[bytes | None], kind: type[JoiningTransport] = JoiningTransport) -> None:
    assert b"".join(asyncio.run(send(steps, kind))) == b"".join(filter(None, steps))


@given(STEPS)
@example([b"head", b"body"])
@example([b"head"])
@example([b"", b"body", TICK, b"more"])
def test_what_is_written_is_sent_in_order_before_the_end(steps: list[bytes | None]) -> None:
    check(steps)


class Forgetful(JoiningTransport):
    def close(self) -> None:
        self._transport.close()


class Reversing(JoiningTransport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        waiting, self._waiting = self._waiting, b""
        super().write(b"".join((data, waiting)))


@pytest.mark.parametrize(("kind", "steps"), [(Forgetful, [b"head"]), (Reversing, [b"head", b"body"])])
def test_a_connection_that_loses_or_reorders_is_caught(kind: type[JoiningTransport], steps: list[bytes]) -> None:
    with pytest.raises(AssertionError):
        check(steps, kind)


def test_head_and_body_are_one_write_and_nothing_waits_for_long() -> None:
    assert asyncio.run(send([b"head", b"body", TICK, b"head", b"body"])) == [b"headbody", b"headbody"]
    assert asyncio.run(send([b"100 Continue", TICK, b"head", b"body", b"more", TICK])) == [
        b"100 Continue",
        b"headbody",
        b"more",
    ]


def test_a_connection_that_is_aborted_sends_nothing_more() -> None:
    async def abort() -> list[bytes]:
        recorder = Recorder()
        transport = JoiningTransport(recorder, asyncio.get_running_loop())
        transport.write(b"head")
        transport.abort()
        await asyncio.sleep(0)
        assert recorder.closed
        return recorder.sent

    assert asyncio.run(abort()) == []


class Counting(JoiningTransport):
    """Counts what reaches the real connection."""

    writes = 0

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        class Counted:
            def __getattr__(self, name: str) -> Any:  # noqa: ANN401  of the connection
                if name == "write":
                    Counting.writes += 1
                return getattr(transport, name)

        super().__init__(Counted(), loop)  # type: ignore[arg-type]


def test_the_service_sends_each_response_at_once(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "JoiningTransport", Counting)
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "a")
        before = Counting.writes
        for number in range(20):
            form = {"cost": attacks.pure("0.001")}
            assert attacks.post(owner, "/v1/accounts/a/spends", form, key=f"k-{number}").status_code == 201
        assert Counting.writes - before == 20
