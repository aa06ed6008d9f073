"""A program whose children open the first account of a ledger: one child that is killed, or several at once.

opener.py killed URL...     a child for each URL, killed after a few milliseconds
opener.py together URL N    so many children, each with an account of its own
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback

from broken_stores import ledger_at
from workload import policy


def child(url: str, name: str) -> int:
    """Open an account in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    try:
        ledger_at(url).open_account(name, policy(1))
    except BaseException:  # noqa: BLE001  it is reported, and the process ends
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def killed(urls: list[str]) -> None:
    """Kill each child at some moment between its first step and its last."""
    for url in urls:
        pid = child(url, "first")
        time.sleep(random.uniform(0.001, 0.012))  # noqa: S311  any moment will do
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def together(url: str, count: int) -> int:
    """Count the children that failed."""
    children = [child(url, f"account-{number}") for number in range(count)]
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in children)


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "killed":
        killed(rest)
    else:
        sys.exit(together(rest[0], int(rest[1])))
