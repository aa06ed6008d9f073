"""Plan requests: decide with a counter-offer, quote several, find the largest, the least noise or how many fit.

Accounts form a tree: a request passes its own account's limit and every ancestor's, or none of them. So a question is
asked of a *path*, from the account at the top down to the one that asks; of one account alone, pass its state.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from odograph.core.filters import SmoothMeter
from odograph.core.fixed_point import SCALE, Numeric, brief_below, exact_of, written_below
from odograph.core.gate import Decision, Price, Totals, decide
from odograph.core.guarantees import (
    GDP,
    MOST_DIFFERENT,
    MOST_POINTS,
    RDP,
    SIZED,
    ZCDP,
    Guarantee,
    Interactive,
    Mechanism,
    Parallel,
    PureDP,
    one_shot,
)
from odograph.core.mechanisms import Noise, subsampled_gaussian
from odograph.core.meters import WITH_EPSILON, EpsilonMeter, IntrinsicMeter, Meter, OrderMeter, intrinsic_units
from odograph.core.policy import Compiled, Policy
from odograph.display import badge, card, facts, one_line, paragraph, table
from odograph.errors import InvalidArgument, InvalidGuarantee, UnprovenComposition

__all__ = [
    "MOST_FALLS",
    "NOTE_ABOUT",
    "USUAL_TRAINING",
    "AccountState",
    "Calibration",
    "CalibrationQuestion",
    "G",
    "Kind",
    "Path",
    "Quote",
    "ask",
    "calibrate",
    "calibrate_that",
    "calibration_question",
    "how_many",
    "iterable_costs",
    "kind_of",
    "largest",
    "largest_that",
    "note_prefix",
    "notes_on",
    "outlook",
    "quote",
    "roomiest",
    "standing",
    "used",
    "usual_requests",
    "watched",
    "with_offer",
]

# What an offer is of: a class, or a guarantee whose other fields (delta, name) the offer keeps.
G = TypeVar("G", bound=Guarantee)

_NEARLY_ONE: Final = 1 - Fraction(1, 10**18)
_DIGITS: Final = 12  # significant digits of an offer; more are not needed, and hard to read
_MOST_STEPS: Final = 10**12  # that are counted

_NOISE_DIGITS: Final = 4  # significant digits of a calibrated parameter
_DECADE: Final = 9 * 10 ** (_NOISE_DIGITS - 1)  # decimals of so many digits between one power of ten and the next
_MOST_DECADES: Final = 20  # from the start of a search: the smallest unit of every meter is nearer
_LEAST_DIGIT: Final = Fraction(1, 10**15)  # of a value near another than 0: a float has no more of them

USUAL_TRAINING: Final = ("0.01", "2")  # sampling rate and noise multiplier of usual training steps
NOTE_ABOUT: Final = "for "  # and a name: how a note begins that is not about the account that asked
MOST_FALLS: Final = 4  # notes of a request for which it is searched what falls; others say what ends


class AccountState(NamedTuple):
    """One account on a path, and what it has spent."""

    name: str
    compiled: Compiled
    totals: Totals

    def admits(self, cost: Guarantee, times: int = 1) -> bool:
        """Return whether `times` equal requests are admitted here."""
        return decide(self.compiled.meters, self.totals, self.compiled.price(cost).times(times)).admitted


# What the largest is searched of: a class, a guarantee whose other fields are kept, or a mechanism's function.
Kind: TypeAlias = type[G] | Callable[..., G] | G

# From the account at the top down to the one that asks; or one account alone.
Path: TypeAlias = AccountState | Sequence[AccountState]


@dataclass(frozen=True, slots=True, repr=False)
class Quote:
    """The decisions on several requests in order, up to the first refusal, and whether all fit."""

    admitted: bool
    decisions: tuple[Decision, ...]
    totals_after: Totals  # after all of them if they fit, else unchanged

    def __bool__(self) -> bool:
        return self.admitted

    def to_dict(self) -> dict[str, Any]:
        """Return the quote in plain types."""
        return {
            "admitted": self.admitted,
            "decisions": [decision.to_dict() for decision in self.decisions],
            "totals_after": self.totals_after.to_text(),
        }

    def __repr__(self) -> str:
        return one_line("Quote", str(self))

    def _repr_html_(self) -> str:
        def cells(row: tuple[int, Decision]) -> tuple[object, ...]:
            number, one = row
            said = badge("admitted", "good") if one.admitted else badge("refused", "bad")
            return number, "" if one.request is None else one.request.brief(), said, "; ".join(one.notes)

        rows = [*enumerate(self.decisions, 1)]
        label = badge("all admitted", "good") if self.admitted else badge("refused: nothing would be charged", "bad")
        requests = table(("number", "request", "decision", "notes"), rows, numbers=("number",), cells=cells)
        return card("Quote", paragraph(self), *([requests] if rows else []), label=label)

    def __str__(self) -> str:
        if not self.decisions:
            return "admitted: nothing was asked for"
        if self.admitted:
            *others, last = self.decisions
            notes = [f"number {n}: {note}" for n, one in enumerate(others, 1) for note in one.notes]
            return "; ".join([f"all {len(self.decisions)} admitted", *notes, f"the last is {last}"])
        return f"number {len(self.decisions)} is {self.decisions[-1]}"


@dataclass(frozen=True, slots=True, repr=False)
class Calibration:
    """The least noise with which `times` equal requests of a mechanism are admitted.

    It prints as the call that makes the guarantee: `laplace(scale=61.3, sensitivity=3)`.
    """

    mechanism: str  # a name of `odograph.mechanisms`
    parameter: str  # the argument that sets the noise
    value: float  # of four significant digits
    settings: tuple[tuple[str, int | float | str], ...]  # the other arguments, as they were given
    times: int
    guarantee: Guarantee  # of one request

    @property
    def arguments(self) -> dict[str, int | float | str]:
        """All arguments of the mechanism by name."""
        return {self.parameter: self.value, **dict(self.settings)}

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration in plain types."""
        return {
            "mechanism": self.mechanism,
            "parameter": self.parameter,
            "value": self.value,
            "settings": dict(self.settings),
            "times": self.times,
            "guarantee": self.guarantee.to_dict(),
            "text": str(self),
        }

    def _repr_html_(self) -> str:
        named = {"guarantee of one request": self.guarantee.brief(), "requests": f"{self.times:,}"}
        return card(repr(self), paragraph("the least noise with which all of them are admitted"), facts(named))

    def __repr__(self) -> str:
        return f"{self.mechanism}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def ask(path: Path, cost: Guarantee) -> Decision:
    """Decide a cost on the whole path; return the asker's own decision, or the first refusal and what would fit.

    Theorem: sub-budgets: an account that sees every step below it keeps its promise about all of them.
    Assumes: an admitted cost is charged to every account of the path, or to none.
    """
    return _ask(_states(path), cost)[0]


def quote(path: Path, costs: Iterable[Guarantee]) -> Quote:
    """Decide several costs in order, all or nothing, spending nothing."""
    states = _states(path)
    own = states[-1].totals
    decisions: list[Decision] = []
    falls = MOST_FALLS
    for cost in iterable_costs(costs):
        decision, states = _ask(states, cost, falls)
        decisions.append(decision)
        falls = max(0, falls - len(decision.notes))
        if not decision.admitted:
            return Quote(admitted=False, decisions=tuple(decisions), totals_after=own)
    return Quote(admitted=True, decisions=tuple(decisions), totals_after=states[-1].totals)


def iterable_costs(costs: Iterable[Guarantee]) -> Iterable[Guarantee]:
    """Return several costs as they are; a single cost raises `InvalidArgument`."""
    if not isinstance(costs, Iterable):
        raise InvalidArgument(f"costs must be a list, such as [PureDP(0.1)] (got {costs!r}); for one use decide")
    return costs


def how_many(path: Path, cost: Guarantee) -> int:
    """Return how many requests equal to this one are admitted in a row, at most 10^12."""
    prices = [(state, state.compiled.price(cost)) for state in _states(path)]

    def is_refused(count: int) -> bool:
        return not all(
            decide(state.compiled.meters, state.totals, price.times(count)).admitted for state, price in prices
        )

    # Totals only grow, so what is refused once stays refused, and bisection finds the first refusal.
    return bisect_left(range(_MOST_STEPS + 1), x=True, lo=1, key=is_refused) - 1


def usual_requests(epsilon: Numeric) -> tuple[Guarantee, ...]:
    """Return requests of the kinds that analyses are made of, in sizes that suit a budget of epsilon."""
    whole = exact_of(epsilon)
    mu = whole / 50
    return (
        PureDP(whole / 100),
        PureDP(whole / 20),
        GDP(mu),
        ZCDP(mu**2 / 2),
        subsampled_gaussian(*USUAL_TRAINING),
    )


def outlook(choices: Mapping[str, Compiled], costs: Iterable[Guarantee]) -> dict[Guarantee, dict[str, int]]:
    """Return how many requests of each cost, alone, a new account of each policy would admit: to choose between them.

    None are admitted where no theorem covers the cost.
    """
    return {cost: {name: _fresh_count(compiled, cost) for name, compiled in choices.items()} for cost in costs}


def _fresh_count(compiled: Compiled, cost: Guarantee) -> int:
    try:
        return how_many(AccountState("", compiled, compiled.start), cost)
    except UnprovenComposition:
        return 0


def largest(path: Path, kind: Kind[G], times: int = 1) -> G | None:
    """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None.

    The kind is a class, a guarantee whose other fields the offer keeps, or a function of `odograph.mechanisms`. An
    offer is always admitted: it is rounded down and passed to the gate. Where no account of the path has a limit
    there is no largest, and `InvalidArgument` is raised.
    """
    states = _states(path)
    _check_limited(states)
    return _largest(states, kind, times)


def _largest(states: Sequence[AccountState], kind: Kind[G], times: int = 1) -> G | None:
    return largest_that(kind, times, lambda cost, count: all(state.admits(cost, count) for state in states))


def _check_limited(states: Sequence[AccountState]) -> None:
    """Raise `InvalidArgument` unless some account of a path has a limit."""
    if all(state.compiled.policy.is_unlimited for state in states):
        raise InvalidArgument(
            "the account must have a limit for this question (got 'no limit'): every request is admitted that the"
            " odometer reads"
        )


def calibrate(path: Path, question: CalibrationQuestion) -> Calibration | None:
    """Return the least noise of four digits with which the requests of a question are all admitted, or None.

    Where no account of the path has a limit any noise would do, and `InvalidArgument` is raised.
    """
    states, times = _states(path), question.times
    _check_limited(states)
    return calibrate_that(question, lambda cost: all(state.admits(cost, times) for state in states))


def with_offer(path: Path, refusal: Decision, name: str) -> Decision:
    """Return a refusal with the name of the account that refused, and the largest request that all would admit."""
    offer = None if refusal.request is None else _largest(_states(path), refusal.request)
    return refusal._replace(largest=offer, account=name)


def _states(path: Path) -> Sequence[AccountState]:
    return [path] if isinstance(path, AccountState) else path


def _ask(
    states: Sequence[AccountState], cost: Guarantee, falls: int = MOST_FALLS
) -> tuple[Decision, Sequence[AccountState]]:
    """Decide a cost; return the decision, and the states after it."""
    # All are priced before any decides: an account without a theorem for the cost refuses first.
    prices: list[Price] = []
    for state in states:
        try:
            prices.append(state.compiled.price(cost))
        except UnprovenComposition as problem:
            return _without_theorem(state, cost, problem), states
    decisions = [
        decide(state.compiled.meters, state.totals, price, cost) for state, price in zip(states, prices, strict=True)
    ]
    for state, decision in zip(states, decisions, strict=True):
        if not decision.admitted:
            return with_offer(states, decision, state.name), states
    after = [state._replace(totals=d.totals_after) for state, d in zip(states, decisions, strict=True)]
    return decisions[-1]._replace(notes=_notes([*zip(states, prices, decisions, strict=True)], cost, falls)), after


def _without_theorem(state: AccountState, cost: Guarantee, problem: UnprovenComposition) -> Decision:
    """Return the refusal of a cost that no theorem covers; a charge raises the problem itself."""
    meters, totals = state.compiled.meters, state.totals
    unpriced = Price((None,) * len(meters))
    return Decision(
        admitted=False,
        meters=meters,
        totals=totals,
        totals_after=totals,
        price=unpriced,
        request=cost,
        account=state.name,
        notes=(str(problem),),
    )


# What a charge changes, and would not be seen: an alternative that ends, a charge far above the intrinsic time.

_LARGE: Final = Fraction(3, 2)  # of the intrinsic time: a larger charge is noted
_LARGE_PART: Final = 50  # a request of more than this part of the smooth filter's limit may exceed what is left of it
_ALTERNATIVES: Final = {
    "epsilon": "the plain sum of epsilons",
    "exact": "the exact filter",
    "gdp": "the Gaussian filter",
    "paper": "the paper's filter",
    "rho": "the sum of rho",
    "smooth": "the smooth filter",
    "zcdp": "the zCDP filter",
}
_REQUESTS: Final = {
    "approx": "(epsilon, delta)-DP request",
    "gdp": "Gaussian request",
    "pure": "pure request",
    "prob": "probabilistic request",
    "zcdp": "zCDP request",
}


def notes_on(path: Path, decision: Decision, falls: int = MOST_FALLS, *, named: bool = False) -> tuple[str, ...]:
    """Return what an admitted request changes beside the totals: a sentence each.

    The path is as it was before the request, and the decision that of the account that asked. An alternative that had
    room ends for good if the request has no price there; the sentence says what falls by that, of the account that it
    is about. A charge of more than 1.5 times the intrinsic time on the smooth filter is said, unless another
    alternative is relatively cheaper. Sentences about the accounts above begin with their `note_prefix`; with `named`
    so do those about the account itself. Only the first `falls` say what falls: each needs some hundred prices.
    """
    states, cost = _states(path), decision.request
    if not decision.admitted or cost is None:
        return ()
    priced = [(state, state.compiled.price(cost)) for state in states]
    charges = [(one, price, decide(one.compiled.meters, one.totals, price, cost)) for one, price in priced]
    return _notes(charges, cost, falls, named=named)


def note_prefix(name: str) -> str:
    """Return how a note begins that is about an account other than the one that asked."""
    return f"{NOTE_ABOUT}{name!r}: "


def watched(compiled: Compiled, cost: Guarantee, price: Price) -> tuple[int, ...]:
    """Return the indexes of the alternatives for which a charge may need a note.

    The request has no price there, costs far more than its intrinsic time, or is large for the smooth filter. Nothing
    is to be noted while each of them has had an unpriced step, so that a charge compares a few integers.
    """
    return tuple(
        i
        for i, (meter, asked) in enumerate(zip(compiled.meters, price.amounts, strict=True))
        if (meter.limit or (meter.limit == 0 and not meter.counted))
        and not meter.counts_delta
        and (
            asked is None
            or (isinstance(meter, SmoothMeter) and asked * _LARGE_PART > meter.limit)
            or _times_intrinsic(compiled, cost, price, i) is not None
        )
    )


def _notes(
    charges: Sequence[tuple[AccountState, Price, Decision]], cost: Guarantee, falls: int, *, named: bool = False
) -> tuple[str, ...]:
    """Return the notes on an admitted request: of the account that asked, then of those above it."""
    found: list[str] = []
    for size in range(len(charges), 0, -1):
        state, price, decision = charges[size - 1]
        sentences = []
        if ended := _ended(state.compiled.policy, decision, price):
            what = _ending(decision.meters, ended, cost)
            fall = _fall([(one, made) for one, _, made in charges[:size]], cost) if len(found) < falls else ""
            sentences.append(f"{what}: {fall}" if fall else what)
        if passed := _passed(decision, price):
            names = _alternatives(decision.meters, passed)
            sentences.append(f"this request exceeds what was left under {_joined(names)}, which no longer counts")
        if times := _overcharge(state.compiled, decision, price, cost):
            sentences.append(
                f"charged {float(times):.4g} times its intrinsic time: it is large for this policy's reserve"
            )
        about = note_prefix(state.name) if named or size < len(charges) else ""
        found += [about + sentence for sentence in sentences]
    return tuple(found)


def _ended(policy: Policy, decision: Decision, price: Price) -> list[int]:
    """Return the indexes of the alternatives that had room, and end because the request has no price there.

    Under a policy that takes no pure request, such as a menu alone, nothing could ever use the plain sum.
    """
    before, one = decision.totals, PureDP(1)
    return [
        i
        for i, (meter, asked) in enumerate(zip(decision.meters, price.amounts, strict=True))
        if asked is None
        and meter.limit is not None
        and not meter.counts_delta
        and not before.unpriced[i]
        and (before.amounts[i] < meter.limit or not meter.counted)
        and (
            not isinstance(meter, EpsilonMeter)
            or any(each.accepts(one, policy.neighbors) for each, _ in policy.filters)
        )
    ]


def _passed(decision: Decision, price: Price) -> list[int]:
    """Return the index of the smooth filter's meter if a large request uses it up that another alternative admits."""
    before, after = decision.totals, decision.totals_after
    return [
        i
        for i, (meter, asked) in enumerate(zip(decision.meters, price.amounts, strict=True))
        if isinstance(meter, SmoothMeter)
        and asked is not None
        and meter.limit is not None
        and not before.unpriced[i]
        and before.amounts[i] < meter.limit < after.amounts[i]
        and asked * _LARGE_PART > meter.limit
    ]


def _ending(meters: Sequence[Meter], ended: Sequence[int], cost: Guarantee) -> str:
    """Say which alternatives end, and why."""
    what = "this interactive request" if isinstance(cost, Interactive) else "this request"
    bare = [i for i in ended if isinstance(meters[i], EpsilonMeter) and not isinstance(one_shot(cost), WITH_EPSILON)]
    rest = _alternatives(meters, [i for i in ended if i not in bare])
    parts = ["no epsilon, so the plain sum of epsilons no longer counts"] if bare else []
    if rest:
        parts.append(f"no price under {_joined(rest)}, which no longer count{'s' * (len(rest) == 1)}")
    return f"{what} has {', and '.join(parts)}"


def _alternatives(meters: Sequence[Meter], chosen: Sequence[int]) -> list[str]:
    """Name alternatives in words; the orders of the Rényi filter are one filter."""
    found = [meters[i] for i in chosen]
    names = [_alternative(meter) for meter in found if not isinstance(meter, OrderMeter)]
    orders = [f"{float(meter.order):g}" for meter in found if isinstance(meter, OrderMeter)]
    if orders:
        every = sum(isinstance(meter, OrderMeter) and meter.limit is not None for meter in meters)
        which = "" if len(orders) == every else f" at order{'s' * (len(orders) > 1)} {_joined(orders)}"
        names.append(f"the Rényi filter{which}")
    return names


def _alternative(meter: Meter) -> str:
    if not meter.counted:
        return f"the odometer's part for {meter.name}"
    return _ALTERNATIVES.get(meter.pricing, f"the filter {meter.name!r}")


def _joined(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _fall(path: Sequence[tuple[AccountState, Decision]], cost: Guarantee) -> str:
    """Say what the largest single request was and is, of the first kind that the end of an alternative makes smaller.

    That is seen by what would fit if the same were charged and the alternative still counted.
    """
    before = [state for state, _ in path]
    after = [state._replace(totals=one.totals_after) for state, one in path]
    counted = [state._replace(totals=one.totals_after._replace(unpriced=one.totals.unpriced)) for state, one in path]
    for kind in (PureDP, one_shot(cost), GDP, ZCDP):
        now = _largest_size(after, kind)
        if now < _largest_size(counted, kind) and brief_below(now) != brief_below(was := _largest_size(before, kind)):
            return _falls(kind, was, now)
    return ""


def _falls(kind: type[Guarantee] | Guarantee, was: Fraction, now: Fraction) -> str:
    if isinstance(kind, Mechanism):
        return f"the largest single request of {kind.name!r} falls from {was} steps to {now}"
    size = "" if kind.size == "epsilon" else f"{kind.size} "
    name = _REQUESTS.get(kind.kind, f"{kind.kind} request")
    return f"the largest single {name} falls from {size}{brief_below(was)} to {brief_below(now)}"


def _largest_size(path: Path, kind: type[Guarantee] | Guarantee) -> Fraction:
    """Return the size of the largest request of a kind, or its steps; 0 where there is none, or no single size."""
    try:
        found = _largest(_states(path), kind)
    except (InvalidGuarantee, UnprovenComposition):
        return Fraction(0)
    if isinstance(found, Mechanism):
        return Fraction(found.steps)
    return exact_of(getattr(found, found.size)) if found is not None and found.size else Fraction(0)


def _overcharge(compiled: Compiled, decision: Decision, price: Price, cost: Guarantee) -> Fraction | None:
    """Return how many times its intrinsic time a request is charged, if that is much and what counts."""
    own = next((i for i, meter in enumerate(decision.meters) if isinstance(meter, SmoothMeter)), None)
    times = None if own is None else _times_intrinsic(compiled, cost, price, own)
    if own is None or times is None:
        return None
    amounts, unpriced, _ = decision.totals_after
    # Of the alternatives that hold, the part of its limit that the request costs.
    shares = {
        i: Fraction(asked, meter.limit)
        for i, (meter, asked) in enumerate(zip(decision.meters, decision.price.amounts, strict=True))
        if asked is not None
        and meter.limit
        and not meter.counts_delta
        and not unpriced[i]
        and amounts[i] <= meter.limit
    }
    return times if shares.get(own) == min(shares.values()) else None


def _times_intrinsic(compiled: Compiled, cost: Guarantee, price: Price, i: int) -> Fraction | None:
    """Return how many times its intrinsic time a smooth meter charges a request, if it is more than 1.5 times."""
    meter, asked = compiled.meters[i], price.amounts[i]
    if not isinstance(meter, SmoothMeter) or asked is None:
        return None
    own = price.amounts[compiled.index(IntrinsicMeter)]
    time = _curve_time(cost, meter.order, compiled) if own is None else Fraction(own)
    # One unit of the charge may be rounding.
    return asked / time if time and asked - 1 > _LARGE * time else None


def _curve_time(cost: Guarantee, order: Fraction | None, compiled: Compiled) -> Fraction | None:
    """Return the intrinsic time of a zCDP step with the divergence that a request has at an order, in units."""
    cost = one_shot(cost)
    if isinstance(cost, Parallel):
        affected = 1 if compiled.policy.neighbors == "add-remove" else 2
        times = [_curve_time(part, order, compiled) for part, n in cost.different.items() for _ in range(min(n, 2))]
        known = sorted(time for time in times if time is not None)
        return sum(known[-affected:], Fraction(0)) if len(known) == len(times) else None
    if implied := cost.implies():
        return min(filter(None, [_curve_time(one, order, compiled) for one in implied]), default=None)
    own = intrinsic_units(cost)
    if own is not None:
        return Fraction(own)
    curve: Guarantee | None = cost
    if isinstance(cost, Mechanism):  # a curve is for persons who are added or removed, as in `Compiled.price`
        curve = cost.curve if compiled.policy.neighbors == "add-remove" else None
    divergence = curve.at(order) if order is not None and isinstance(curve, RDP) else None
    return None if divergence is None or order is None else 2 * divergence / order * SCALE


def largest_that(kind: Kind[G], times: int, admitted: Callable[[Guarantee, int], bool]) -> G | None:
    """Return the largest guarantee of a kind of which `times` equal requests pass every gate on the way."""
    _check_times(times)
    kind = kind_of(kind)
    if isinstance(kind, Interactive):
        found = largest_that(kind.cost, times, lambda cost, count: admitted(Interactive(cost), count))
        return None if found is None else cast("G", Interactive(found))
    make = _maker(kind)
    if make is None:
        return None

    def fits(size: float) -> bool:
        return admitted(make(size), times)

    size = _largest_steps(kind.steps, fits) if isinstance(kind, Mechanism) else _largest_number(fits)
    if size is None:
        return None
    whole = _parallel_maker(kind, whole=True) if isinstance(kind, Parallel) else make
    return None if whole is None else cast("G", whole(size))


def kind_of(kind: Kind[G]) -> type[G] | G:
    """Return a class or a guarantee as it is, and of a mechanism the class of its guarantee."""
    if isinstance(kind, type | Guarantee) or not callable(kind):
        return kind
    noise = Noise.of(kind, "kind")
    if noise.kind.size:
        return cast("type[G]", noise.kind)
    needed = ", ".join(f"{name}=..." for name, must in noise.settings.items() if must)
    raise InvalidArgument(
        f"kind must have a guarantee of one size (got {noise.name}): see calibrate({noise.name}, {needed}), or pass"
        " its guarantee"
    )


class CalibrationQuestion(NamedTuple):
    """A calibration that was asked for: the settings and the number of requests are valid."""

    noise: Noise
    settings: Mapping[str, int | float | str]
    times: int

    def answer(self, value: float) -> Calibration:
        """Return the calibration with this value; one outside the mechanism's domain raises `InvalidGuarantee`."""
        noise, settings = self.noise, self.settings
        guarantee = noise.mechanism(**{noise.parameter: value}, **settings)
        return Calibration(noise.name, noise.parameter, value, tuple(settings.items()), self.times, guarantee)


def calibration_question(mechanism: object, times: int, settings: Mapping[str, object]) -> CalibrationQuestion:
    """Ask for the noise of a mechanism with its other arguments, `settings`, `times` times; a wrong one raises."""
    _check_times(times)
    noise = Noise.of(mechanism)
    return CalibrationQuestion(noise, noise.read_settings(settings), times)


def calibrate_that(question: CalibrationQuestion, admitted: Callable[[Guarantee], bool]) -> Calibration | None:
    """Return the answer with the least noise that passes every gate on the way, or None.

    The search is over the decimals of four digits themselves, from less noise to more: so the answer was seen
    admitted, and its neighbor with less noise refused (or outside the mechanism's domain). Nothing is rounded.
    """

    def answer(rank: int) -> Calibration | None:
        value = _noise_of_rank(question, rank)
        try:
            return None if value is None else question.answer(value)
        except InvalidGuarantee:  # the settings are valid, so this value is outside the mechanism's domain
            return None

    def fits(rank: int) -> bool:
        found = answer(rank)
        return found is not None and admitted(found.guarantee)

    start = _start_of(question)
    ranks = range(start, start + _MOST_DECADES * _DECADE, _DECADE)
    rank = next(filter(fits, ranks), None)
    if rank is None:
        return None
    while rank > start - _MOST_DECADES * _DECADE and fits(rank - _DECADE):
        rank -= _DECADE
    return answer(rank - _DECADE + 1 + bisect_left(range(rank - _DECADE + 1, rank), x=True, key=fits))


def _start_of(question: CalibrationQuestion) -> int:
    """Return a rank at which the noise is about as large as the sensitivity, or epsilon is 1."""
    sensitivity = exact_of(question.settings.get("sensitivity", 1))
    return _DECADE * math.floor(math.log10(sensitivity))


def _noise_of_rank(question: CalibrationQuestion, rank: int) -> float | None:
    """Return the decimal of a rank, ascending in noise; None if it is not the decimal of a float.

    Where the parameter is not an amount of noise, four digits are kept of its distance from the value at which
    nothing is revealed: a probability of 0.5001 and one of 0.5002 differ by a factor of two in epsilon.
    """
    silent = question.noise.silent
    decade, digits = divmod(rank if silent is None else -rank, _DECADE)
    unit = Fraction(10) ** (decade - _NOISE_DIGITS + 1)
    distance = digits + 10 ** (_NOISE_DIGITS - 1)
    if silent is None:
        return float(distance * unit)
    origin = silent(**question.settings)
    if origin and unit < _LEAST_DIGIT:
        return None
    return float(math.floor(origin / unit + distance) * unit)


def _check_times(times: object) -> None:
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise InvalidArgument(f"times must be an integer from 1 (got {times!r})")


def standing(compiled: Compiled, totals: Totals) -> Decision:
    """Return the decision on a cost of nothing: what is spent and left on every meter."""
    return decide(compiled.meters, totals, Price((0,) * len(compiled.meters)))


def used(compiled: Compiled, totals: Totals) -> float:
    """Return the part of the budget that is spent, from 0 to 1: of the alternative with the most room left.

    It is 0 without a limit, of which nothing is ever used up.
    """
    return min(_used_parts(compiled, totals).values(), default=0.0) if totals.steps else 0.0


def roomiest(compiled: Compiled, totals: Totals) -> int | None:
    """Return the index of the alternative with the most room left, of which `used` is the part; None without one.

    Prices on it add up to what `used` says: it is how much of the budget each charge took.
    """
    parts = _used_parts(compiled, totals)
    return min(parts, key=parts.__getitem__, default=None)


def _used_parts(compiled: Compiled, totals: Totals) -> dict[int, float]:
    """Return the spent part of every alternative, by the index of its meter."""
    return {
        i: 1.0 if skipped or not meter.limit else min(1.0, float(Fraction(total, meter.limit)))
        for i, (meter, total, skipped) in enumerate(
            zip(compiled.meters, totals.amounts, totals.unpriced, strict=True)
        )
        if meter.limit is not None and not meter.counts_delta and meter.counted
    }


def _maker(kind: object) -> Callable[[Numeric], Guarantee] | None:
    """Return a function from a size to a guarantee of the kind; None if it has no single size, or is slow to price.

    A search prices some fifty requests, and requests are untrusted input: so parts and points are bounded.
    """
    if isinstance(kind, type):
        if kind in (RDP, Mechanism, Parallel, Interactive):
            return None
        kind = next((sized.with_size(1) for sized in SIZED.values() if sized is kind), kind)
    if not isinstance(kind, Guarantee):
        raise InvalidArgument(
            f"kind must be a class such as PureDP, ZCDP or GDP, a guarantee, or a mechanism such as odograph.gaussian"
            f" (got {kind!r})"
        )
    if isinstance(kind, Mechanism):
        long = kind.curve is not None and len(kind.curve.orders) > MOST_POINTS
        return None if long else partial(_fewer_steps, kind)
    if isinstance(kind, Parallel):
        return _parallel_maker(kind)
    return kind.resize if kind.size else None


def _parallel_maker(kind: Parallel, *, whole: bool = False) -> Callable[[Numeric], Guarantee] | None:
    """Return a function from the size of the largest part to all parts in proportion; None where that is not offered.

    Without `whole` equal parts are made twice at most, which costs the same: a price reads no more of them. A
    histogram has thousands of equal parts, and the search prices it dozens of times.
    """
    different = kind.different
    if len(different) > MOST_DIFFERENT or not all(part.size for part in different):
        return None
    sizes = {part: exact_of(getattr(part, part.size)) for part in different}
    most = max(sizes.values())
    parts = kind.parts if whole else [part for part, count in different.items() for _ in range(min(count, 2))]
    objects = {id(part): part for part in parts}

    def make(size: Numeric) -> Guarantee:
        factor = exact_of(size) / most
        smaller = {part: part.resize(written_below(own * factor)) for part, own in sizes.items()}
        made = {key: smaller[part] for key, part in objects.items()}
        return Parallel(tuple([made[id(part)] for part in parts]))

    return make if most else None


def _fewer_steps(kind: Mechanism, steps: Numeric) -> Mechanism:
    """Return another number of runs of the same mechanism; its curve and delta grow with the runs."""
    curve, count = kind.curve, int(steps)
    if curve is not None:
        more = Fraction(count, kind.steps)
        values = tuple(exact_of(value) * more for value in curve.values)
        # Fewer runs have no more delta than all of them; more have in proportion, and at 1 there is none to offer.
        delta = exact_of(curve.delta) * max(more, Fraction(1))
        curve = RDP(curve.orders, values, min(delta, _NEARLY_ONE))
    return Mechanism(kind.name, count, curve)


def _largest_number(fits: Callable[[float], bool]) -> float | None:
    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2.0 * high
        if high > 1e9:  # a policy so loose that it refuses nothing: any number is a valid offer
            return low
    while high - low > high * 10.0**-_DIGITS:
        middle = 0.5 * (low + high)
        if middle < 1e-18:  # under the smallest unit of every meter
            return None
        low, high = (middle, high) if fits(middle) else (low, middle)
    offer = _round_down(low)
    shorter = float(f"{low:.{_DIGITS - 2}g}")  # 0.4 rather than 0.399999999999, where it fits
    if shorter > offer and fits(shorter):
        return shorter
    # Prices are padded floats, so fitting is monotone up to the last digits only: the offer is tested.
    while not fits(offer):
        offer = _round_down(offer * (1.0 - 10.0 ** (1 - _DIGITS)))
    return offer


def _largest_steps(asked: int, fits: Callable[[float], bool]) -> int | None:
    """Return how many runs fit, at most 10^12; the search begins at the number that was asked for."""
    try:
        if not fits(1):
            return None
    except UnprovenComposition:
        return None
    low, high = 1, max(2, asked)
    while fits(high) and high < _MOST_STEPS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _round_down(value: float) -> float:
    """Round a positive value down to `_DIGITS` significant digits."""
    scale = _DIGITS - 1 - math.floor(math.log10(value))
    return float(f"{math.floor(value * 10.0**scale)}e{-scale}")
