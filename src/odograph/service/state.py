"""AppState: what the handlers of a worker share: the ledger, the API keys, the writer client, the threads."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

from odograph.connection import store_at
from odograph.errors import LedgerBusy, LedgerNotFound, NotAuthenticated, OdographError
from odograph.ledger.backend import LocalBackend
from odograph.ledger.engine import FIRST_RETRY_DELAY, LONGEST_RETRY_DELAY, FairQueue
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import RowLocked
from odograph.service import logs
from odograph.service.auth import ApiKey, Caller, RateLimit, digest_of_token, equal_in_constant_time, looks_like_token
from odograph.service.key_store import KeyStore, connect_keys
from odograph.service.monitoring import Alerts, Leader, Metrics, Sender, rules_of
from odograph.service.schemas import Problem
from odograph.service.settings import Settings
from odograph.service.solver import Solver
from odograph.service.visibility import is_unusable, operator_message, problem_of
from odograph.service.writer import RetryingEngine, Start, WriterClient, start_process

__all__ = ["CLIENT", "AppState", "Threads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# The principal whose request this task answers; empty until it is known.
CLIENT: Final[ContextVar[str]] = ContextVar("client", default="")


class Threads:
    """A few threads of one event loop, and at most `max_queued` queued calls, each for at most `timeout` seconds."""

    def __init__(self, name: str, threads: int, *, max_queued: int = 256, timeout: float = 15.0) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"odograph-{name}")
        self._idle = threads
        self._timeout = timeout
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(max_queued)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a blocking function in a thread; raise `LedgerBusy` if the queue is full, or none is free in time."""
        loop = asyncio.get_running_loop()
        if self._idle:
            self._idle -= 1
        else:
            await self._wait_for_thread(loop.create_future())
        try:
            return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))
        finally:
            self._release_thread()

    def shutdown(self) -> None:
        """Wait for the running calls, and end the threads."""
        self._pool.shutdown(wait=True)

    async def _wait_for_thread(self, thread_free: asyncio.Future[None]) -> None:
        """Wait until another call releases its thread to this one."""
        client = CLIENT.get()
        try:
            self._queue.add(client, thread_free)
        except LedgerBusy:
            raise _busy() from None
        try:
            done, _ = await asyncio.wait({thread_free}, timeout=self._timeout)
        except asyncio.CancelledError:
            if thread_free.done():  # the thread was released to a call that was canceled
                self._release_thread()
            else:
                self._queue.remove(client, thread_free)
            raise
        if not done:
            self._queue.remove(client, thread_free)
            raise _busy()

    def _release_thread(self) -> None:
        """Pass the thread on to the next queued call, or mark it idle."""
        group: list[asyncio.Future[None]] = []
        self._queue.take(group, 1)
        if group:
            group[0].set_result(None)
        else:
            self._idle += 1


def _busy() -> LedgerBusy:
    return LedgerBusy("the service has as many requests as it can hold; try again")


# Threads share the interpreter with the event loop, so there are few: some that wait for the ledger, one that
# computes, one that reads all of it. Keys have threads of their own, so that a caller is known whatever others do.
_READERS: Final = 4
_KEY_READERS: Final = 2
KEY_LOOKUP_TTL: Final = (
    1.0  # seconds for which a key that was looked up is valid: a revoked one is refused after that
)
_MAX_QUEUED_ROUNDS: Final = 32
_ROUND_TIMEOUT: Final = 300.0  # seconds that a round waits for those before it
_MAX_KNOWN_KEYS: Final = 10_000
_RECOVERY_INTERVAL: Final = 2.0  # seconds between two checks whether the ledger can be used again
_READINESS_TIMEOUT: Final = 3.0  # seconds after which a ledger that does not answer is not ready
_MAX_POLLS: Final = 100  # requests that may wait for events; each reads the ledger twice a second
_SQLITE: Final = "sqlite:///"
_SERVICE: Final = "service"  # the principal that reads for the metrics; it writes nothing


class _KnownKey(NamedTuple):
    """A key that was looked up a moment ago."""

    looked_up: float
    key: ApiKey
    caller: Caller


class _Lookup(NamedTuple):
    """A key that is being looked up, and since when."""

    started: float
    task: asyncio.Task[_KnownKey | None]


class AppState:
    """Made inside the event loop that it serves."""

    def __init__(self, settings: Settings, start: Start = start_process) -> None:
        self.settings = settings
        self.metrics = Metrics()
        store = store_at(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off)
        with suppress(LedgerBusy):  # a database that is away now may come back; until then nothing is ready
            store.create()
        self.writer = WriterClient(settings, self.metrics.count_commit, self.metrics.set_queue_depth, start)
        self.writer.on_restart = self.metrics.count_restart
        self._backend = LocalBackend(store, _SERVICE, self.writer)
        self._backends: dict[str, LocalBackend] = {}  # by principal
        self.keys: KeyStore = connect_keys(
            settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off
        )
        self.solver = Solver()
        self.limit = RateLimit(settings.rate, settings.burst)
        self.proxy = settings.proxy
        self.alerts = Alerts() if settings.alerts is None else Alerts(rules_of(settings.alerts))
        self._readers = Threads("readers", _READERS)
        self._computer = Threads("computer", 1)
        self._auditor = Threads("auditor", 1)
        self._key_readers = Threads("keys", _KEY_READERS)
        self._populations = Threads("populations", 1, max_queued=_MAX_QUEUED_ROUNDS, timeout=_ROUND_TIMEOUT)
        self._auditing = False
        self._polls = 0  # requests that wait for events
        self._loop = asyncio.get_running_loop()
        self._checking: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._failed = 0
        self._retrying = 0  # calls that wait for what another client of the database holds
        self._closing = False
        self._ready_at = -math.inf
        self._unready = ""
        self._location = _location_pattern(self._backend.url)
        self.started = self.keys.now()
        self.key_uses: dict[str, int] = {}  # when a key was last used here, to about a second; by id
        self._known: dict[str, _KnownKey] = {}
        self._looking: dict[str, _Lookup] = {}
        self._leader = Leader(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off)
        self._alert_threads = Threads("alerts", 1)
        self._sending: asyncio.Task[None] | None = None
        if settings.alerts is not None:
            sender = Sender(self.alerts, lambda: self.ledger, self._leader, self._alert_threads.run)
            self._sending = self._loop.create_task(sender.run())

    @property
    def ledger(self) -> Ledger:
        """The ledger as the service itself reads it."""
        return Ledger(self._backend)

    def backend_of(self, caller: Caller) -> LocalBackend:
        """Return the backend of the caller's principal, which has it whatever its keys are."""
        found = self._backends.get(caller.principal)
        if found is None:
            found = self._backends[caller.principal] = self._backend.acting_as(caller.principal)
        return found

    def ledger_of(self, caller: Caller) -> Ledger:
        """Return the ledger, acting as the caller's principal."""
        return Ledger(self.backend_of(caller))

    def population_ledger(self, caller: Caller) -> Ledger:
        """Return the ledger for the thread of populations, which may wait for other clients of the database."""
        backend = self._backend.acting_as(caller.principal)
        backend.engine = RetryingEngine(self.writer)
        return Ledger(backend)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what waits for the ledger in a thread; raise `LedgerBusy` if too many calls are queued.

        A call that wants to write to an account that another client of the database holds is made again, until the
        timeout; it waits outside the threads, which are few and shared.
        """
        deadline = self._loop.time() + self.settings.timeout
        delay = FIRST_RETRY_DELAY
        while True:
            try:
                return await self._readers.run(function, *args, **kwargs)
            except RowLocked:
                left = deadline - self._loop.time()
                if left <= 0:
                    raise
            self._retrying += 1
            try:
                await asyncio.sleep(min(left, max(delay, FIRST_RETRY_DELAY * self._retrying)))
            finally:
                self._retrying -= 1
            delay = min(2 * delay, LONGEST_RETRY_DELAY)

    async def compute(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what may compute for long, one call after the other; raises as `run` does."""
        return await self._computer.run(function, *args, **kwargs)

    async def audit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what reads the whole ledger, one call after the other; raises as `run` does."""
        return await self._auditor.run(function, *args, **kwargs)

    async def run_population(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what reads or writes the files of populations, one call after the other; raises as `run` does."""
        return await self._populations.run(function, *args, **kwargs)

    async def look_up(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call what looks up a key or a browser session, in threads of its own; raises as `run` does."""
        return await self._key_readers.run(function, *args, **kwargs)

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Guard a replay of the ledger, of which only one may run; else raise `LedgerBusy`."""
        if self._auditing:
            raise LedgerBusy("the ledger is being verified already; try again")
        self._auditing = True
        try:
            yield
        finally:
            self._auditing = False

    @contextmanager
    def long_poll(self, seconds: float) -> Iterator[float]:
        """Yield until when a request may wait for events, on the clock `time.monotonic`; not at all if many do."""
        self._polls += 1
        try:
            yield time.monotonic() + (seconds if self._polls <= _MAX_POLLS else 0.0)
        finally:
            self._polls -= 1

    async def readiness(self) -> str:
        """Return why charges cannot be written, "" if they can; checked at most once a second."""
        if not self.writer.ready:
            return "the writer process is being started"
        if time.monotonic() > self._ready_at + KEY_LOOKUP_TTL:
            if self._checking is None or self._checking.done():
                self._checking = asyncio.create_task(self._check())
            if not (await asyncio.wait({self._checking}, timeout=_READINESS_TIMEOUT))[0]:
                return "the ledger does not answer"
        return self._unready

    async def _check(self) -> None:
        """Check whether keys and accounts can be read, and have the writer process write something."""
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
            self._fails(f"{unready}: {operator_message(error)}")
        self._ready_at, self._unready = time.monotonic(), unready

    async def admit(self, token: str) -> Caller:
        """Return the caller behind a token, or raise `NotAuthenticated`, without a reason."""
        digest = digest_of_token(token)
        found = self._known.get(digest)
        age = math.inf if found is None else time.monotonic() - found.looked_up
        # It is looked up again before it expires, while requests go on with what is known.
        if age > KEY_LOOKUP_TTL / 2 and looks_like_token(token):
            look = self._look(digest)
            if age > KEY_LOOKUP_TTL:
                found = await asyncio.shield(look.task)  # other requests share it, whatever becomes of this one
        # The digest found the key; it is compared again in constant time.
        if (
            found is None
            or not equal_in_constant_time(found.key.digest, digest)
            or not found.key.valid_at(self.keys.now())
        ):
            raise NotAuthenticated("this API key is unknown, revoked or expired")
        return found.caller

    def _look(self, digest: str) -> _Lookup:
        """Return the lookup of a key that concurrent requests share, unless it started too long ago."""
        now = time.monotonic()
        look = self._looking.get(digest)
        if look is None or now - look.started > KEY_LOOKUP_TTL:
            look = self._looking[digest] = _Lookup(now, asyncio.create_task(self._look_up(digest, now)))
            look.task.add_done_callback(self._looked)
        return look

    async def _look_up(self, digest: str, begun: float) -> _KnownKey | None:
        """Look a key up, and remember it from the moment at which that started."""
        known = None
        try:
            key = await self.look_up(self._find, digest)
            known = None if key is None else _KnownKey(begun, key, Caller.of(key))
        finally:
            look = self._looking.get(digest)
            if look is not None and look.task is asyncio.current_task():  # else a later lookup has replaced it
                del self._looking[digest]
                self._known.pop(digest, None)
                if len(self._known) >= _MAX_KNOWN_KEYS:
                    self._known.clear()
                if known is not None:
                    self._known[digest] = known
                    self.key_uses[known.key.id] = self.keys.now()
        return known

    @staticmethod
    def _looked(task: asyncio.Task[_KnownKey | None]) -> None:
        """Retrieve the exception of a lookup that no request awaits; the next one looks again."""
        if not task.cancelled():
            task.exception()

    def _find(self, digest: str) -> ApiKey | None:
        """Look up a valid key, and whether its principal's name was erased by another worker or program.

        A key that is revoked or expired is treated as one that never existed: nothing more is done or remembered.
        """
        key = self.keys.find(digest)
        if key is None or not key.valid_at(self.keys.now()):
            return None
        backend = self._backends.get(key.principal)
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
        self._backends.clear()

    def problem(self, error: OdographError, caller: Caller | None, request_id: str = "") -> Problem:
        """Return the problem for an error as this caller may see it, without the ledger's location."""
        if is_unusable(error):
            self._loop.call_soon_threadsafe(self._fails, operator_message(error))
        problem = problem_of(error, caller, request_id)
        problem.detail = self._location.sub("the ledger", problem.detail)
        if self.settings.population_root is not None:
            problem.detail = problem.detail.replace(
                str(self.settings.population_root.absolute()), "the population root"
            )
        return problem

    def _fails(self, reason: str) -> None:
        """Log that the ledger cannot be used, once, and check until it can."""
        self._failed += 1
        if self._recovery is None and not self._closing:
            self._failed = 1
            logs.state("error", "unusable", reason)
            self._recovery = self._loop.create_task(self._recover(self._loop.time()))

    async def _recover(self, since: float) -> None:
        """Check now and then whether the ledger can be used again, and log it."""
        while True:
            await asyncio.sleep(_RECOVERY_INTERVAL)
            if not await self.readiness():
                break
        self._recovery = None
        lasted = self._loop.time() - since
        logs.state(
            "warning", "usable", f"the ledger can be used again, after {lasted:.0f} s and {self._failed} errors"
        )

    async def close(self) -> None:
        """Finish what was accepted, and close everything."""
        self._closing = True
        for task in filter(None, (self._checking, self._recovery, self._sending)):
            task.cancel()
        await self.solver.close()
        for threads in (
            self._readers,
            self._computer,
            self._auditor,
            self._key_readers,
            self._populations,
            self._alert_threads,
        ):
            await asyncio.to_thread(threads.shutdown)
        self._leader.release()
        await self.writer.close()
        self.keys.close()
        self._backend.leave()
        logs.flush()


def _location_pattern(url: str) -> re.Pattern[str]:
    """Return a pattern that finds a ledger in a message: its URL, and its file however that is written."""
    locations = {url}
    if url.startswith(_SQLITE):
        path = Path(url.removeprefix(_SQLITE))
        locations |= {str(path), str(path.absolute()), str(path.resolve())}
    return re.compile("|".join(map(re.escape, sorted(locations, key=len, reverse=True))))
