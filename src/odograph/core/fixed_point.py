"""Decimal fixed point: read a number exactly, round a cost up, round a limit down.

Every admission in Odograph is integer arithmetic, and all rounding happens here. A cost is rounded **up** and a
limit **down**, once each, by exact rational arithmetic: `ceil(epsilon * 1e15)` in floating point under-rounds about
one draw in seven.

A float64 is read as the decimal that a person wrote, its shortest representation: `0.1` is one tenth. A
*computed* float64 is read as the binary number it is (`exactly`), after it was padded outward (`up`, `down`).
"""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Final, TypeAlias

import numpy as np

from odograph.errors import InvalidArgument, InvalidGuarantee

__all__ = [
    "BRIEF_DIGITS",
    "CEILING",
    "DELTA_SCALE",
    "MOST_PRICED",
    "PADDED",
    "SCALE",
    "ULP",
    "Number",
    "Numeric",
    "above",
    "brief_above",
    "brief_below",
    "ceil_computed",
    "ceil_sure",
    "ceil_written",
    "decimal_above",
    "decimal_below",
    "down",
    "exact_of",
    "exactly",
    "float_above",
    "float_below",
    "floor_units",
    "kept_above",
    "last_holding",
    "level",
    "limit_units",
    "padded_scale",
    "read",
    "text_of",
    "tidy",
    "units_computed",
    "units_squared",
    "units_written",
    "up",
    "written_above",
    "written_below",
]

# What a caller may pass, and what a guarantee stores: a float where the float's shortest decimal is the value
# exactly, a Fraction otherwise.
Numeric: TypeAlias = int | float | str | Decimal | Fraction
Number: TypeAlias = float | Fraction

SCALE: Final = 10**15  # units in 1 of epsilon, intrinsic time and Rényi divergence
DELTA_SCALE: Final = 10**18  # units in 1 of delta
CEILING: Final = 2**61  # a total never passes this, so sums of two fit in 64 bits
ULP: Final = 2.0**-53  # half a unit in the last place of a float64, relative
PADDED: Final = 7.0  # units of 2^-53, relative: how far a product with a `padded_scale` is off at most

# Above this a number means no privacy at all, and floating point would soon overflow: it has no finite price.
MOST_PRICED: Final = 10**6

BRIEF_DIGITS: Final = 4  # significant digits of a number for people
_MOST: Final = Fraction(sys.float_info.max)
_NEARLY: Final = 1 - Fraction(1, 10**9)
_SCALE: Final = float(SCALE)  # the same: it is a float, and a product of two floats takes half the time
_SURE: Final = 1e15  # units: as many as 15 digits can tell apart
_DECIMAL: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_RATIO: Final = re.compile(r"\d+/0*[1-9]\d*", re.ASCII)
# Digits of a numeric string, and bits of a number: beyond them exact arithmetic is a way to stall a service. Every
# float64 fits, subnormals too.
_LONGEST: Final = 400
_LONGEST_BITS: Final = 1300


def read(value: object, field: str, error: type[InvalidArgument] = InvalidGuarantee) -> Fraction:
    """Return `value` exactly, as a nonnegative rational.

    Booleans, NaN, infinities, negative numbers, strings that are not numbers and numbers of hundreds of digits
    raise `error`, which names the field and the value. A narrow float (`numpy.float32`) is widened exactly, then
    read like any float.
    """
    exact = _exact(value)
    if exact is None:
        raise error(f"{field} must be a finite number, such as 0.1 or '0.1' (got {_show(value)})")
    if exact < 0:
        raise error(f"{field} must not be negative (got {_show(value)})")
    if exact.numerator.bit_length() + exact.denominator.bit_length() > _LONGEST_BITS:
        raise error(f"{field} must be a number that can be kept exactly, of fewer digits (got {_show(value)})")
    return exact


def _show(value: object) -> str:
    """Return the value for a message: short, and without ever raising."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _exact(value: object) -> Fraction | None:  # noqa: PLR0911  one line per kind of number
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, float):
        return Fraction(repr(float(value))) if math.isfinite(value) else None
    if isinstance(value, np.floating):
        if not np.isfinite(value):
            return None
        narrow = value.itemsize < 8
        return Fraction(repr(float(value))) if narrow else Fraction(*value.as_integer_ratio())
    if isinstance(value, numbers.Rational):  # int, Fraction, NumPy integers
        return Fraction(int(value.numerator), int(value.denominator))
    if isinstance(value, str):
        text = value.strip()
        known = len(text) <= _LONGEST and (_DECIMAL.fullmatch(text) or _RATIO.fullmatch(text))
        return Fraction(text) if known else None
    if isinstance(value, Decimal):
        return Fraction(value) if value.is_finite() and abs(value.adjusted()) < 10**4 else None
    return None


def tidy(value: Fraction) -> Number:
    """Return the float whose shortest decimal is `value` exactly, or `value` itself where there is none."""
    try:
        near = float(value)
    except OverflowError:
        return value
    return near if Fraction(repr(near)) == value else value


def text_of(value: Number) -> str:
    """Write a stored number so that `read` returns it exactly: `0.1`, `1/3`."""
    return repr(value) if isinstance(value, float) else str(value)


def exact_of(value: Numeric) -> Fraction:
    """Return the exact rational of a stored number: a float is the decimal that it was written as."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def exactly(value: float) -> Fraction:
    """Return the binary value of a computed float, not the decimal that it prints as."""
    return Fraction(value)


def ceil_written(value: Number, scale: int) -> int:
    """Return the least integer number of units that is at least a stored number: for costs.

    A float is read as the decimal it was written as.
    """
    if isinstance(value, float) and (product := value * scale) < _SURE:
        # The decimal is half a unit in the last place from the float, and the product another half from theirs.
        if (sure := ceil_sure(product, 4)) is not None:
            return sure
        # Two decimals of at most 15 digits are never the same float: one that divides back to the value is the value.
        if (near := round(product)) / scale == value:
            return near
    top, bottom = Decimal(repr(value)).as_integer_ratio() if isinstance(value, float) else value.as_integer_ratio()
    return -((-top * scale) // bottom)


def ceil_computed(value: float, scale: int) -> int:
    """Return the least integer number of units that is at least a computed float, read as it is: for costs."""
    if (sure := ceil_sure(value * scale, 2)) is not None:
        return sure
    top, bottom = value.as_integer_ratio()
    return -((-top * scale) // bottom)


def ceil_sure(near: float, ulps: float) -> int | None:
    """Return the ceiling of a number within `ulps` units of 2^-53 of `near`, or None where that is not enough.

    Every spend rounds up several times, and exact arithmetic takes five times as long.
    """
    if near < _SURE:
        whole, error = math.floor(near), near * ulps * ULP
        if error < near - whole < 1.0 - error:
            return whole + 1
    return None


def units_computed(cost: float, source: Number) -> int:
    """Round a padded cost up to units of `SCALE`; a positive source costs at least one, however small."""
    sure = ceil_sure(cost * _SCALE, 2.0)  # at least one
    return max(int(source > 0), ceil_computed(cost, SCALE)) if sure is None else sure


def units_written(value: Number, scale: int = SCALE) -> int | None:
    """Round a stored number that is the cost itself up to units; None where it is too large to have a price."""
    return ceil_written(value, scale) if value <= MOST_PRICED else None


def units_squared(value: Number) -> int | None:
    """Round the square of a stored number up to units of `SCALE`; None where it is too large to have a price."""
    # Twice the decimal's distance from the float, the square and the product.
    sure = ceil_sure(value * value * SCALE, 8) if isinstance(value, float) else None
    return units_written(exact_of(value) ** 2) if sure is None else sure


def floor_units(value: Fraction, scale: int) -> int:
    """Return the largest integer number of units that is at most `value`: for limits."""
    return (value.numerator * scale) // value.denominator


def limit_units(value: float) -> int:
    """Round a computed budget down to units of `SCALE`, at most `CEILING`."""
    return min(CEILING, floor_units(exactly(value), SCALE))


def float_below(value: Fraction) -> float:
    """Return the largest float that is at most a nonnegative number: for a target, which may be understated."""
    near = float(value)
    return near if exactly(near) <= value else math.nextafter(near, 0.0)


def float_above(value: Fraction) -> float:
    """Return the smallest float that is at least the number: for a cost, which may be overstated."""
    near = float(value)
    return near if exactly(near) >= value else math.nextafter(near, math.inf)


def written_below(value: Fraction) -> float:
    """Return a float that is at most a nonnegative number when it is read as a decimal, as guarantees read it."""
    near = float(value)
    return near if exact_of(near) <= value else math.nextafter(near, 0.0)


def written_above(value: Fraction) -> float:
    """Return a float that is at least the number when it is read as a decimal, as guarantees read it."""
    near = float(value)
    return near if exact_of(near) >= value else math.nextafter(near, math.inf)


def decimal_above(value: Fraction, digits: int) -> Fraction:
    """Return the least number of so many decimal digits that is at least a positive number."""
    return _decimal(value, Context(prec=digits, rounding=ROUND_CEILING))


def decimal_below(value: Fraction, digits: int) -> Fraction:
    """Return the largest number of so many decimal digits that is at most a positive number."""
    return _decimal(value, Context(prec=digits, rounding=ROUND_FLOOR))


def _decimal(value: Fraction, rounding: Context) -> Fraction:
    return Fraction(rounding.divide(Decimal(value.numerator), Decimal(value.denominator)))


def brief_above(value: Number) -> str:
    """Write a nonnegative number for people by four significant digits, rounded up: what is spent, or a bound.

    What is rounded up in the last digits of a float is not shown: a loss of 0.1000000000000005 is 0.1, not 0.1001.
    """
    return _brief(decimal_above(exact_of(value) * _NEARLY, BRIEF_DIGITS)) if value else "0"


def brief_below(value: Number) -> str:
    """Write a nonnegative number for people by four significant digits, rounded down: what is left, or a limit."""
    return _brief(decimal_below(exact_of(value), BRIEF_DIGITS)) if value else "0"


def _brief(value: Fraction) -> str:
    """Write a number of few digits, including one that is too large for a float."""
    digits = BRIEF_DIGITS - 1
    return f"{float(value):.{BRIEF_DIGITS}g}" if value <= _MOST else f"{Decimal(int(value)):.{digits}e}"


def kept_above(value: Fraction) -> Number:
    """Return a number as guarantees keep it: exactly, or rounded up to a float where it has too many digits."""
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    return tidy(value) if bits <= _LONGEST_BITS else written_above(value)


def level(delta: Fraction) -> float:
    """Return a delta below 1 as a float below 1."""
    return min(float(delta), 1.0 - ULP)


def up(value: float, ulps: float = 16.0) -> float:
    """Return a float that is at least the true value, if `value` is within `ulps` units of 2^-53 of it."""
    return math.nextafter(value + abs(value) * (ulps * ULP), math.inf) if value else value


def down(value: float, ulps: float = 16.0) -> float:
    """Return a float that is at most the true value, if `value` is within `ulps` units of 2^-53 of it."""
    return math.nextafter(value - abs(value) * (ulps * ULP), -math.inf) if value else value


def padded_scale(*ulps: float) -> float:
    """Return a factor to units of `SCALE` that pads a positive number on the way, as `up` by each of `ulps` in turn.

    The product is for `ceil_sure`: it is within `PADDED` units of 2^-53 of the padded number in units, for one or two
    paddings. Let u be 2^-53. Beside what it is asked to add, `up` rounds the sum, by -u to u, and goes on to the next
    float, u to 2 u above: that is 1.5 u, give or take 1.5 u. The factor is within 2 u, and the product rounds by u:
    6 u for two paddings. A number so small that it has fewer digits than others is less than a unit in any case.
    """
    return SCALE * (1.0 + (sum(ulps) + 1.5 * len(ulps)) * ULP)


def above(value: float, ulps: float = 16.0) -> float:
    """Pad a positive number up; one that underflowed to zero becomes the smallest positive float."""
    return math.nextafter(value + value * (ulps * ULP), math.inf)


def last_holding(holds: Callable[[float], bool], inside: float, outside: float, width: float = 0.0) -> float:
    """Return the last float before `outside` where `holds` is true, searching from `inside`, where it is.

    `inside` may lie on either side of `outside`. The search stops at adjacent floats, or once the two
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
