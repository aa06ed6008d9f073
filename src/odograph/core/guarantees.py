"""What a mechanism costs, as a value: frozen, validated, hashable, and printable back into code.

A kind of guarantee is one class, registered here. Its fields and class attributes are the only declaration of the
kind: the stored form, the request schema of the service, the command-line option and the field that `largest` varies
all follow from them.

A number is kept exactly as it was written: `PureDP(0.1)` is one tenth, equal to `PureDP("0.1")`. Where no
float is that number (`Fraction(1, 3)`) the fraction itself is kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar, Final, Self, TypeVar

from odograph.core.conversions import dp_to_probdp_delta
from odograph.core.fixed_point import (
    BRIEF_DIGITS,
    MOST_PRICED,
    Number,
    Numeric,
    brief_above,
    decimal_above,
    decimal_below,
    exact_of,
    float_above,
    float_below,
    kept_above,
    read,
    text_of,
    tidy,
)
from odograph.errors import InvalidArgument, InvalidGuarantee, did_you_mean, with_usage

__all__ = [
    "GDP",
    "MOST_DIFFERENT",
    "MOST_POINTS",
    "RDP",
    "REGISTRY",
    "SIZED",
    "ZCDP",
    "ApproxDP",
    "DiscreteGaussian",
    "Guarantee",
    "Interactive",
    "Mechanism",
    "Parallel",
    "ProbDP",
    "PureDP",
    "delta_of",
    "exact_of",
    "guarantee_from_dict",
    "number_of",
    "one_shot",
    "read_number",
    "read_probability",
    "register",
    "unregister",
]

_FORM: Final = 1  # version of the written form
_LONGEST_NAME: Final = 200
_OFFER_DIGITS: Final = 12  # significant digits of an offered sigma
_LARGEST_RATIO: Final = 10**150  # sensitivity over sigma: its square is a float; there is no privacy long before
_CALL: Final = "subsampled_gaussian(sampling_rate="  # how the name of such runs begins
_MOST_SHOWN: Final = 8  # different parts of a `Parallel`, in a message
MOST_DIFFERENT: Final = 16  # parts of a `Parallel` for which a smaller one is searched and offered
MOST_POINTS: Final = 200  # of the curve of a `Mechanism` for which fewer steps are searched and offered


def read_number(guarantee: object, field: str) -> None:
    """Replace the field by its exact value, or raise with the field's name."""
    exact = read(getattr(guarantee, field), f"{type(guarantee).__name__}.{field}")
    object.__setattr__(guarantee, field, tidy(exact))


def read_probability(guarantee: Guarantee, field: str) -> None:
    """As `read_number`, for a number below 1."""
    read_number(guarantee, field)
    value = getattr(guarantee, field)
    if value >= 1:
        name, order = type(guarantee).__name__, ", ".join(guarantee.__match_args__)
        raise InvalidGuarantee(f"{name}.{field} must be below 1 (got {value!r}): the order is {name}({order})")


class Guarantee:
    """The base of every kind. A subclass is a frozen dataclass with `kind`, decorated with `register`.

    `kind` is the name of the kind in documents, requests and options. `size` is the field or property that makes a
    guarantee of the kind larger or smaller, for kinds whose fields are all numbers; "" for other kinds.
    """

    kind: ClassVar[str]
    size: ClassVar[str] = ""
    __match_args__: ClassVar[tuple[str, ...]]  # the field names, made by @dataclass
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # made by @dataclass

    def implies(self) -> tuple[Guarantee, ...]:
        """Return known guarantees that follow from this one; a kind that the filters price directly implies none.

        Each meter charges the cheapest of them, so several must all be without delta.
        """
        return ()

    @classmethod
    def with_size(cls, size: Numeric) -> Self:
        """Return the guarantee of a size, with 0 in the other fields that have no default."""
        fields = cls.__dataclass_fields__
        needed = [name for name in cls.__match_args__ if fields[name].default is MISSING]
        return cls(**dict.fromkeys(needed, 0) | {cls.size: size})

    def resize(self, size: Numeric) -> Self:
        """Return the same guarantee with another size."""
        return replace(self, **{self.size: size})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Make a guarantee from the fields of its stored form."""
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned form that `guarantee_from_dict` reads: plain types, numbers as exact strings."""
        form: dict[str, Any] = {"form": _FORM, "kind": self.kind}
        for name in self.__match_args__:
            form[name] = _plain(getattr(self, name))
        return form

    def __eq__(self, other: object) -> bool:
        # As printed, because Python calls Fraction(0.1) and 0.1 equal: to it that float is binary, here one tenth.
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return self._format(_code)

    def __str__(self) -> str:
        return self._format(_show)

    def brief(self, *, offered: bool = False) -> str:
        """Return it for people, with four significant digits: a cost rounded up; an offer down, so that it fits."""
        if offered and self.size in self.__match_args__:
            numbers = {name: read(getattr(self, name), name) for name in (self.size, "delta") if hasattr(self, name)}
            shorter = {name: decimal_below(one, BRIEF_DIGITS) for name, one in numbers.items() if one}
            return str(replace(self, **shorter))
        return str(self) if offered else self._format(_brief)

    def _format(self, show: Callable[[object], str]) -> str:
        names = [*self.__match_args__]
        while names and getattr(self, names[-1]) == self.__dataclass_fields__[names[-1]].default:
            names.pop()  # a trailing field with its default value is left out
        return f"{type(self).__name__}({', '.join(show(getattr(self, name)) for name in names)})"


def _plain(value: object) -> object:
    if isinstance(value, Guarantee):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return text_of(value) if isinstance(value, float | Fraction) else value


def _code(value: object) -> str:
    if isinstance(value, Fraction):
        return repr(str(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
    return repr(value)


def _show(value: object) -> str:
    """Format a value as it is; a fraction that is not a decimal, by 12 digits, rounded up."""
    return _digits(value, _OFFER_DIGITS) if isinstance(value, Fraction) else _code(value)


def _brief(value: object) -> str:
    """Format a value for people: a number by four digits, rounded up.

    What a library rounds up in its last digits is not shown: its Laplace noise of scale 10 costs 0.1, not 0.1001.
    """
    return brief_above(value) if isinstance(value, float | Fraction) else _show(value)


def _digits(value: Fraction, count: int) -> str:
    """Write a nonnegative number by so many significant digits, rounded up."""
    return f"{float(decimal_above(value, count)):.{count}g}" if value else "0"


G = TypeVar("G", bound=type[Guarantee])

REGISTRY: Final[dict[str, type[Guarantee]]] = {}  # every kind, by name
SIZED: Final[dict[str, type[Guarantee]]] = {}  # the kinds that `largest` can search


def register(cls: G) -> G:
    """Add a kind of guarantee; the service and the command line offer those registered before they are imported."""
    if not cls.kind.isidentifier():
        raise InvalidGuarantee(f"kind must be an identifier (got {cls.kind!r})")
    if REGISTRY.setdefault(cls.kind, cls) is not cls:
        raise InvalidGuarantee(f"kind must be unused (got {cls.kind!r}, which is {REGISTRY[cls.kind].__name__})")
    if cls.size:
        SIZED[cls.kind] = cls
    if cls.__match_args__:
        usage = f"{cls.__name__} is made like {cls.__name__}({', '.join(cls.__match_args__)})"
        setattr(cls, "__init__", with_usage(usage)(cls.__init__))  # noqa: B010  what @dataclass made
    return cls


def unregister(kind: str) -> None:
    """Remove a kind again, for tests."""
    del REGISTRY[kind]
    SIZED.pop(kind, None)


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PureDP(Guarantee):
    """epsilon-differential privacy."""

    kind: ClassVar[str] = "pure"
    size: ClassVar[str] = "epsilon"
    epsilon: Numeric

    def __post_init__(self) -> None:
        read_number(self, "epsilon")


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ApproxDP(Guarantee):
    """(epsilon, delta)-differential privacy."""

    kind: ClassVar[str] = "approx"
    size: ClassVar[str] = "epsilon"
    epsilon: Numeric
    delta: Numeric

    def __post_init__(self) -> None:
        read_number(self, "epsilon")
        read_probability(self, "delta")

    def as_probdp(self, t: Numeric) -> ProbDP:
        """Return the probabilistic guarantee that follows: with which probability the loss exceeds `t`, rounded up.

        The result costs more than this guarantee, and an odometer reads it without a slack. Fix `t` before the
        mechanism runs. Just above epsilon nothing follows: there the probability would be 1 or more.

        Theorem: P(abs(loss) > t) <= delta (1 + e^-t)/(1 - e^(epsilon - t)) for every t > epsilon, which is attained;
            the lemma that is printed in the paper is false (erratum E3).
        Assumes: the mechanism is (epsilon, delta)-DP for both orders of the neighbors, given all earlier answers.
        """
        level, epsilon, delta = read(t, "t", InvalidArgument), exact_of(self.epsilon), exact_of(self.delta)
        if level > MOST_PRICED:
            raise InvalidArgument(f"t must be at most {MOST_PRICED:,}, beyond which nothing has a price (got {t!r})")
        if not delta and level >= epsilon:
            return ProbDP(tidy(level), 0)
        beyond = dp_to_probdp_delta(float_above(epsilon), float_above(delta), float_below(level))
        if beyond >= 1.0:
            # Where the bound is 1.
            least = float(epsilon) + math.log1p(float(delta) * math.exp(-float(epsilon))) - math.log1p(-float(delta))
            raise InvalidArgument(
                f"t must be {'above' if delta else 'at least'} {brief_above(least)}: for a smaller t no probability"
                f" below 1 follows from {self} (got {t!r})"
            )
        return ProbDP(tidy(level), beyond)


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ProbDP(Guarantee):
    """(epsilon, delta)-probabilistic differential privacy: P(abs(loss) > epsilon) <= delta, in both orders."""

    kind: ClassVar[str] = "prob"
    size: ClassVar[str] = "epsilon"
    epsilon: Numeric
    delta: Numeric

    def __post_init__(self) -> None:
        read_number(self, "epsilon")
        read_probability(self, "delta")


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ZCDP(Guarantee):
    """delta-approximate rho-zero-concentrated differential privacy."""

    kind: ClassVar[str] = "zcdp"
    size: ClassVar[str] = "rho"
    rho: Numeric
    delta: Numeric = 0

    def __post_init__(self) -> None:
        read_number(self, "rho")
        read_probability(self, "delta")


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class GDP(Guarantee):
    """mu-Gaussian differential privacy: no easier to tell apart than N(0, 1) and N(mu, 1)."""

    kind: ClassVar[str] = "gdp"
    size: ClassVar[str] = "mu"
    mu: Numeric

    def __post_init__(self) -> None:
        read_number(self, "mu")


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class DiscreteGaussian(Guarantee):
    """Discrete Gaussian noise of parameter sigma, on the integers or on the multiples of a grid.

    The query has its values on the grid, in `dimension` coordinates, and changes by at most `sensitivity` in L2
    between neighbors. It is not a Gaussian: at some epsilon it is easier to tell apart than GDP of the same ratio.
    """

    kind: ClassVar[str] = "discrete_gaussian"
    size: ClassVar[str] = "mu"
    sigma: Numeric
    sensitivity: Numeric = 1
    dimension: int = 1
    grid: Numeric = 1

    def __post_init__(self) -> None:
        for name in ("sigma", "sensitivity", "grid"):
            read_number(self, name)
        if self.sigma == 0:
            raise InvalidGuarantee(
                f"DiscreteGaussian.sigma must be above 0 (got {self.sigma!r}): without noise there is no privacy"
            )
        if self.grid == 0:
            raise InvalidGuarantee(
                f"DiscreteGaussian.grid must be above 0 (got {self.grid!r}), such as 1 for integers"
            )
        if self.mu > _LARGEST_RATIO:
            raise InvalidGuarantee(
                f"DiscreteGaussian.sigma must be at least 1e-150 of the sensitivity (got {self!r})"
            )
        coordinates = read(self.dimension, "DiscreteGaussian.dimension")
        if coordinates < 1 or coordinates.denominator != 1:
            raise InvalidGuarantee(f"DiscreteGaussian.dimension must be an integer from 1 (got {self.dimension!r})")
        object.__setattr__(self, "dimension", int(coordinates))

    @property
    def mu(self) -> Fraction:
        """The sensitivity over sigma."""
        return exact_of(self.sensitivity) / exact_of(self.sigma)

    def implies(self) -> tuple[Guarantee, ...]:
        """Return what meters charge that have no price of their own for it.

        Theorem: Canonne, Kamath and Steinke (2020), Theorem 14: (sensitivity^2 / (2 sigma^2))-zCDP.
        Assumes: the query has its values on the grid, and the sensitivity bounds its L2 change between neighbors.
        """
        return (ZCDP(kept_above(self.mu**2 / 2)),)

    @classmethod
    def with_size(cls, size: Numeric) -> Self:
        """Return noise on the integers for a sensitivity of 1."""
        return cls(1).resize(size)

    def resize(self, size: Numeric) -> Self:
        """Return the same query with other noise; sigma is rounded up, so that `mu` is at most the size."""
        if self.sensitivity == 0:
            return self  # it reveals nothing, whatever its noise
        mu = read(size, "DiscreteGaussian.mu")
        if mu == 0:
            raise InvalidGuarantee(f"DiscreteGaussian.mu must be above 0 (got {size!r}): no sigma is that large")
        return replace(self, sigma=decimal_above(exact_of(self.sensitivity) / mu, _OFFER_DIGITS))

    def brief(self, *, offered: bool = False) -> str:
        """Return it with a sigma of four digits: that of a cost rounded down, that of an offer up."""
        shorten = decimal_above if offered else decimal_below
        return str(replace(self, sigma=shorten(exact_of(self.sigma), BRIEF_DIGITS)))


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class RDP(Guarantee):
    """delta-approximate Rényi differential privacy, as a curve: a divergence at each of some orders.

    With delta > 0 one exceptional event of that probability must serve all the orders together.
    """

    kind: ClassVar[str] = "rdp"
    orders: tuple[Numeric, ...]
    values: tuple[Numeric, ...]
    delta: Numeric = 0

    def __post_init__(self) -> None:
        orders = _numbers("RDP.orders", self.orders)
        values = _numbers("RDP.values", self.values)
        if len(orders) != len(values) or not orders:
            raise InvalidGuarantee(
                f"RDP.values must have one value for each order, at least one (got {len(values)} for {len(orders)})"
            )
        if orders[0] <= 1 or any(a >= b for a, b in pairwise(orders)):
            raise InvalidGuarantee(f"RDP.orders must be above 1 and ascending (got {self.orders!r})")
        object.__setattr__(self, "orders", tuple(tidy(order) for order in orders))
        object.__setattr__(self, "values", tuple(tidy(value) for value in values))
        read_probability(self, "delta")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read the orders and values as lists."""
        lists = {name: _read_list(f"RDP.{name}", fields[name]) for name in ("orders", "values")}
        return cls(**{**fields, **lists})

    def brief(self, *, offered: bool = False) -> str:  # noqa: ARG002  a curve has no single size
        """Return how many orders there are, and which."""
        return str(self)

    def __str__(self) -> str:
        return f"RDP({len(self.orders)} orders from {float(self.orders[0]):g} to {float(self.orders[-1]):g})"

    def at(self, order: Fraction) -> Fraction | None:
        """Return a bound on the divergence at any order up to the largest given one, else None.

        Theorem: (a - 1) D_a is convex in a and 0 at a = 1, so its chord lies above it (van Erven and
            Harremoës (2014)).
        Assumes: each given value bounds the divergence at its own order, in both directions.
        """
        above = bisect_left(self.orders, order, key=exact_of)
        if above == len(self.orders):
            return None
        low_order, low = self._moment(above - 1) if above else (Fraction(1), Fraction(0))
        high_order, high = self._moment(above)
        chord = low + (high - low) * (order - low_order) / (high_order - low_order)
        return chord / (order - 1)

    def _moment(self, place: int) -> tuple[Fraction, Fraction]:
        """Return an order a, and (a - 1) times the value there."""
        order = exact_of(self.orders[place])
        return order, (order - 1) * exact_of(self.values[place])


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Mechanism(Guarantee):
    """`steps` runs of one exactly known mechanism, by its name on a policy's menu.

    A policy whose menu lists the name charges what was certified for it. `curve`, if known, is the Rényi
    curve of all the steps together, for the filters that price curves.
    """

    kind: ClassVar[str] = "mechanism"
    name: str
    steps: int = 1
    curve: RDP | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _LONGEST_NAME:
            shown = repr(self.name)[:_LONGEST_NAME]
            raise InvalidGuarantee(f"Mechanism.name must have 1 to {_LONGEST_NAME} characters (got {shown})")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidGuarantee(f"Mechanism.steps must be an integer from 1 (got {self.steps!r})")
        if self.curve is not None and not isinstance(self.curve, RDP):
            raise InvalidGuarantee(f"Mechanism.curve must be an RDP or None (got {self.curve!r})")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read the curve."""
        curve = fields["curve"]
        return cls(**{**fields, "curve": None if curve is None else guarantee_from_dict(curve)})

    def brief(self, *, offered: bool = False) -> str:
        """Return the steps and the name; of an offer the call that makes it, where that is known."""
        is_call = offered and self.name.startswith(_CALL) and self.name.endswith(")")
        return f"{self.name[:-1]}, steps={self.steps})" if is_call else str(self)

    def __str__(self) -> str:
        return f"{self.steps} x {self.name}"


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Parallel(Guarantee):
    """One step of several mechanisms, each on its own part of the data; no record is in two parts.

    `odograph.parallel` makes one, and documents when that is sound.
    """

    kind: ClassVar[str] = "parallel"
    parts: tuple[Guarantee, ...]

    def __post_init__(self) -> None:
        parts = tuple(self.parts) if isinstance(self.parts, Sequence) else ()
        if not parts or not all(isinstance(part, Guarantee) for part in parts):
            raise InvalidGuarantee(f"Parallel.parts must be a list of at least one guarantee (got {self.parts!r})")
        if any(isinstance(part, Parallel) for part in parts):
            raise InvalidGuarantee("Parallel.parts must not be parallel themselves; list all the parts together")
        if any(isinstance(part, Interactive) for part in parts):
            raise InvalidGuarantee(
                "Parallel.parts must not be interactive themselves; for mechanisms on disjoint parts that answer"
                " queries write Interactive(Parallel(parts))"
            )
        object.__setattr__(self, "parts", parts)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read the parts."""
        return cls(tuple(guarantee_from_dict(part) for part in _read_list("Parallel.parts", fields["parts"])))

    @property
    def different(self) -> Counter[Guarantee]:
        """The different parts in their order, and how many there are of each."""
        # Comparing parts formats them, which is slow, and most are one object many times: count objects first.
        found: Counter[Guarantee] = Counter()
        objects = {id(part): part for part in self.parts}
        for key, count in Counter(map(id, self.parts)).items():
            found[objects[key]] += count
        return found

    def brief(self, *, offered: bool = False) -> str:
        """Return the different parts, each in brief; of an offer the call that makes it."""
        if not offered:
            return self._listed(lambda part: part.brief())
        shown = [(part.brief(offered=True), count) for part, count in self.different.most_common()]
        lists = [f"[{text}] * {count}" for text, count in shown if count > 1]
        if single := [text for text, count in shown if count == 1]:
            lists.append(f"[{', '.join(single)}]")
        return f"parallel({' + '.join(lists)})"

    def __str__(self) -> str:
        return self._listed(str)

    def _listed(self, show: Callable[[Guarantee], str]) -> str:
        shown = [f"{count} x {show(part)}" for part, count in self.different.most_common(_MOST_SHOWN)]
        more = len(self.different) - len(shown)
        return f"Parallel({', '.join(shown)}{f', and {more} other parts' if more else ''})"


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Interactive(Guarantee):
    """An interactive mechanism: whatever is asked of it and when, its answers together have the guarantee `cost`.

    It holds against every strategy of asking: queries may depend on all answers so far, also on those of other
    mechanisms that are open at the same time, and may stop at any moment. All is charged before the first query.
    """

    kind: ClassVar[str] = "interactive"
    cost: Guarantee

    def __post_init__(self) -> None:
        if not isinstance(self.cost, Guarantee):
            raise InvalidGuarantee(f"Interactive.cost must be a guarantee, such as PureDP(0.1) (got {self.cost!r})")
        if isinstance(self.cost, Interactive):
            raise InvalidGuarantee(
                f"Interactive.cost must not be interactive itself (got {self.cost}): say it once, as {self.cost!r}"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read the cost."""
        return cls(guarantee_from_dict(fields["cost"]))

    def brief(self, *, offered: bool = False) -> str:
        """Return the cost in brief."""
        return f"Interactive({self.cost.brief(offered=offered)})"

    def __str__(self) -> str:
        return f"Interactive({self.cost})"


def one_shot(guarantee: Guarantee) -> Guarantee:
    """Return the guarantee of an interactive mechanism as that of a one-shot one, and any other as it is."""
    return guarantee.cost if isinstance(guarantee, Interactive) else guarantee


def number_of(value: Numeric) -> Number:
    """Return a guarantee's number as the type that it has after validation: a float or a Fraction."""
    return value  # type: ignore[return-value]  # a cast would be one more call in every price


def delta_of(guarantee: Guarantee) -> Number:
    """Return the guarantee's own delta, 0 where it has none."""
    if isinstance(guarantee, Mechanism):
        return 0.0 if guarantee.curve is None else delta_of(guarantee.curve)
    value: Number = getattr(guarantee, "delta", 0.0)
    return value


def guarantee_from_dict(form: Mapping[str, Any]) -> Guarantee:
    """Read what `to_dict` wrote; anything else raises `InvalidGuarantee` with the reason."""
    if not isinstance(form, Mapping) or form.get("form") != _FORM:
        raise InvalidGuarantee(f"a guarantee must be a document with the field form={_FORM} (got {form!r:.120})")
    cls = REGISTRY.get(str(form.get("kind")))
    if cls is None:
        near = did_you_mean(form.get("kind"), REGISTRY)
        raise InvalidGuarantee(f"kind must be one of {', '.join(REGISTRY)} (got {form.get('kind')!r:.120}){near}")
    names = [*cls.__match_args__]
    if set(form) != {"form", "kind", *names}:
        raise InvalidGuarantee(f"a {form['kind']} guarantee must have the fields {names} (got {sorted(form)})")
    return cls.from_fields({name: form[name] for name in names})


def _read_list(field: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidGuarantee(f"{field} must be a list (got {value!r})")
    return tuple(value)


def _numbers(field: str, value: object) -> list[Fraction]:
    try:
        items = [*_read_list(field, value)]
    except InvalidGuarantee:
        items = [*value.tolist()] if hasattr(value, "tolist") else [value]  # a NumPy array is a list of numbers
    return [read(item, f"{field}[{i}]") for i, item in enumerate(items)]
