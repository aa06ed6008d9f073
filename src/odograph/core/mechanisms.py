"""Mechanisms to guarantees: what a known mechanism costs, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from odograph.core.conversions import laplace_to_zcdp
from odograph.core.guarantees import GDP, ZCDP, Guarantee, Parallel, PureDP
from odograph.core.units import Numeric, read, tidy, up
from odograph.errors import InvalidGuarantee, UnprovenComposition

__all__ = [
    "discrete_gaussian",
    "exponential",
    "exponential_zcdp",
    "gaussian",
    "laplace",
    "laplace_zcdp",
    "parallel",
    "randomized_response",
]


def _ratio(top: Numeric, bottom: Numeric, top_name: str, bottom_name: str) -> Numeric:
    """Return sensitivity over noise, exactly. No noise is no privacy: it is refused, not free."""
    noise = read(bottom, bottom_name)
    if noise == 0:
        raise InvalidGuarantee(f"{bottom_name} must be above 0: without noise there is no privacy, at any price")
    return tidy(read(top, top_name) / noise)


def laplace(scale: Numeric, sensitivity: Numeric = 1) -> PureDP:
    """Return the guarantee of Laplace noise of the given scale.

    Theorem: Dwork, McSherry, Nissim, Smith 2006.
    Assumes: `sensitivity` bounds the L1 change of the query between neighbours.
    """
    return PureDP(_ratio(sensitivity, scale, "laplace(sensitivity)", "laplace(scale)"))


def laplace_zcdp(scale: Numeric, sensitivity: Numeric = 1) -> ZCDP:
    """Return the zCDP guarantee of Laplace noise, smaller than that of an arbitrary mechanism as private.

    Theorem: the epsilon-DP Laplace mechanism is (epsilon + e^-epsilon - 1)-zCDP (arXiv 2510.25746).
    Assumes: `sensitivity` bounds the change of a scalar query between neighbours.
    """
    epsilon = _ratio(sensitivity, scale, "laplace_zcdp(sensitivity)", "laplace_zcdp(scale)")
    # Above a thousand the two differ by 1, of a number that means no privacy.
    return ZCDP(laplace_to_zcdp(float(epsilon)) if read(epsilon, "epsilon") <= 1000 else epsilon)


def gaussian(sigma: Numeric, sensitivity: Numeric = 1) -> GDP:
    """Return the guarantee of Gaussian noise of standard deviation `sigma`.

    Theorem: Dong, Roth, Su 2022: exactly (sensitivity/sigma)-GDP.
    Assumes: `sensitivity` bounds the L2 change of the query between neighbours.
    """
    return GDP(_ratio(sensitivity, sigma, "gaussian(sensitivity)", "gaussian(sigma)"))


def discrete_gaussian(sigma: Numeric, sensitivity: Numeric = 1) -> ZCDP:
    """Return the guarantee of discrete Gaussian noise; it is not a Gaussian, so no GDP value.

    Theorem: Canonne, Kamath, Steinke 2020, Theorem 14: (sensitivity^2 / (2 sigma^2))-zCDP.
    Assumes: an integer-valued query whose change between neighbours is at most `sensitivity`.
    """
    ratio = _ratio(sensitivity, sigma, "discrete_gaussian(sensitivity)", "discrete_gaussian(sigma)")
    return ZCDP(tidy(read(ratio, "discrete_gaussian") ** 2 / 2))


def exponential(epsilon: Numeric) -> PureDP:
    """Return the guarantee of an exponential mechanism run at `epsilon`.

    Theorem: McSherry, Talwar 2007.
    Assumes: scores weighted by exp(epsilon * score / (2 sensitivity)).
    """
    return PureDP(epsilon)


def exponential_zcdp(epsilon: Numeric) -> ZCDP:
    """Return the zCDP guarantee of an exponential mechanism, a quarter of what epsilon-DP alone would give.

    Theorem: epsilon-bounded range implies (epsilon^2/8)-zCDP (Cesar, Rogers 2021).
    Assumes: as `exponential`: such a mechanism has range bounded by epsilon.
    """
    return ZCDP(tidy(read(epsilon, "exponential_zcdp(epsilon)") ** 2 / 8))


def parallel(parts: Mapping[str, Guarantee] | Sequence[Guarantee], *, data: str = "static") -> Parallel:
    """Return the guarantee of one mechanism on each of several disjoint parts of the data, as one step.

    `parts` holds a guarantee for each part. With people added or removed the step is priced at the dearest part,
    meter by meter; with people replaced, at the dearest two.

    Theorem: parallel composition (McSherry 2009): neighbours differ in one part, or in two if a person moves.
    Assumes: no record is in two parts, and its part follows from the record alone; the data do not change with the
        answers. Where records arrive or change adaptively, approximate guarantees do not compose in parallel, so
        `data="changing"` raises `UnprovenComposition`: spend the sum there.
    """
    if data != "static":
        raise UnprovenComposition(
            f"parallel composition is not proven for {data!r} data: where records change with the answers, one"
            " person can reach every part. Spend the parts one after the other"
        )
    return Parallel(tuple(parts.values()) if isinstance(parts, Mapping) else parts)  # type: ignore[arg-type]


def randomized_response(truth: Numeric, categories: int = 2) -> PureDP:
    """Return the guarantee of answering truthfully with probability `truth`, else another answer uniformly.

    Theorem: Warner 1965: epsilon = log(truth (categories - 1) / (1 - truth)).
    Assumes: one answer per person.
    """
    probability = read(truth, "randomized_response(truth)")
    if isinstance(categories, bool) or not isinstance(categories, int) or categories < 2:
        raise InvalidGuarantee(f"randomized_response(categories) must be a whole number from 2, not {categories!r}")
    if not 0 < probability < 1:
        raise InvalidGuarantee(f"randomized_response(truth) must lie between 0 and 1, and {truth!r} does not")
    odds = probability * (categories - 1) / (1 - probability)
    # Near even odds the logarithm would cancel; log1p of the exact difference does not.
    return PureDP(up(math.log1p(float(max(odds, 1 / odds) - 1)), 32))
