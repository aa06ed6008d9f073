"""AppState: what the handlers share. One per worker process: the ledger, the keys, the pen, the threads."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

from odograph.connect import store_at
from odograph.errors import LedgerBusy, LedgerNotFound, NotAuthenticated, OdographError
from odograph.ledger.engine import FIRST_PAUSE, LONGEST_PAUSE, Writer
from odograph.ledger.ledger import Ledger
from odograph.ledger.local_backend import LocalBackend
from odograph.ledger.stores.base import RowLocked
from odograph.service import logs
from odograph.service.auth import ApiKey, Caller, RateLimit, digest_of_token, equal_in_constant_time, looks_like_token
from odograph.service.key_store import KeyStore, connect_keys
from odograph.service.metrics import Metrics
from odograph.service.problems import is_unusable, key_in, problem_of
from odograph.service.response_schemas import Problem
from odograph.service.settings import Settings
from odograph.service.solver import Solver
from odograph.service.thread_pool import Threads
from odograph.service.writer_client import Start, WriterClient, start_process

__all__ = ["AppState"]

# Threads share one interpreter, and the event loop waits for it with them: few for what waits for the ledger, one for
# what computes, one for what reads all of it. Keys have their own: whatever the others do, a caller is known.
_READERS: Final = 4
_KEY_READERS: Final = 2
_FRESH: Final = 1.0  # seconds for which a key is believed: a revoked one opens nothing after that
_REMEMBERED: Final = 10_000
_RECOVERY: Final = 2.0  # seconds between two looks whether a ledger can be used again
_READY_TIME: Final = 3.0  # seconds after which a ledger that does not answer is not ready
_SQLITE: Final = "sqlite:///"
_SERVICE: Final = "service"  # who reads for the metrics; it writes nothing

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Known(NamedTuple):
    """A key that was looked up a moment ago."""

    looked_up: float
    key: ApiKey
    caller: Caller


class _Look(NamedTuple):
    """A key that is being looked up, and since when."""

    begun: float
    task: asyncio.Task[_Known | None]


class AppState:
    """Made inside the event loop that it serves."""

    def __init__(self, settings: Settings, start: Start = start_process) -> None:
        self.settings = settings
        self.metrics = Metrics()
        store = store_at(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off)
        with suppress(LedgerBusy):  # a database that is away now may come back; until then nothing is ready
            store.create()
        self._backend = LocalBackend(store, _SERVICE, Writer(store, watch=self.metrics.count_commit, patient=False))
        self._books_of: dict[str, LocalBackend] = {}
        self.keys: KeyStore = connect_keys(
            settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off
        )
        self.writer = WriterClient(settings, self._watch_frames, start)
        self.solver = Solver()
        self.limit = RateLimit(settings.rate, settings.burst)
        self._readers = Threads("readers", _READERS)
        self._computer = Threads("computer", 1)
        self._auditor = Threads("auditor", 1)
        self._key_readers = Threads("keys", _KEY_READERS)
        self._auditing = False
        self._loop = asyncio.get_running_loop()
        self._checking: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._failed = 0
        self._held_up = 0  # calls that wait for what another client of the database holds
        self._closing = False
        self._ready_at = -math.inf
        self._unready = ""
        self._places = _places(self._backend.url)
        self._known: dict[str, _Known] = {}
        self._looking: dict[str, _Look] = {}

    def _watch_frames(self, seconds: float, orders: int, waiting: int) -> None:
        if orders:
            self.metrics.count_commit(seconds, orders)
        self.metrics.set_queue_depth(waiting)

    @property
    def ledger(self) -> Ledger:
        """The ledger as the service itself reads it."""
        return Ledger(self._backend)

    def backend_of(self, caller: Caller) -> LocalBackend:
        """Return the caller's way into the ledger; a principal keeps it when its keys change."""
        found = self._books_of.get(caller.principal)
        if found is None:
            found = self._books_of[caller.principal] = self._backend.acting_as(caller.principal)
        return found

    def ledger_of(self, caller: Caller) -> Ledger:
        """Return the ledger, acting as the caller's principal."""
        return Ledger(self.backend_of(caller))

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what waits for the ledger in a thread; if too much waits already, raise `LedgerBusy`.

        A call that wants to write to an account that another client holds is made again, until the timeout; it waits
        outside the threads, which are few and everybody's.
        """
        deadline = self._loop.time() + self.settings.timeout
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._readers.run(function, *args, **kwargs)
            except RowLocked:
                left = deadline - self._loop.time()
                if left <= 0:
                    raise
            self._held_up += 1
            try:
                await asyncio.sleep(min(left, max(pause, FIRST_PAUSE * self._held_up)))
            finally:
                self._held_up -= 1
            pause = min(2 * pause, LONGEST_PAUSE)

    async def compute(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what may take the processor for a while, one after the other; raises as `run` does."""
        return await self._computer.run(function, *args, **kwargs)

    async def audit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what reads the whole ledger, one after the other; raises as `run` does."""
        return await self._auditor.run(function, *args, **kwargs)

    async def look_up(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what looks a key or a browser session up, in threads of its own; raises as `run` does."""
        return await self._key_readers.run(function, *args, **kwargs)

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Replay the ledger inside, one at a time, as others need the threads too; else raise `LedgerBusy`."""
        if self._auditing:
            raise LedgerBusy("the ledger is being verified already; nothing was changed. Try again")
        self._auditing = True
        try:
            yield
        finally:
            self._auditing = False

    async def readiness(self) -> str:
        """Say what keeps charges from being written, "" if nothing does; asked again once a second at most."""
        if not self.writer.ready:
            return "the process that writes is being started"
        if time.monotonic() > self._ready_at + _FRESH:
            if self._checking is None or self._checking.done():
                self._checking = asyncio.create_task(self._check())
            if not (await asyncio.wait({self._checking}, timeout=_READY_TIME))[0]:
                return "the ledger does not answer"
        return self._unready

    async def _check(self) -> None:
        """Look whether keys and accounts can be read, and have the writer process write something."""
        unready = "the keys cannot be read"
        try:
            await self.look_up(self.keys.find, "0" * 64)
            unready = "the ledger cannot be read"
            try:
                await self.run(self._backend.balances, [])
            except LedgerNotFound:  # the database was away when this worker started
                await self.run(self._backend.store.create)
            unready = "the ledger cannot be written"
            await self.writer.probe()
            unready = ""
        except OdographError as error:
            self._fails(f"{unready}: {str(error).removesuffix(key_in(error))}")
        self._ready_at, self._unready = time.monotonic(), unready

    async def admit(self, token: str) -> Caller:
        """Return the caller behind a token, or raise `NotAuthenticated`, which does not say why."""
        digest = digest_of_token(token)
        found = self._known.get(digest)
        age = math.inf if found is None else time.monotonic() - found.looked_up
        # It is looked up again before it is old, while everybody goes on with what is known.
        if age > _FRESH / 2 and looks_like_token(token):
            look = self._look(digest)
            if age > _FRESH:
                found = await asyncio.shield(look.task)  # the others' too, whatever becomes of this request
        # The digest found the key; the comparison says so again in a time that tells nothing.
        if (
            found is None
            or not equal_in_constant_time(found.key.digest, digest)
            or not found.key.valid_at(self.keys.now())
        ):
            raise NotAuthenticated("this API key is unknown, revoked or expired")
        return found.caller

    def _look(self, digest: str) -> _Look:
        """Return the look at a key that all who ask at once share, unless it began so long ago that it may be old."""
        now = time.monotonic()
        look = self._looking.get(digest)
        if look is None or now - look.begun > _FRESH:
            look = self._looking[digest] = _Look(now, asyncio.create_task(self._look_up(digest, now)))
            look.task.add_done_callback(self._looked)
        return look

    async def _look_up(self, digest: str, begun: float) -> _Known | None:
        """Look a key up, and remember it from the moment at which that began."""
        known = None
        try:
            key = await self.look_up(self._find, digest)
            known = None if key is None else _Known(begun, key, Caller.of(key))
        finally:
            look = self._looking.get(digest)
            if look is not None and look.task is asyncio.current_task():  # else others have newer news
                del self._looking[digest]
                self._known.pop(digest, None)
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                if known is not None:
                    self._known[digest] = known
        return known

    @staticmethod
    def _looked(task: asyncio.Task[_Known | None]) -> None:
        """Hear of a failure that nobody waits for: whoever comes next looks again, and is told."""
        if not task.cancelled():
            task.exception()

    def _find(self, digest: str) -> ApiKey | None:
        """Look a valid key up, and whether its principal's name was erased elsewhere: by another worker or program.

        One that is revoked or expired is as one that never was: no more is done for it, and it is not remembered.
        """
        key = self.keys.find(digest)
        if key is None or not key.valid_at(self.keys.now()):
            return None
        backend = self._books_of.get(key.principal)
        if (
            backend is not None
            and backend.identified
            and backend.identity() != backend.store.principal(backend.principal)
        ):
            backend.forget()
        return key

    def forget(self) -> None:
        """Look every key up again: one was revoked here."""
        self._known.clear()
        self._looking.clear()

    def forget_principals(self) -> None:
        """Look every principal's identity up again: a name was erased here, or a copy was read in."""
        self._books_of.clear()

    def problem(self, error: OdographError, caller: Caller | None, request_id: str = "") -> Problem:
        """Return an error as it is told to this caller, without where the ledger is."""
        if is_unusable(error):
            self._loop.call_soon_threadsafe(self._fails, str(error).removesuffix(key_in(error)))
        problem = problem_of(error, caller, request_id)
        problem.detail = self._places.sub("the ledger", problem.detail)
        return problem

    def _fails(self, reason: str) -> None:
        """Write into the log that the ledger cannot be used, when that begins; and watch until it can."""
        self._failed += 1
        if self._recovery is None and not self._closing:
            self._failed = 1
            logs.state("error", "unusable", reason)
            self._recovery = self._loop.create_task(self._recover(self._loop.time()))

    async def _recover(self, since: float) -> None:
        """Look now and then whether the ledger can be used again, and write that into the log."""
        while True:
            await asyncio.sleep(_RECOVERY)
            if not await self.readiness():
                break
        self._recovery = None
        lasted = self._loop.time() - since
        logs.state(
            "warning", "usable", f"the ledger can be used again, after {lasted:.0f} s and {self._failed} errors"
        )

    async def close(self) -> None:
        """Finish what was accepted and let go of everything."""
        self._closing = True
        for task in filter(None, (self._checking, self._recovery)):
            task.cancel()
        await self.solver.close()
        for threads in (self._readers, self._computer, self._auditor, self._key_readers):
            await asyncio.to_thread(threads.shutdown)
        await self.writer.close()
        self.keys.close()
        self._backend.leave()
        logs.flush()


def _places(url: str) -> re.Pattern[str]:
    """Return what finds a ledger in a message: its URL, and its file however that is written."""
    places = {url}
    if url.startswith(_SQLITE):
        path = Path(url.removeprefix(_SQLITE))
        places |= {str(path), str(path.absolute()), str(path.resolve())}
    return re.compile("|".join(map(re.escape, sorted(places, key=len, reverse=True))))
