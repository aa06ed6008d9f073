"""Solver: exact policies are solved in a process of their own, so that none can starve the service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Final

from odograph.budgets import compiled_at_hand
from odograph.core.compiled import Compiled, compiled_from_dict
from odograph.core.policy import Policy
from odograph.errors import InvalidPolicy, LedgerBusy
from odograph.service.solving import OUT_OF_MEMORY

__all__ = ["Solver"]

# The dearest target that was tried, (0.1, 0.01), takes about 40 seconds and 200 MiB.
_SECONDS: Final = 120
_MEMORY: Final = 1 << 30
_PATIENCE: Final = 300.0
_WAITING: Final = 4

# One processor, and no memory set aside for a thread on each of them.
_ONE_THREAD: Final = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ADVICE: Final = (
    "choose a target of the shipped table such as (1, 1e-6), another rule such as 'zcdp', or compile the policy"
    " elsewhere and open the account with that"
)


class Solver:
    """Compiles policies, one solve at a time, each within `seconds` of processor time and `memory` bytes.

    A solve that is not done after `patience` seconds is stopped, and at most `waiting` more wait for their turn.
    """

    def __init__(
        self,
        *,
        seconds: int = _SECONDS,
        memory: int = _MEMORY,
        patience: float = _PATIENCE,
        waiting: int = _WAITING,
    ) -> None:
        self._seconds = seconds
        self._memory = memory
        self._patience = patience
        self._waiting = waiting
        self._asked = 0  # the one that is solved, and those that wait
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    @property
    def running(self) -> int | None:
        """The process that solves now, if one does."""
        return None if self._process is None else self._process.pid

    async def compile(self, policy: Policy) -> Compiled:
        """Compile a policy as `odograph.compile_policy` does, without keeping the event loop from anything else."""
        compiled = compiled_at_hand(policy)
        if compiled is not None:
            return compiled
        if self._asked > self._waiting:
            raise LedgerBusy(
                f"a policy is being solved and {self._waiting} are waiting, as many as may; nothing was changed."
                " Try again"
            )
        self._asked += 1
        try:
            async with self._turn:
                # Whoever was first may have asked for the same.
                return compiled_at_hand(policy) or await self._solve(policy)
        finally:
            self._asked -= 1

    async def close(self) -> None:
        """Stop the solve that runs, and let none begin any more."""
        self._closed = True
        if self._process is not None:
            await _end(self._process)

    async def _solve(self, policy: Policy) -> Compiled:
        process = self._process = await self._start()
        try:
            if self._closed:  # perhaps only while the process was being started
                raise LedgerBusy("the service is ending and solves no more policies; nothing was changed. Try again")
            async with asyncio.timeout(self._patience):
                answer = await _told(process, json.dumps(policy.to_dict()).encode())
        except TimeoutError:
            raise LedgerBusy(
                f"the exact budget was not solved in {self._patience:g} seconds; nothing was changed. Try again when"
                " the machine is less busy"
            ) from None
        finally:
            self._process = None
            await _end(process)
        return self._read(answer, process.returncode or 0)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the working folder is no place to import from
                "-m",
                "odograph.service.solving",
                str(self._seconds),
                str(self._memory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,
            )
        except OSError as problem:
            raise LedgerBusy(
                "no process could be started to solve the policy; nothing was changed. Try again"
            ) from problem

    def _read(self, answer: bytes, code: int) -> Compiled:
        """Read what the process wrote, or say what its end means to the one who asked."""
        if code == -signal.SIGXCPU:
            raise InvalidPolicy(f"the exact budget takes more than {self._seconds} seconds to solve: {_ADVICE}")
        if code == OUT_OF_MEMORY:
            raise InvalidPolicy(f"the exact budget takes more than {self._memory >> 20} MiB to solve: {_ADVICE}")
        if code < 0:
            raise LedgerBusy("the process that solved the exact budget was stopped; nothing was changed. Try again")
        if code > 0:
            raise InvalidPolicy(f"the exact budget could not be solved: {_ADVICE}")
        form = json.loads(answer)
        if "refused" in form:
            raise InvalidPolicy(form["refused"])
        return compiled_from_dict(form["compiled"])


async def _told(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    """Ask the process and return what it wrote; nothing, if it ended before it could be asked."""
    try:
        answer, _ = await process.communicate(question)
    except (OSError, RuntimeError):  # uvloop's word for a pipe that is closed
        await process.wait()
        return b""
    return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop a process, if it still runs, and wait until it is gone."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
