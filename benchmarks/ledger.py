"""The cost of a durable spend: this ledger compared with bare sqlite3, one transaction each, and with pgbench.

*Bare* sqlite3 does the same durable work with precomputed values: it updates the account's row and inserts those of
the entry and the key into the same tables, with the same settings, one transaction each, without gate, seal or
checks. *With its reads* it also reads the account's row and looks the key up, as any decision must. Rounds alternate
in one run; ratios are of operations per second, with their spread. Latencies are those of one call.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import secrets
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg

import odograph as odo
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Author, Charge
from odograph.ledger.engine import carry_out
from odograph.ledger.entries import Entry
from odograph.ledger.stores.base import queries
from odograph.ledger.stores.sqlite import SqliteStore
from timing import row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from postgres_server import PostgresServer

ROUNDS = 15  # enough for the median of a noisy machine to stay on one side of its target
REPLAYS = 7
POLICY = odo.Policy(20, "1e-6")  # the default, with no choice made; so roomy that nothing is refused
NARROW = odo.Policy(20, "1e-6", filter="zcdp")  # with half as many meters
COST = odo.PureDP("1e-6")
CLOCK = time.perf_counter

Run = Callable[[], "Load"]


class Load(NamedTuple):
    """Operations per second, and how long single calls took."""

    rate: float
    latencies: list[float]


def alone(spend: Callable[[], object], calls: int) -> Load:
    """Call again and again from one thread."""
    taken = []
    start = CLOCK()
    for _ in range(calls):
        before = CLOCK()
        spend()
        taken.append(CLOCK() - before)
    return Load(calls / (CLOCK() - start), taken)


def together(spends: Sequence[Callable[[], object]], calls: int) -> Load:
    """Call from a thread for each, at once."""
    loads: list[Load] = []
    gate = threading.Barrier(len(spends) + 1)

    def work(spend: Callable[[], object]) -> None:
        gate.wait()
        loads.append(alone(spend, calls))

    threads = [threading.Thread(target=work, args=(spend,)) for spend in spends]
    for thread in threads:
        thread.start()
    gate.wait()
    start = CLOCK()
    for thread in threads:
        thread.join()
    return Load(calls * len(spends) / (CLOCK() - start), [one for load in loads for one in load.latencies])


def report(title: str, pairs: Sequence[tuple[Load, Load]], wanted: float) -> None:
    """Print the ratio of the first to the second over the rounds, and the latencies of the first."""
    ours = [load for load, _ in pairs]
    latencies = sorted(one for load in ours for one in load.latencies)
    rate, floor = (statistics.median(load[i].rate for load in pairs) for i in (0, 1))
    p50, p99 = (1e3 * latencies[int(len(latencies) * part)] for part in (0.5, 0.99)) if latencies else (0.0, 0.0)
    note = f"{rate:,.0f} a second against {floor:,.0f}, p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    print(row(title, [a.rate / b.rate for a, b in pairs], f"at least {wanted}", note), flush=True)


def alternate(first: Run, second: Run, rounds: int) -> list[tuple[Load, Load]]:
    """Run both in every round, the one that begins by turns."""
    pairs = []
    for turn in range(rounds):
        a, b = (first(), second()) if turn % 2 else (second(), first())[::-1]
        pairs.append((a, b))
    return pairs


@contextmanager
def bare(path: Path, *, reads: bool = False) -> Iterator[Callable[[], object]]:
    """Yield a bare durable update and insert on the ledger's own tables, perhaps with the reads before them."""
    SqliteStore(path).create()
    with odo.connect(f"sqlite:///{path}") as ledger:
        account = ledger.open_account("bare", POLICY)
        account.spend(COST, key="first")
        example: Entry = account.history(1, 1)[0].entry
    sql = queries("sqlite")
    numbers = count(2)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):  # as the ledger's own
            connection.execute(f"PRAGMA {pragma}")
        totals = connection.execute("SELECT totals FROM accounts").fetchone()[0]

        def write() -> None:
            number = next(numbers)
            connection.execute("BEGIN IMMEDIATE")
            if reads:
                connection.execute(sql["some_accounts"], ("bare",)).fetchall()
                connection.execute(sql["keys"], (example.principal, f"key-{number}")).fetchall()
            moved = (number, example.seal, example.time, totals, 0, 0, "bare")
            connection.execute(sql["move_account"], moved)
            connection.execute(sql["append_entries"], example._replace(sequence=number))
            connection.execute(sql["remember_keys"], (example.principal, f"key-{number}", "bare", number))
            connection.execute("COMMIT")

        yield write


def sqlite(folder: Path, rounds: int) -> None:
    """Compare one client, also with the filter that 0.1.0 was measured with, and 64 threads, with bare sqlite3."""
    with (
        bare(folder / "bare.db") as floor,
        bare(folder / "reads.db", reads=True) as reading,
        odo.connect(f"sqlite:///{folder}/ours.db") as ledger,
    ):
        account = ledger.open_account("hot", POLICY)
        narrow = ledger.open_account("narrow", NARROW)
        numbers = count()

        def spend(account: odo.LedgerAccount = account) -> None:
            account.spend(COST, key=f"key-{next(numbers)}")

        def one() -> Load:
            return alone(spend, 1000)

        def zcdp() -> Load:
            return alone(partial(spend, narrow), 1000)

        def from_threads() -> Load:
            return together([spend] * 64, 100)

        def least() -> Load:
            return alone(floor, 1000)

        def with_reads() -> Load:
            return alone(reading, 1000)

        report("SQLite, one client, over bare sqlite3", alternate(one, least, rounds), 0.65)
        report("SQLite, one client, over bare sqlite3 with its reads", alternate(one, with_reads, rounds), 0.65)
        report("SQLite, one client, filter 'zcdp', over bare sqlite3", alternate(zcdp, least, rounds), 0.65)
        report("SQLite, 64 threads, over bare sqlite3 from one", alternate(from_threads, least, rounds), 2.5)
        print(f"  {ledger.verify()}")


def postgres(rounds: int) -> None:
    """Compare 32 threads of one process with one transaction each, and with pgbench."""
    with PostgresServer() as server, odo.connect(server.url) as ledger:
        accounts = [ledger.open_account(f"account-{i}", POLICY) for i in range(32)]
        hot = accounts[0]
        numbers = count()
        singles = [odo.connect(server.url) for _ in range(32)]
        others = [single.account("account-0") for single in singles]

        def spending(account: odo.LedgerAccount) -> Callable[[], object]:
            return lambda: account.spend(COST, key=f"key-{next(numbers)}")

        def grouped() -> Load:
            return together([spending(hot)] * 32, 100)

        def one_each() -> Load:
            return together([spending(other) for other in others], 20)

        def spread() -> Load:
            return together([spending(account) for account in accounts], 100)

        pairs = alternate(grouped, one_each, rounds)
        report("PostgreSQL, 32 threads on one account, over one transaction each", pairs, 5)
        pairs = alternate(spread, pgbench(server), rounds)
        report("PostgreSQL, 32 threads on different accounts, over pgbench -N", pairs, 0.8)
        for single in singles:
            single.close()
        print(f"  {ledger.verify()}")


def pgbench(server: PostgresServer) -> Run:
    """Return pgbench's simple update with 32 clients, in a database of its own."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bench")
    parts = urlsplit(server.url)
    program, where = str(server.bin("pgbench")), parts._replace(path="/bench").geturl()

    def call(*flags: str) -> str:
        done = subprocess.run([program, *flags, where], capture_output=True, text=True, check=True)  # noqa: S603
        return done.stdout

    call("-i", "-q", "-s", "32")

    def run() -> Load:
        found = re.search(r"tps = ([\d.]+)", call("-N", "-n", "-c", "32", "-j", "2", "-T", "2"))
        return Load(float(found[1]) if found else 0.0, [])

    return run


def verify(folder: Path, rounds: int, entries: int) -> None:
    """Time the replay of a ledger with many entries, beside reading and hashing the same rows with bare sqlite3."""
    store = SqliteStore(folder / "many.db")
    with odo.connect(f"sqlite:///{folder}/many.db") as ledger:
        ledger.open_account("many", POLICY)
        backend = LocalBackend(store, "benchmark")
        asks = backend.price({"many": COST})
        for start in range(0, entries, 2000):
            authors = [Author(backend.identity(), f"key-{i}") for i in range(start, start + 2000)]
            carry_out(store, [Charge(author, "spend", asks) for author in authors])
        pairs = []
        for _ in range(rounds):
            begun = CLOCK()
            found = ledger.verify()
            middle = CLOCK()
            with closing(sqlite3.connect(folder / "many.db")) as connection:
                for line in connection.execute("SELECT * FROM entries ORDER BY account, sequence"):
                    hashlib.sha256(repr(line).encode()).digest()
            pairs.append((found.entries / (middle - begun), found.entries / (CLOCK() - middle)))
    store.close()
    rates = sorted(rate for rate, _ in pairs)
    note = f"{statistics.median(rates):,.0f} entries a second, {rates[0]:,.0f} to {rates[-1]:,.0f}"
    print(row("verify, over reading and hashing the rows", [a / b for a, b in pairs], note=note), flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["sqlite", "postgres", "verify"])
    parser.add_argument("--few", action="store_true", help="one round, to see that it runs")
    chosen = parser.parse_args()
    only, rounds = chosen.only, 1 if chosen.few else ROUNDS
    versions = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    print(f"{versions}, {os.cpu_count()} cores; {rounds} rounds")
    with tempfile.TemporaryDirectory(prefix=f"bench-{secrets.token_hex(4)}-", dir=".") as name:
        folder = Path(name)
        if only in (None, "sqlite"):
            sqlite(folder, rounds)
        if only in (None, "verify"):
            verify(folder, *((1, 2_000) if chosen.few else (REPLAYS, 200_000)))
    if only in (None, "postgres"):
        postgres(rounds)


if __name__ == "__main__":
    main()
