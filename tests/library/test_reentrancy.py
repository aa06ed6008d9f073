"""A fork of this process: locks are replaced in the child, connections are closed before it or left to the parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Another thread holds the lock at the fork. The child reports what it can use, and the parent what it still has.
PROGRAM = """
import gc, os, sys, threading
from odograph import concurrency

class Connection:
    def __del__(self):
        os.write(1, b"closed ")

class Holder:
    def __init__(self):
        self.lock, self.connection = threading.Lock(), Connection()
        concurrency.renew_after_fork(self)
    def after_fork(self):
        concurrency.leave_to_parent(self.connection)
        self.lock, self.connection = threading.Lock(), None

class Suspended:
    def __init__(self):
        self.events = []
        concurrency.suspend_for_forks(self)
    def forking(self):
        self.events.append("closed")
        yield
    def reported(self):
        return ",".join(self.events)

defect = sys.argv[1]
if defect == "shares":
    Holder.after_fork = lambda self: None
if defect == "drops":
    concurrency.leave_to_parent = lambda *_: None
holder, suspended, dropped = Holder(), Suspended(), Suspended()
del dropped
gc.collect()
assert len(concurrency._SUSPENDED) == 1  # registering keeps nothing alive
holder.lock.acquire()
pid = os.fork()
if not pid:
    free = holder.lock.acquire(timeout=0.2)
    gc.collect()
    os.write(1, f"{free} {suspended.reported()} {len(concurrency._FORKING)}".encode())
    os._exit(0)
os.waitpid(pid, 0)
assert holder.lock.locked() and holder.connection is not None and not concurrency._FORKING
os._exit(0)
"""


def report(defect: str) -> str:
    """Return what the forked process found."""
    command = [sys.executable, "-c", PROGRAM, defect]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout  # noqa: S603  ours


def test_a_forked_process_has_free_locks_and_leaves_connections_to_its_parent() -> None:
    assert report("") == "True closed 0"


@pytest.mark.parametrize(("defect", "found"), [("shares", "False closed 0"), ("drops", "closed True closed 0")])
def test_a_holder_that_shares_its_lock_or_drops_its_connection_is_caught(defect: str, found: str) -> None:
    assert report(defect) == found
