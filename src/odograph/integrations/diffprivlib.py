"""diffprivlib: an accountant for its tools and models that spends from an Odograph account, and what they cost.

diffprivlib asks `check` before a tool runs and tells `spend` afterwards. Here `check` charges, atomically, and the
`spend` that follows in the same function confirms it. So what raises halfway is paid for, and no two threads spend
the same budget.

A price is what diffprivlib itself claims. It does not say for which neighbours: means, sums, variances and quantiles
take the number of records as public (replace-one), histograms and class counts are for a record added or removed. Its
`LinearRegression` with an intercept uses more than the epsilon it reports, by a part 1 / (features + 1).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from operator import index
from types import CodeType
from typing import Any, Final, TypeAlias

from odograph.core.account import Account, check_account
from odograph.core.guarantees import ApproxDP, PureDP, exact_of
from odograph.errors import BudgetExceeded, InvalidGuarantee, InvalidPolicy
from odograph.extras import load

__all__ = ["SETTINGS", "BudgetAccountant", "BudgetRefused", "cost_of"]

SETTINGS: Final = ()  # what `cost_of` takes beside the mechanism

_Cost: TypeAlias = PureDP | ApproxDP
_DIGITS: Final = Context(prec=15, rounding=ROUND_FLOOR)  # of an offered delta: as many as a float keeps


_library = load("diffprivlib")
_transforms = load("diffprivlib.mechanisms.transforms")
_words = load("diffprivlib.utils")
_validation = load("diffprivlib.validation")


class BudgetRefused(BudgetExceeded, _words.BudgetError):  # type: ignore[misc, name-defined]  # untyped library
    """A refusal that diffprivlib's users catch as a `BudgetError`; `.decision` says what would fit."""


class BudgetAccountant(_library.BudgetAccountant):  # type: ignore[misc, name-defined]  # untyped library
    """A `diffprivlib.BudgetAccountant` that spends from an account: by `accountant=`, `with`, or `set_default()`.

    It may be shared by threads. A copy is the same object, so a cloned model spends from the same account; a pickle
    cannot spend. Pass it to a random forest as `accountant=`: as the default accountant it is charged for every tree
    too, because a forest makes its trees with the default one.

    Theorem: the policy's rule: charges are admitted one by one, in any order, chosen from the answers so far.
    Assumes: each tool is (epsilon, delta)-DP, as diffprivlib says, for the policy's neighbours, and the bounds and
        norms of the data are public (diffprivlib warns where it reads them from the data).
    """

    def __init__(self, account: Account) -> None:
        check_account(account, "a BudgetAccountant")
        # The parent's constructor is not called: it keeps a budget of its own, and here there is one account.
        self.account = account
        self._lock = threading.Lock()
        self._charged: list[tuple[float, float]] = []
        self._waiting = threading.local()

    def check(self, epsilon: float, delta: float) -> bool:
        """Charge the account, or raise `BudgetRefused` and charge nothing; a spend may follow and confirm."""
        caller = _caller()
        cost = self._charge(epsilon, delta, caller)
        # Kept by function: a tool that raised or gave up never comes to its spend, and what it left waiting must
        # not pay for the spend of another.
        self._left()[caller] = cost
        return True

    def spend(self, epsilon: float, delta: float) -> BudgetAccountant:
        """Confirm the check that the calling function made before, or charge the account where it made none."""
        caller = _caller()
        waiting = self._left().pop(caller, None)
        if waiting is None or waiting != _cost(epsilon, delta):
            self._charge(epsilon, delta, caller)
        return self

    def total(self, spent_budget: Sequence[tuple[float, float]] | None = None, slack: float | None = None) -> Any:  # noqa: ANN401  untyped library
        """Return the plain sums of what was charged through this accountant, or of the given spends.

        They are for information. The account's rule decides, and usually admits more than sums would.
        """
        if slack is not None and slack != self.slack:
            raise InvalidPolicy(
                f"slack is the policy's ({self.slack!r}), fixed before the first spend, not {slack!r}"
            )
        costs = [_cost(*pair) for pair in (self.spent_budget if spent_budget is None else spent_budget)]
        epsilon = sum((exact_of(cost.epsilon) for cost in costs), Fraction(0))
        delta = sum((exact_of(cost.delta) for cost in costs if isinstance(cost, ApproxDP)), Fraction(0))
        return _words.Budget(float(epsilon), float(min(delta, Fraction(1))))

    def remaining(self, k: int = 1) -> Any:  # noqa: ANN401  untyped library
        """Return an (epsilon, delta) of which `k` equal requests are admitted; both are 0 if there is none.

        Each gets a k-th of what is left of the policy's `delta_steps`, and the largest epsilon that then fits.
        """
        times = index(k)
        if times < 1:
            raise ValueError(f"k must be at least 1, and {k!r} is not")
        aside = self.account.decide(PureDP(0)).left.get("delta", 0.0)
        share = _DIGITS.divide(Decimal(repr(aside)), times)
        # A sub-budget's parent may have less delta left than it has itself; then pure requests are offered.
        for kind in (ApproxDP(1, share), PureDP(1)) if share else (PureDP(1),):
            offer = self.account.largest(kind, times=times)
            if isinstance(offer, PureDP | ApproxDP):
                return _words.Budget(float(offer.epsilon), float(getattr(offer, "delta", 0)))
        return _words.Budget(0.0, 0.0)

    @property
    def epsilon(self) -> float:
        """The policy's epsilon: what is promised for everything together."""
        return float(self.account.policy.epsilon)

    @property
    def delta(self) -> float:
        """The policy's delta."""
        return float(self.account.policy.delta)

    @property
    def slack(self) -> float:
        """The part of the policy's delta that pays for its rule; the rest is for the deltas of the requests."""
        return float(self.account.policy.delta_rule)

    @slack.setter
    def slack(self, slack: float) -> None:
        raise InvalidPolicy(f"slack cannot be set to {slack!r}: a policy is fixed before its first answer is seen")

    @property
    def spent_budget(self) -> list[tuple[float, float]]:
        """What was charged through this accountant, oldest first: pairs of epsilon and delta."""
        with self._lock:
            return self._charged.copy()

    def __repr__(self) -> str:
        return f"BudgetAccountant({self.account!r})"

    def __copy__(self) -> BudgetAccountant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetAccountant:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.account, self.spent_budget)

    def _charge(self, epsilon: float, delta: float, caller: CodeType) -> _Cost:
        cost = _cost(epsilon, delta)
        try:
            with self.account.spending(cost, note=f"diffprivlib: {caller.co_qualname}"):
                pass
        except BudgetExceeded as refusal:
            raise BudgetRefused(refusal.decision) from None
        with self._lock:
            self._charged.append((float(epsilon), float(delta)))
        return cost

    def _left(self) -> dict[CodeType, _Cost]:
        """Return the checks of this thread that no spend has confirmed, by the function that made them."""
        if not hasattr(self._waiting, "checks"):
            self._waiting.checks = {}
        checks: dict[CodeType, _Cost] = self._waiting.checks
        return checks


def cost_of(mechanism: Any, *, neighbours: str = "add-remove") -> _Cost:  # noqa: ANN401, ARG001  untyped; as asked
    """Return the (epsilon, delta) that a diffprivlib mechanism was made for; a transformer costs what it wraps.

    Theorem: each mechanism's own, as its documentation cites it.
    Assumes: its sensitivity is that of the query, for the policy's neighbours: the mechanism cannot know.
    """
    while isinstance(mechanism, _transforms.DPTransformer):
        mechanism = mechanism.parent
    if not isinstance(mechanism, _library.mechanisms.DPMechanism):
        raise InvalidGuarantee(
            f"{mechanism!r} is no diffprivlib mechanism; pass one, such as Laplace(epsilon=0.1, ...)"
        )
    return _cost(mechanism.epsilon, mechanism.delta)


def _cost(epsilon: float, delta: float) -> _Cost:
    _validation.check_epsilon_delta(epsilon, delta)
    return ApproxDP(epsilon, delta) if delta else PureDP(epsilon)


def _caller() -> CodeType:
    """Return the function outside this file that is calling."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        raise InvalidGuarantee("this Python has no frames, and a spend cannot be told from another: use CPython")
    return frame.f_code


def _restored(account: Account, charged: list[tuple[float, float]]) -> BudgetAccountant:
    accountant = BudgetAccountant(account)
    accountant._charged.extend(charged)  # noqa: SLF001  the constructor of a pickle
    return accountant
