"""What a mechanism costs, as a value: frozen, validated, hashable, and printable back into code.

A number is kept exactly as it was written: `PureDP(0.1)` is one tenth, equal to `PureDP("0.1")`. Where no
float is that number (`Fraction(1, 3)`) the fraction itself is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar, Final, TypeAlias

from odograph.core.units import Number, Numeric, read, text_of, tidy
from odograph.errors import InvalidGuarantee

__all__ = [
    "GDP",
    "KINDS",
    "MOST_DIFFERENT",
    "MOST_POINTS",
    "RDP",
    "SIZED",
    "ZCDP",
    "ApproxDP",
    "Guarantee",
    "Mechanism",
    "Parallel",
    "ProbDP",
    "PureDP",
    "delta_of",
    "exact_of",
    "guarantee_from_dict",
    "stored",
]

_FORM: Final = 1  # version of the written form
_LONGEST_NAME: Final = 200
_MOST_SHOWN: Final = 8  # different parts of a `Parallel`, in a message
MOST_DIFFERENT: Final = 16  # parts of a `Parallel` for which a smaller one is searched and offered
MOST_POINTS: Final = 200  # of the curve of a `Mechanism` for which fewer steps are searched and offered


def _number(guarantee: object, field: str) -> None:
    """Replace the field by its exact value, or raise with the field's name."""
    exact = read(getattr(guarantee, field), f"{type(guarantee).__name__}.{field}")
    object.__setattr__(guarantee, field, tidy(exact))


def _probability(guarantee: object, field: str) -> None:
    _number(guarantee, field)
    value = getattr(guarantee, field)
    if value >= 1:
        raise InvalidGuarantee(f"{type(guarantee).__name__}.{field} must be below 1, and {value!r} is not")


class _Written:
    """Shared by all guarantees: the printed and the stored form."""

    kind: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]]  # the field names, made by @dataclass
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # made by @dataclass

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned form that `guarantee_from_dict` reads: plain types, numbers as exact text."""
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
        return self._printed(_code)

    def __str__(self) -> str:
        return self._printed(_shown)

    def _printed(self, show: Callable[[object], str]) -> str:
        names = [*self.__match_args__]
        while names and getattr(self, names[-1]) == self.__dataclass_fields__[names[-1]].default:
            names.pop()  # what a trailing field has by default need not be said
        return f"{type(self).__name__}({', '.join(show(getattr(self, name)) for name in names)})"


def _plain(value: object) -> object:
    if isinstance(value, _Written):
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


def _shown(value: object) -> str:
    """Write a value for people: a number that no float is exactly is shown by its digits."""
    return f"{float(value):.17g}" if isinstance(value, Fraction) else _code(value)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PureDP(_Written):
    """epsilon-differential privacy."""

    kind: ClassVar[str] = "pure"
    epsilon: Numeric

    def __post_init__(self) -> None:
        _number(self, "epsilon")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ApproxDP(_Written):
    """(epsilon, delta)-differential privacy."""

    kind: ClassVar[str] = "approx"
    epsilon: Numeric
    delta: Numeric

    def __post_init__(self) -> None:
        _number(self, "epsilon")
        _probability(self, "delta")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ProbDP(_Written):
    """(epsilon, delta)-probabilistic differential privacy: P(abs(loss) > epsilon) <= delta, in both orders."""

    kind: ClassVar[str] = "prob"
    epsilon: Numeric
    delta: Numeric

    def __post_init__(self) -> None:
        _number(self, "epsilon")
        _probability(self, "delta")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ZCDP(_Written):
    """delta-approximate rho-zero-concentrated differential privacy."""

    kind: ClassVar[str] = "zcdp"
    rho: Numeric
    delta: Numeric = 0

    def __post_init__(self) -> None:
        _number(self, "rho")
        _probability(self, "delta")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class GDP(_Written):
    """mu-Gaussian differential privacy: no easier to tell apart than N(0, 1) and N(mu, 1)."""

    kind: ClassVar[str] = "gdp"
    mu: Numeric

    def __post_init__(self) -> None:
        _number(self, "mu")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class RDP(_Written):
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
                f"RDP needs as many values as orders and at least one, not {len(values)} for {len(orders)}"
            )
        if orders[0] <= 1 or any(a >= b for a, b in pairwise(orders)):
            raise InvalidGuarantee(f"RDP.orders must be above 1 and ascending, and {self.orders!r} is not")
        object.__setattr__(self, "orders", tuple(tidy(order) for order in orders))
        object.__setattr__(self, "values", tuple(tidy(value) for value in values))
        _probability(self, "delta")

    def __str__(self) -> str:
        return f"RDP({len(self.orders)} orders from {float(self.orders[0]):g} to {float(self.orders[-1]):g})"

    def at(self, order: Fraction) -> Fraction | None:
        """Return a bound on the divergence at any order up to the largest given one, else None.

        Theorem: (a - 1) D_a is convex in a and 0 at a = 1, so its chord lies above it (van Erven, Harremoës).
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


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Mechanism(_Written):
    """`steps` runs of one exactly known mechanism, by its name on a policy's menu.

    A policy whose menu lists the name charges what was certified for it. `curve`, if known, is the Rényi
    curve of all the steps together, for the rules that price curves.
    """

    kind: ClassVar[str] = "mechanism"
    name: str
    steps: int = 1
    curve: RDP | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _LONGEST_NAME:
            shown = repr(self.name)[:_LONGEST_NAME]
            raise InvalidGuarantee(f"Mechanism.name must be a text of 1 to {_LONGEST_NAME} characters, not {shown}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidGuarantee(f"Mechanism.steps must be a whole number from 1, and {self.steps!r} is not")
        if self.curve is not None and not isinstance(self.curve, RDP):
            raise InvalidGuarantee(f"Mechanism.curve must be an RDP or None, and {self.curve!r} is not")

    def __str__(self) -> str:
        return f"{self.steps} x {self.name}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Parallel(_Written):
    """One step of several mechanisms, each on its own part of the data; no record is in two parts.

    `odograph.parallel` makes one and says when that is sound.
    """

    kind: ClassVar[str] = "parallel"
    parts: tuple[Guarantee, ...]

    def __post_init__(self) -> None:
        parts = tuple(self.parts) if isinstance(self.parts, Sequence) else ()
        if not parts or not all(isinstance(part, KINDS) for part in parts):
            raise InvalidGuarantee(f"Parallel.parts must be guarantees, at least one, and {self.parts!r} are not")
        if any(isinstance(part, Parallel) for part in parts):
            raise InvalidGuarantee("Parallel.parts must not be parallel themselves: list all the parts at once")
        object.__setattr__(self, "parts", parts)

    @property
    def different(self) -> Counter[Guarantee]:
        """The different parts in their order, and how many there are of each."""
        # The same object is mostly there many times, and equal parts are told by how they are printed: objects first.
        found: Counter[Guarantee] = Counter()
        objects = {id(part): part for part in self.parts}
        for key, count in Counter(map(id, self.parts)).items():
            found[objects[key]] += count
        return found

    def __str__(self) -> str:
        shown = [f"{count} x {part}" for part, count in self.different.most_common(_MOST_SHOWN)]
        more = len(self.different) - len(shown)
        return f"Parallel({', '.join(shown)}{f', and {more} other parts' if more else ''})"


Guarantee: TypeAlias = PureDP | ApproxDP | ProbDP | ZCDP | GDP | RDP | Mechanism | Parallel

# The same classes as a tuple, which `isinstance` takes several times as fast as a union.
KINDS: Final = (PureDP, ApproxDP, ProbDP, ZCDP, GDP, RDP, Mechanism, Parallel)

_NAMED: Final[dict[str, type[Guarantee]]] = {cls.kind: cls for cls in KINDS}

# The kinds that one number makes larger or smaller, by name: a caller may ask for the largest of one.
SIZED: Final[dict[str, type[Guarantee]]] = {cls.kind: cls for cls in (PureDP, ApproxDP, ProbDP, ZCDP, GDP)}


def stored(value: Numeric) -> Number:
    """Return a guarantee's number as what it is once validated: a float or a Fraction."""
    return value  # type: ignore[return-value]  # a cast would be one more call in every price


def exact_of(value: Numeric) -> Fraction:
    """Return the exact rational of a number that a guarantee stores."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def delta_of(guarantee: Guarantee) -> Number:
    """Return the guarantee's own delta, 0 where it has none."""
    if isinstance(guarantee, Mechanism):
        return 0.0 if guarantee.curve is None else delta_of(guarantee.curve)
    value: Number = getattr(guarantee, "delta", 0.0)
    return value


def guarantee_from_dict(form: Mapping[str, Any]) -> Guarantee:
    """Read what `to_dict` wrote; anything else raises `InvalidGuarantee` and says what is wrong with it."""
    cls = _NAMED.get(str(form.get("kind"))) if isinstance(form, Mapping) and form.get("form") == _FORM else None
    if cls is None:
        raise InvalidGuarantee(f"not a guarantee of form {_FORM}: {form!r:.120}")
    names = [*cls.__match_args__]
    if set(form) != {"form", "kind", *names}:
        raise InvalidGuarantee(f"a {form['kind']} guarantee has the fields {names}, not {sorted(form)}")
    values = {name: form[name] for name in names}
    if cls is RDP:
        values |= {name: _listed(f"RDP.{name}", form[name]) for name in ("orders", "values")}
    if cls is Mechanism and form["curve"] is not None:
        values["curve"] = guarantee_from_dict(form["curve"])
    if cls is Parallel:
        values["parts"] = tuple(guarantee_from_dict(part) for part in _listed("Parallel.parts", form["parts"]))
    return cls(**values)


def _listed(field: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidGuarantee(f"{field} must be a list of numbers, and {value!r} is not")
    return tuple(value)


def _numbers(field: str, value: object) -> list[Fraction]:
    try:
        items = [*_listed(field, value)]
    except InvalidGuarantee:
        items = [*value.tolist()] if hasattr(value, "tolist") else [value]  # a NumPy array is a list of numbers
    return [read(item, f"{field}[{i}]") for i, item in enumerate(items)]
