"""The filters, one file each: the guarantees that it takes, its options, meter and limit, and its theorem.

A policy takes a filter by its name or as an object with options: `Policy(1, 1e-6, filter=filters.Exact(menu=items))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from odograph.core.filters.basic import Basic, GdpTotal, RhoMeter, Total, Unlimited, UnlimitedMeter, ZcdpTotal
from odograph.core.filters.exact import Exact, ExactMeter
from odograph.core.filters.gdp import Gdp, GdpMeter
from odograph.core.filters.paper import Paper, PaperMeter
from odograph.core.filters.renyi import Renyi, RenyiMeter
from odograph.core.filters.smooth import Smooth, SmoothMeter
from odograph.core.filters.zcdp import Zcdp, ZcdpMeter
from odograph.core.guarantees import Guarantee
from odograph.core.meters import (
    DeltaMeter,
    DriftMeter,
    EpsilonMeter,
    Filter,
    IntrinsicMeter,
    Meter,
    MomentMeter,
    Target,
)
from odograph.errors import InvalidPolicy, explain

__all__ = [
    "FILTERS",
    "METERS",
    "TOTALS",
    "Basic",
    "Exact",
    "ExactMeter",
    "Filter",
    "Gdp",
    "GdpMeter",
    "GdpTotal",
    "Paper",
    "PaperMeter",
    "Renyi",
    "RenyiMeter",
    "RhoMeter",
    "Smooth",
    "SmoothMeter",
    "Target",
    "Total",
    "Unlimited",
    "UnlimitedMeter",
    "Zcdp",
    "ZcdpMeter",
    "ZcdpTotal",
    "filter_from_dict",
    "meter_from_dict",
    "takers",
]

# Those that keep a target (epsilon, delta), by name; and those of policies that promise something else or nothing.
FILTERS: Final[dict[str, type[Filter]]] = {cls.kind: cls for cls in (Basic, Exact, Smooth, Gdp, Paper, Renyi, Zcdp)}
TOTALS: Final[dict[str, type[Filter]]] = {cls.kind: cls for cls in (GdpTotal, Unlimited, ZcdpTotal)}

METERS: Final[dict[str, type[Meter]]] = {
    cls.pricing: cls
    for cls in (
        DeltaMeter,
        DriftMeter,
        EpsilonMeter,
        ExactMeter,
        GdpMeter,
        IntrinsicMeter,
        MomentMeter,
        PaperMeter,
        RenyiMeter,
        RhoMeter,
        SmoothMeter,
        UnlimitedMeter,
        ZcdpMeter,
    )
}


def takers(guarantee: Guarantee) -> list[str]:
    """Return the names of the filters of a target (epsilon, delta) that have a theorem for the guarantee."""
    return [kind for kind, cls in FILTERS.items() if isinstance(guarantee, cls.guarantees)]


def filter_from_dict(form: Mapping[str, Any]) -> Filter:
    """Read what `Filter.to_dict` wrote; anything else raises."""
    cls = (FILTERS | TOTALS).get(str(form["kind"]))
    if cls is None:
        raise InvalidPolicy(f"filter must be one of {', '.join(FILTERS)} (got {form['kind']!r})")
    if set(form) != {"kind", *cls.options}:
        raise InvalidPolicy(f"the filter {cls.kind!r} must have the options {[*cls.options]} (got {sorted(form)})")
    return cls(**{name: parse(form[name]) for name, parse in cls.options.items()})


def meter_from_dict(form: Mapping[str, Any], version: int) -> Meter:
    """Read what `Meter.to_dict` wrote, or what 0.1.0 wrote (version 1); anything else raises `InvalidPolicy`."""
    try:
        now = _from_version_1(form) if version == 1 else form
        return METERS[now["pricing"]].from_dict(now)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        raise InvalidPolicy(f"a meter could not be read from {form!r:.120}: {explain(problem)}") from problem


def _from_version_1(form: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields that had other names in 0.1.0: the clock of a meter, and the unit of the exact filter."""
    now = {name: value for name, value in form.items() if name not in {"clock", "unit"}}
    timed = form["clock"] == "intrinsic" and form["name"] == "zcdp"
    now["pricing"] = "zcdp" if timed else form["clock"]
    return now | {"quantum": form["unit"]} if "unit" in form else now
