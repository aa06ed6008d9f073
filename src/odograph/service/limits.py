"""RateLimit: how often one key may ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

from odograph.errors import BadRequest

__all__ = ["RateLimit"]

_SECOND: Final = 1_000_000_000  # nanoseconds
_KEPT: Final = 1024  # buckets, before it is worth looking for full ones


class RateLimit:
    """A bucket of tokens per key: `burst` of them at most, filled at `rate` a second; a rate of 0 is no limit.

    In any time of t seconds one key is admitted at most burst + rate * t requests, exactly.
    """

    # Instead of tokens a bucket is the moment at which it is full again: one number, and integers add up exactly.
    __slots__ = ("_capacity", "_clock", "_full_at", "_sweep_at", "_token")

    def __init__(self, rate: float, burst: float | None = None, *, clock: Callable[[], int] = monotonic_ns) -> None:
        if not (rate == 0 or 1e-3 <= rate <= 1e9):
            raise BadRequest(f"rate must be 0 (no limit) or from 0.001 to 1e9 requests a second, and {rate!r} is not")
        burst = max(1.0, 2.0 * rate) if burst is None else burst
        if not 1 <= burst <= 1e12:
            raise BadRequest(f"burst must be from 1 to 1e12 requests, and {burst!r} is not")
        self._clock = clock
        self._token = math.ceil(_SECOND / rate) if rate else 0  # nanoseconds in which one is filled in
        self._capacity = math.floor(burst) * self._token
        self._full_at: dict[str, int] = {}
        self._sweep_at = _KEPT

    def take(self, key: str, count: int = 1) -> float:
        """Take `count` tokens of a key and return 0, or take none and return the seconds until they are there.

        More than the bucket holds are never there: infinity.
        """
        now = self._clock()
        full_at = self._full_at.get(key, now)
        if full_at < now:  # noqa: PLR1730  every request comes by here, and max() takes twice as long
            full_at = now
        after = full_at + count * self._token
        early = after - now - self._capacity
        if early > 0:
            return early / _SECOND if count * self._token <= self._capacity else math.inf
        self._full_at[key] = after
        if len(self._full_at) > self._sweep_at:
            self._sweep(now)
        return 0.0

    def __len__(self) -> int:
        return len(self._full_at)

    def _sweep(self, now: int) -> None:
        """Forget full buckets: they are as new ones. Next time when there are twice as many, so a call costs O(1)."""
        self._full_at = {key: full_at for key, full_at in self._full_at.items() if full_at > now}
        self._sweep_at = max(_KEPT, 2 * len(self._full_at))
