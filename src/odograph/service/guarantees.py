"""From what a caller wrote to a guarantee: the same object for the same numbers, so that it is priced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from odograph.core.guarantees import GDP, RDP, ZCDP, ApproxDP, Guarantee, Mechanism, Parallel, ProbDP, PureDP
from odograph.service import forms

__all__ = ["QUICK", "costs_of", "guarantee_of"]

QUICK: Final = (forms.Pure, forms.Approx, forms.Prob, forms.Zcdp, forms.Gdp)  # to price; others may take a while

_MADE: Final[dict[type, Callable[..., Guarantee]]] = {
    forms.Pure: PureDP,
    forms.Approx: ApproxDP,
    forms.Prob: ProbDP,
    forms.Zcdp: ZCDP,
    forms.Gdp: GDP,
}


def costs_of(costs: Mapping[str, forms.CostForm]) -> dict[str, Guarantee]:
    """Return what is asked of each account."""
    return {name: guarantee_of(form) for name, form in costs.items()}


def guarantee_of(form: forms.CostForm) -> Guarantee:
    """Return the guarantee that a caller wrote."""
    if isinstance(form, forms.Disjoint):
        made = {part: guarantee_of(part) for part in dict.fromkeys(form.parts)}  # an equal part is the same object
        return Parallel(tuple([made[part] for part in form.parts]))
    if isinstance(form, forms.Known):
        return Mechanism(form.name, form.steps, None if form.curve is None else _curve(form.curve))
    return _curve(form) if isinstance(form, forms.Rdp) else _simple(form)


# Only what is small is remembered: a thousand curves would fill the memory.
@lru_cache(maxsize=4096)
def _simple(form: forms.Pure | forms.Approx | forms.Prob | forms.Zcdp | forms.Gdp) -> Guarantee:
    return _MADE[type(form)](*[getattr(form, field) for field in form.__struct_fields__ if field != "form"])


def _curve(form: forms.Rdp) -> RDP:
    return RDP(form.orders, form.values, form.delta)
