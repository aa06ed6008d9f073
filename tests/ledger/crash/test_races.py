"""Many processes and threads on one account near its limit, every request sent twice; and forked processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import forker
import pytest
from broken_stores import ledger_at
from racer import ACCOUNT
from workload import charges, policy

from odograph.errors import LedgerCorrupt

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
PROCESSES = 8
THREADS = 8  # in each process: 64 in all
COUNT = 100 if FULL else 8  # keys of each thread
CAPACITY = PROCESSES * THREADS * COUNT // 2  # half of what is asked for
TRIES = 6  # of a defect that chance may hide
PROGRAMS = Path(__file__).parent / "programs"

Answers = list[tuple[str, str, bool, int]]  # key, receipt, whether it was the first, when


def race(url: str, defect: str = "") -> list[Answers]:
    """Let the processes race for one account, and give what each was answered."""
    with ledger_at(url) as ledger:
        ledger.open_account(ACCOUNT, policy(CAPACITY))
    numbers = [str(number) for number in (PROCESSES, THREADS, COUNT)]
    racers = [
        subprocess.Popen(  # noqa: S603  our own code
            [sys.executable, str(PROGRAMS / "racer.py"), url, defect, str(number), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            racer.stdout.readline()  # it is ready
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        outputs = [racer.communicate() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert not any(racer.returncode for racer in racers), "".join(log for _, log in outputs)
    return [[tuple(answer) for answer in json.loads(out)] for out, _ in outputs]


def judge(url: str, answers: Iterable[Answers]) -> None:
    """The limit is reached and not passed, the replay adds up to it, each key was charged once for both who asked."""
    with ledger_at(url) as ledger:
        totals = ledger.account(ACCOUNT).totals
        assert totals.steps == CAPACITY, f"{totals.steps} charges of {CAPACITY}"
        ledger.verify()
        charged = charges(ledger)
    assert sum(count[ACCOUNT] for count in charged.values()) == CAPACITY
    assert all(count == Counter({ACCOUNT: 1}) for count in charged.values())
    receipts = defaultdict(set)
    first: Counter[str] = Counter()
    for key, receipt, fresh, _ in (answer for of_one in answers for answer in of_one if answer[1]):
        receipts[key].add(receipt)
        first[key] += fresh
    assert receipts.keys() == charged.keys()
    assert all(len(found) == 1 for found in receipts.values())
    assert all(first[key] == 1 for key in charged)


def shares(answers: Iterable[Answers]) -> list[float]:
    """How many answers each process had got when the first was done, in fair shares."""
    times = [[when for _, _, _, when in of_one] for of_one in answers]
    end = min(max(of_one) for of_one in times)
    got = [sum(when <= end for when in of_one) for of_one in times]
    return [PROCESSES * one / sum(got) for one in got]


def test_a_race_never_passes_the_limit_and_nobody_starves(store_url: str) -> None:
    answers = race(store_url)
    judge(store_url, answers)
    assert min(shares(answers)) >= 0.1, shares(answers)


def test_processes_that_do_not_take_turns_are_caught(tmp_path: Path) -> None:
    assert min(shares(race(f"sqlite:///{tmp_path}/ledger.db", "unfair"))) < 0.1


@pytest.mark.parametrize("defect", ["outside", "forgets"])
def test_a_gate_outside_the_transaction_or_forgotten_keys_are_caught(store_url: str, defect: str) -> None:
    answers = race(store_url, defect)
    with pytest.raises((AssertionError, LedgerCorrupt)):
        judge(store_url, answers)


def fork(url: str, defect: str, busy: int, timeout: int) -> subprocess.CompletedProcess[str]:
    """Let a process and its forked children spend through one ledger object."""
    with ledger_at(url) as ledger:
        ledger.open_account(ACCOUNT, policy(10**6))
    command = [sys.executable, str(PROGRAMS / "forker.py"), url, defect, str(busy), str(timeout)]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own code


def judge_fork(url: str, done: subprocess.CompletedProcess[str], busy: int) -> None:
    """Nobody failed, and every key was charged once."""
    assert done.returncode == 0, done.stderr
    with ledger_at(url) as ledger:
        ledger.verify()
        charged = charges(ledger)
    assert len(charged) == 1 + (forker.CHILDREN * forker.THREADS + busy) * forker.COUNT
    assert all(count == Counter({ACCOUNT: 1}) for count in charged.values())


@pytest.mark.parametrize("busy", [0, 4])
def test_forked_processes_share_a_ledger(store_url: str, busy: int) -> None:
    judge_fork(store_url, fork(store_url, "", busy, timeout=20), busy)


def test_forked_processes_that_share_its_connection_are_caught(store_url: str) -> None:
    for attempt in range(TRIES):  # by chance the processes get by: then again, in a new file
        url = store_url.replace("ledger.db", f"ledger-{attempt}.db")
        try:
            judge_fork(url, fork(url, "shares", 4, timeout=5), 4)
        except (AssertionError, LedgerCorrupt):
            return
        assert url != store_url, "the connection of a PostgreSQL server cannot be shared even by chance"
    pytest.fail(f"processes that share a connection got by in {TRIES} of {TRIES} tries")
