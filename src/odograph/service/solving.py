"""The process that solves one exact policy: `python -m odograph.service.solving SECONDS BYTES`.

It reads a policy on standard input and writes {"compiled": ...} or {"refused": why} on standard output.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Final

from odograph.budgets import compile_policy
from odograph.core.policy import Policy
from odograph.errors import InvalidPolicy

__all__ = ["OUT_OF_MEMORY", "main"]

OUT_OF_MEMORY: Final = 3  # the exit code
_NICE: Final = 10  # requests go first; at 19 a busy machine would leave a solve no time at all


def main() -> None:
    """Solve within the processor time and the memory that the command line allows."""
    seconds, size = (int(argument) for argument in sys.argv[1:])
    os.nice(_NICE)
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_AS, size)
    _limit(resource.RLIMIT_CORE, 0)
    answer: dict[str, object]
    try:
        answer = {"compiled": compile_policy(Policy.from_dict(json.load(sys.stdin))).to_dict()}
    except InvalidPolicy as problem:
        answer = {"refused": str(problem)}
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    json.dump(answer, sys.stdout)


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process; where the machine's own is lower still, that one stays."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
