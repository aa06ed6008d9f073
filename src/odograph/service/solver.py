"""Solve exact policies in processes of their own, so that none can starve the service.

The process is `python -m odograph.service.solver SECONDS BYTES`. It reads a policy from standard input and writes
{"compiled": ...} or {"refused": reason} to standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from odograph.compile import compile_at_hand, compile_policy
from odograph.core.policy import Compiled, Policy
from odograph.errors import InvalidArgument, InvalidPolicy, LedgerBusy

__all__ = ["Solver", "main"]

# The most expensive target that was tried, (0.1, 0.01), takes about 40 seconds and 200 MiB.
_CPU_SECONDS: Final = 120
_MEMORY: Final = 1 << 30  # bytes
_TIMEOUT: Final = 300.0  # seconds
_MAX_QUEUED: Final = 4  # solves
_OUT_OF_MEMORY: Final = 3  # the exit code of the process
_NICENESS: Final = 10  # requests come first; at 19 a busy machine would leave a solve no time at all

# One processor, and no memory reserved for a thread on each of them.
_ONE_THREAD: Final = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ADVICE: Final = (
    "choose a target of the shipped table such as (1, 1e-6), another filter such as 'zcdp', or compile the policy"
    " elsewhere and open the account with that"
)


class Solver:
    """Compiles policies, one solve at a time, each within `seconds` of processor time and `memory` bytes.

    A solve is stopped after `timeout` seconds, and at most `max_queued` more are queued.
    """

    def __init__(
        self,
        *,
        seconds: int = _CPU_SECONDS,
        memory: int = _MEMORY,
        timeout: float = _TIMEOUT,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        self._seconds = seconds
        self._memory = memory
        self._timeout = timeout
        self._max_queued = max_queued
        self._pending = 0  # the solve that runs, and those queued
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    @property
    def running(self) -> int | None:
        """The id of the process that is solving, if there is one."""
        return None if self._process is None else self._process.pid

    async def compile(self, policy: Policy) -> Compiled:
        """Compile a policy as `odograph.compile_policy` does, without blocking the event loop."""
        compiled = compile_at_hand(policy)
        if compiled is not None:
            return compiled
        if self._pending > self._max_queued:
            raise LedgerBusy(
                f"a policy is being solved and {self._max_queued} more are queued, the most allowed; try again later"
            )
        self._pending += 1
        try:
            async with self._lock:
                # An earlier request may have solved the same policy.
                return compile_at_hand(policy) or await self._solve(policy)
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Stop the running solve, and start no more."""
        self._closed = True
        if self._process is not None:
            await _kill(self._process)

    async def _solve(self, policy: Policy) -> Compiled:
        process = self._process = await self._start()
        try:
            if self._closed:  # perhaps while the process was being started
                raise LedgerBusy("the service is shutting down and solves no more policies; try again later")
            async with asyncio.timeout(self._timeout):
                answer = await _communicate(process, json.dumps(policy.to_dict()).encode())
        except TimeoutError:
            raise LedgerBusy(
                f"the exact budget was not solved in {self._timeout:g} seconds; try again when the machine is less"
                " busy"
            ) from None
        finally:
            self._process = None
            await _kill(process)
        return self._read(answer, process.returncode or 0)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # do not import from the working directory
                "-m",
                "odograph.service.solver",
                str(self._seconds),
                str(self._memory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,
            )
        except OSError as problem:
            raise LedgerBusy("the solver process could not be started; try again") from problem

    def _read(self, answer: bytes, code: int) -> Compiled:
        """Return what the process wrote, or raise what its exit code means."""
        if code == -signal.SIGXCPU:
            raise InvalidPolicy(f"the exact budget takes more than {self._seconds} seconds to solve; {_ADVICE}")
        if code == _OUT_OF_MEMORY:
            raise InvalidPolicy(f"the exact budget takes more than {self._memory >> 20} MiB to solve; {_ADVICE}")
        if code < 0:
            raise LedgerBusy("the solver process was stopped; try again")
        if code > 0:
            raise InvalidPolicy(f"the exact budget could not be solved; {_ADVICE}")
        form = json.loads(answer)
        if "refused" in form:
            raise InvalidPolicy(form["refused"])
        return Compiled.from_dict(form["compiled"])


async def _communicate(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    """Send the question to the process and return what it wrote; nothing if it ended before."""
    try:
        answer, _ = await process.communicate(question)
    except (OSError, RuntimeError):  # uvloop raises RuntimeError for a closed pipe
        await process.wait()
        return b""
    return answer


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process if it still runs, and wait for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def main() -> None:
    """Solve one policy within the processor time and memory given on the command line."""
    seconds, size = (int(argument) for argument in sys.argv[1:])
    os.nice(_NICENESS)
    import_module("scipy.special")  # while there is memory: an import that lacks it raises another error
    _lower_limit(resource.RLIMIT_CPU, seconds)
    _lower_limit(resource.RLIMIT_AS, _address_space() + size)
    _lower_limit(resource.RLIMIT_CORE, 0)
    answer: dict[str, object]
    try:
        answer = {"compiled": compile_policy(Policy.from_dict(json.load(sys.stdin))).to_dict()}
    except InvalidArgument as problem:
        answer = {"refused": str(problem)}
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    json.dump(answer, sys.stdout)


def _address_space() -> int:
    """Return the bytes of address space that this process has already; 0 where that is not known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _lower_limit(what: int, most: int) -> None:
    """Lower a resource limit of this process, unless its hard limit is lower already."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
