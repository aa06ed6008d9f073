"""Compare the library with a file of reference values: `python tests/golden/check.py FILE`.

A file is a list of `{"function", "inputs", "value"}`, values printed to 40 digits; null is no finite price. Every
result must be within 1e-12 of its value, relative (1e-10 for the Gaussian functions), and on the safe side: a bound
not below, a budget not above, compared at 50 digits. An unknown function name is a failure.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mpmath import mp, mpf

from odograph.core import conversions, odometers, theory
from odograph.core.filters import smooth
from odograph.core.fixed_point import read, up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DIGITS: Final = 50
_TOLERANCE: Final = mpf("1e-12")
_GAUSSIAN_TOLERANCE: Final = mpf("1e-10")


@dataclass(frozen=True, slots=True)
class _Entry:
    """How one named function is evaluated, and on which side of the true value its result must lie."""

    evaluate: Callable[..., float | bool]
    side: int  # +1 for a bound, -1 for a budget, 0 for a tuning, which is valid on either side
    tolerance: mpf = _TOLERANCE


def _odometer(boundary: Callable[..., float], **renamed: str) -> Callable[..., float]:
    """Make the reading of an odometer, boundary plus V/2, from a boundary."""

    def reading(*, V: float, delta_prime: float, **tuning: float) -> float:  # noqa: N803
        named = {renamed.get(name, name): value for name, value in tuning.items()}
        return up(boundary(V, delta_prime, **named) + 0.5 * V)

    return reading


def _filter_odometer(*, V: float, eps: float, delta_prime: float) -> float:  # noqa: N803
    at = conversions.filter_time(eps, delta_prime)
    return up(odometers.line(V, delta_prime, at=at) + 0.5 * V)


def _filter_accepts(*, eps: float, delta_prime: float, V: float, next_eps: float) -> bool:  # noqa: N803
    spent = Fraction(repr(V)) + Fraction(repr(next_eps)) ** 2
    return spent <= Fraction(conversions.filter_time(eps, delta_prime))


def _time_left(eps: float, delta_prime: float, v: float) -> Fraction:
    # The larger of the two readings of V, so that what is left is not overstated under either.
    spent = max(Fraction(v), Fraction(repr(v)))
    return max(Fraction(0), Fraction(conversions.filter_time(eps, delta_prime)) - spent)


def _float_down(value: Fraction) -> float:
    near = float(value)
    return near if Fraction(near) <= value else math.nextafter(near, -math.inf)


def _remaining(*, eps: float, delta_prime: float, V: float) -> float:  # noqa: N803
    left = _time_left(eps, delta_prime, V)
    root = math.sqrt(_float_down(left))
    while Fraction(root) ** 2 > left:
        root = math.nextafter(root, 0.0)
    return root


def _tanh_remaining(*, eps: float, delta_prime: float, V: float) -> float:  # noqa: N803
    return conversions.intrinsic_to_pure(_float_down(_time_left(eps, delta_prime, V)))


def _conditional_drift(*, eps: float, delta: float) -> float:
    return up(conversions.pure_to_zcdp(eps) + conversions.probdp_drift(eps, delta), 1.0)


def _smooth_price(time: Callable[..., float | Fraction | None], *names: str) -> _Entry:
    """Make a smooth price in intrinsic time, infinite where there is none; numbers may be written as strings."""

    def price(*, unit: Any, k: int, **inputs: Any) -> float:  # noqa: ANN401
        given = (read(inputs[name], name) for name in names)
        found = time(*given, read(unit, "unit"), k)
        # Padded, because an exact price is that of the decimals, and a reference may have read the floats.
        return math.inf if found is None else up(float(found))

    return _Entry(price, 1)


def _by_position(function: Callable[..., float], *names: str) -> Callable[..., float]:
    """Make a function of the named inputs of a row from one that takes them by position, in this order."""
    return lambda **inputs: function(*(inputs[name] for name in names))


def _bound(function: Callable[..., float], *names: str) -> _Entry:
    return _Entry(_by_position(function, *names), 1)


def _budget(function: Callable[..., float], *names: str) -> _Entry:
    return _Entry(_by_position(function, *names), -1)


_FUNCTIONS: Final[dict[str, _Entry]] = {
    "adv_comp_half_V": _bound(theory.advanced_half, "eps", "delta_prime"),
    "adv_comp_kov_tanh_drift": _bound(theory.advanced_hoeffding, "eps", "delta_prime"),
    "adv_comp_tanh_V": _bound(theory.advanced_tanh, "eps", "delta_prime"),
    "dp_filter_accepts": _Entry(_filter_accepts, 0),
    "dp_filter_remaining_eps": _Entry(_remaining, -1),
    "dp_filter_tanh_remaining_eps": _Entry(_tanh_remaining, -1),
    "dp_not_pdp_loss": _bound(theory.dp_not_probdp_loss, "eps", "delta"),
    "dp_to_pdp_delta_onesided": _bound(conversions.dp_to_probdp_delta_one_sided, "eps", "delta", "t"),
    "dp_to_pdp_delta_twosided": _bound(conversions.dp_to_probdp_delta, "eps", "delta", "t"),
    "filter_odometer": _Entry(_filter_odometer, 1),
    "gdp_delta": _Entry(_by_position(conversions.gdp_to_dp_delta, "mu", "eps"), 1, _GAUSSIAN_TOLERANCE),
    "kov_optimal_eps": _bound(theory.kov_epsilon, "k", "eps", "delta", "delta_total"),
    "mixture_gamma_opt": _Entry(_by_position(odometers.best_gamma, "V", "delta_prime"), 0),
    "mixture_odometer": _Entry(_odometer(odometers.mixture), 1),
    "mixture_onesided_closed_odometer": _Entry(_odometer(odometers.mixture_one_sided_closed), 1),
    "mixture_onesided_odometer": _Entry(_odometer(odometers.mixture_one_sided), 1),
    "pdp_conditional_drift": _Entry(_conditional_drift, 1),
    "pure_dp_to_zcdp_rho": _bound(conversions.pure_to_zcdp, "eps"),
    "rogers_odometer": _Entry(_odometer(odometers.rogers, n="people"), 1),
    "rr_renyi": _bound(conversions.pure_to_rdp, "eps", "order"),
    "smooth_limit_units": _budget(smooth.smooth_limit_units, "N", "k"),
    "smooth_price_pure": _smooth_price(smooth.smooth_time_pure, "e"),
    "smooth_price_renyi": _smooth_price(smooth.smooth_time_renyi, "d", "a"),
    "smooth_price_zcdp": _smooth_price(smooth.smooth_time_zcdp, "rho"),
    "stitched_odometer_exact": _Entry(_odometer(odometers.stitched, v0="start"), 1),
    "stitched_odometer_paper": _Entry(_odometer(odometers.stitched_paper, v0="start"), 1),
    "ystar": _budget(conversions.filter_time, "eps", "delta_prime"),
    "zcdp_max_rho_optimal": _budget(conversions.largest_rho, "eps", "delta"),
    "zcdp_to_dp_eps_optimal": _bound(conversions.zcdp_to_dp_epsilon, "rho", "delta"),
    "zcdp_to_dp_eps_standard": _bound(conversions.zcdp_to_dp_epsilon_standard, "rho", "delta"),
    "zcdp_to_dp_logdelta_optimal": _bound(conversions.zcdp_to_dp_log_delta, "rho", "eps"),
}


def _errors(entry: _Entry, inputs: dict[str, Any], value: object) -> tuple[mpf, mpf]:
    """Return the relative error of one result, and how far it lies on the unsafe side, or 0."""
    result = entry.evaluate(**inputs)
    if isinstance(value, bool):
        wrong = mpf(result is not value)
        return wrong, wrong
    truth, found = mpf("inf" if value is None else str(value)), mpf(result)
    if truth == found:  # both infinities included
        return mpf(0), mpf(0)
    signed = (found - truth) / abs(truth) if truth else mpf("inf") * (found - truth)
    if not mp.isfinite(signed):  # one of the two is infinite
        signed = mpf("inf") if found > truth else mpf("-inf")
    return abs(signed), max(mpf(0), -entry.side * signed)


def main(arguments: Sequence[str]) -> int:
    """Check every value of one file; return 0 if all are right, 1 if not."""
    (path,) = arguments
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    worst: dict[str, tuple[int, mpf, mpf]] = {}
    with mp.workdps(_DIGITS):
        for row in rows:
            name = row["function"]
            count, error, unsafe = worst.get(name, (0, mpf(0), mpf(0)))
            if name in _FUNCTIONS:
                this, this_unsafe = _errors(_FUNCTIONS[name], row["inputs"], row["value"])
            else:
                this = this_unsafe = mpf("inf")
            worst[name] = count + 1, max(error, this), max(unsafe, this_unsafe)
    failed = False
    for name, (count, error, unsafe) in worst.items():
        entry = _FUNCTIONS.get(name)
        good = entry is not None and error <= entry.tolerance and not unsafe
        failed = failed or not good
        verdict = "ok" if good else "FAIL" if entry else "FAIL: unknown function"
        sys.stdout.write(
            f"{name:34}{count:5}  worst {mp.nstr(error, 3):>9}  unsafe {mp.nstr(unsafe, 3):>9}  {verdict}\n"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
