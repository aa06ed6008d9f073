"""Bisection that ends on the side where the promise holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["last_holding"]


def last_holding(holds: Callable[[float], bool], inside: float, outside: float, width: float = 0.0) -> float:
    """Return the last float before `outside` where `holds` is true, searching from `inside`, where it is.

    `inside` may lie on either side of `outside`. The search stops at neighbouring floats, or once the two
    ends are within `width`; the answer is the end where `holds` was seen to be true, or `inside` itself.
    """
    while abs(outside - inside) > width:
        middle = inside + 0.5 * (outside - inside)
        if middle in (inside, outside):
            break
        if holds(middle):
            inside = middle
        else:
            outside = middle
    return inside
