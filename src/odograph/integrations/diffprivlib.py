"""diffprivlib: an accountant for its tools and models that spends from an Odograph account, and their costs.

diffprivlib calls `check` before a tool runs and `spend` afterwards. Here `check` charges, atomically, and the `spend`
that follows in the same function confirms it. So a tool that raises halfway is paid for, and two threads cannot spend
the same budget.

The price is diffprivlib's own claim, for the neighbors for which its proof holds. diffprivlib does not state these: a
table here does, tool by tool, from a reading of the source of the version that the extra allows. A tool or model that
is not in the table, or whose claim does not hold, is refused.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Mapping, Sequence
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from operator import index
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from odograph.account import Account
from odograph.core.fixed_point import exactly, up
from odograph.core.guarantees import ApproxDP, PureDP, exact_of
from odograph.errors import (
    BudgetExceeded,
    InvalidArgument,
    InvalidGuarantee,
    OdographError,
    UnprovenComposition,
    load_extra,
    with_usage,
)
from odograph.sessions import check_account

__all__ = ["SETTINGS", "BudgetAccountant", "BudgetRefused", "cost_of"]

SETTINGS: Final = ()  # further arguments of `cost_of`

_Cost: TypeAlias = PureDP | ApproxDP
_DELTA_DIGITS: Final = Context(prec=15, rounding=ROUND_FLOOR)  # of an offered delta: as many digits as a float keeps


class _Claim(NamedTuple):
    """For which neighbors a function's claim holds: as one step, as two (removed and added), or not at all."""

    names: tuple[str, ...]
    added: int | None
    replaced: int | None
    reason: str


_SIZE: Final = "it takes the number of records as public"
_TWO_COUNTS: Final = "a replaced record leaves one count and enters another"

# The functions of diffprivlib that call an accountant, by module and name, and their public names.
_TABLE: Final = {
    "tools.utils._mean": _Claim(("tools.mean", "tools.nanmean"), None, 1, _SIZE),
    "tools.utils._var": _Claim(("tools.var", "tools.nanvar", "tools.std", "tools.nanstd"), None, 1, _SIZE),
    "tools.utils._sum": _Claim(("tools.sum", "tools.nansum", "tools.count_nonzero"), None, 1, _SIZE),
    "tools.histograms.histogram": _Claim(("tools.histogram",), 1, 2, _TWO_COUNTS),
    "tools.histograms.histogramdd": _Claim(("tools.histogramdd", "tools.histogram2d"), 1, 2, _TWO_COUNTS),
    # A rank, and its distance from the wanted one, changes by at most 1 either way.
    "tools.quantiles.quantile": _Claim(("tools.quantile", "tools.median", "tools.percentile"), 1, 1, ""),
    "models.forest.DecisionTreeClassifier.fit": _Claim(("models.DecisionTreeClassifier",), 1, 2, _TWO_COUNTS),
    # Trees get records by their position, so one record more moves others from tree to tree.
    "models.forest.RandomForestClassifier.fit": _Claim(("models.RandomForestClassifier",), None, 2, _SIZE),
    # Its sums of a class are for a record that stays in the class, unless 0 is within the bounds.
    "models.naive_bayes.GaussianNB._partial_fit": _Claim(("models.GaussianNB",), None, 2, _SIZE),
    "models.logistic_regression.LogisticRegression.fit": _Claim(("models.LogisticRegression",), None, 1, _SIZE),
    "models.pca.PCA._fit_full": _Claim(("models.PCA",), None, 1, _SIZE),
    "models.standard_scaler.StandardScaler.partial_fit": _Claim(("models.StandardScaler",), None, 1, _SIZE),
    "models.k_means.KMeans.fit": _Claim(
        ("models.KMeans",), None, None, "a cluster without records keeps its centre, which shows that it has none"
    ),
    "models.linear_regression.LinearRegression.fit": _Claim(
        ("models.LinearRegression",),
        None,
        None,
        "the noise on its sums of squares is scaled to the lower bounds alone, and is 0 for features from 0 to 1",
    ),
}

# The functions that sum records, and the argument that holds the records.
_SUMS: Final = {
    "tools.mean": "array",
    "tools.var": "array",
    "tools.sum": "array",
    "models.GaussianNB": "X",
    "models.PCA": "X",
}

_ADVICE: Final = (
    "If you know its cost, charge that with account.spend(odo.PureDP(...)), and run it with"
    " accountant=diffprivlib.BudgetAccountant()"
)

_library = load_extra("diffprivlib")
_transforms = load_extra("diffprivlib.mechanisms.transforms")
_utils = load_extra("diffprivlib.utils")
_validation = load_extra("diffprivlib.validation")


class BudgetRefused(BudgetExceeded, _utils.BudgetError):  # type: ignore[misc, name-defined]  # untyped library
    """A refusal that is also diffprivlib's `BudgetError`; `.decision` has the largest admitted request."""


class BudgetAccountant(_library.BudgetAccountant):  # type: ignore[misc, name-defined]  # untyped library
    """A `diffprivlib.BudgetAccountant` that spends from an account: by `accountant=`, `with`, or `set_default()`.

    It may be shared by threads. A copy is the same object, so a cloned model spends from the same account; a pickle
    cannot spend. Pass it to a random forest as `accountant=`: as the default accountant it would also be charged for
    every tree, because a forest makes its trees with the default one.

    A tool whose claim does not hold for the policy's neighbors raises `UnprovenComposition` and charges nothing. One
    that holds where a record is added or removed is charged twice its epsilon where records are replaced. Costs that
    code outside diffprivlib passes to `check` and `spend` are taken as they are, for the policy's neighbors.

    Theorem: the policy's filter: charges are admitted one by one, in any order, chosen from the answers so far; group
        privacy, for two records (Dwork and Roth (2014)).
    Assumes: each tool is (epsilon, delta)-DP, as diffprivlib says, for the neighbors in the table. A record is one
        entry of an array, or a row where columns are processed separately, and none is NaN. The bounds and norms of
        the data, and the set of labels, are public (diffprivlib warns where it reads bounds from the data).
    """

    @with_usage("a BudgetAccountant takes an account: BudgetAccountant(Accountant(Policy(epsilon=1, delta=1e-6)))")
    def __init__(self, account: Account) -> None:
        check_account(account, "a BudgetAccountant")
        # The parent's constructor is not called: it would keep a budget of its own beside the account's.
        self.account = account
        self._lock = threading.Lock()
        self._charged: list[tuple[float, float]] = []
        self._thread = threading.local()

    def check(self, epsilon: float, delta: float) -> bool:
        """Charge the account, or raise `BudgetRefused` and charge nothing; a later `spend` confirms the charge."""
        caller = _caller(self)
        self._charge(epsilon, delta, caller)
        # By function: a tool that raised never reaches its spend, and its check must not pay for another's.
        self._open_checks()[caller.f_code] = _cost(epsilon, delta)
        return True

    def spend(self, epsilon: float, delta: float) -> BudgetAccountant:
        """Confirm the calling function's earlier check, or charge the account if there was none."""
        caller = _caller(self)
        checked = self._open_checks().pop(caller.f_code, None)
        if checked is None or checked != _cost(epsilon, delta):
            self._charge(epsilon, delta, caller)
        return self

    def total(self, spent_budget: Sequence[tuple[float, float]] | None = None, slack: float | None = None) -> Any:  # noqa: ANN401  untyped library
        """Return the plain sums of what was charged through this accountant, or of the given spends.

        They are informational: the account's filter decides, and usually admits more than sums would.
        """
        if slack is not None and slack != self.slack:
            raise InvalidArgument(
                f"slack must be the policy's, {self.slack!r}, which is fixed before the first spend (got {slack!r})"
            )
        costs = [_cost(*pair) for pair in (self.spent_budget if spent_budget is None else spent_budget)]
        epsilon = sum((exact_of(cost.epsilon) for cost in costs), Fraction(0))
        delta = sum((exact_of(cost.delta) for cost in costs if isinstance(cost, ApproxDP)), Fraction(0))
        return _utils.Budget(float(epsilon), float(min(delta, Fraction(1))))

    def remaining(self, k: int = 1) -> Any:  # noqa: ANN401  untyped library
        """Return an (epsilon, delta) of which `k` equal requests are admitted; (0, 0) if none, (inf, 0) if any.

        Each request gets a k-th of the remaining `delta_steps` of the policy, and the largest epsilon that then fits.
        """
        times = index(k)
        if times < 1:
            raise InvalidArgument(f"k must be an integer from 1 (got {k!r})")
        aside = self.account.decide(PureDP(0)).left.get("delta", 0.0)
        share = _DELTA_DIGITS.divide(Decimal(repr(aside)), times)
        # A sub-budget may have more delta left than its parent; then pure requests are offered.
        for kind in (ApproxDP(1, share), PureDP(1)) if share else (PureDP(1),):
            try:
                offer = self.account.largest(kind, times=times)
            except InvalidArgument:  # neither the account nor one above it has a limit
                return _utils.Budget(math.inf, 0.0)
            if isinstance(offer, PureDP | ApproxDP):
                return _utils.Budget(float(offer.epsilon), float(getattr(offer, "delta", 0)))
        return _utils.Budget(0.0, 0.0)

    @property
    def epsilon(self) -> float:
        """The policy's epsilon, promised for all requests together; without a limit, infinity."""
        policy = self.account.policy
        if policy.epsilon is None and not policy.is_unlimited:
            raise UnprovenComposition(f"the policy must promise an epsilon (got {policy.target})")
        return math.inf if policy.epsilon is None else float(policy.epsilon)

    @property
    def delta(self) -> float:
        """The policy's delta."""
        return float(self.account.policy.delta)

    @property
    def slack(self) -> float:
        """The part of the policy's delta for its filter; the rest is for the deltas of the requests."""
        return float(self.account.policy.delta_filter)

    @slack.setter
    def slack(self, slack: float) -> None:
        raise InvalidArgument(
            f"slack cannot be set (got {slack!r}): a policy is fixed before its first answer is seen"
        )

    @property
    def spent_budget(self) -> list[tuple[float, float]]:
        """The charges made through this accountant, oldest first: pairs of epsilon and delta."""
        with self._lock:
            return self._charged.copy()

    def __repr__(self) -> str:
        return f"BudgetAccountant({self.account!r})"

    def __copy__(self) -> BudgetAccountant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetAccountant:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.account, self.spent_budget)

    def _charge(self, epsilon: float, delta: float, caller: FrameType) -> None:
        cost = _for_neighbors(_cost(epsilon, delta), caller, self.account.policy.neighbors)
        try:
            with self.account.spending(cost, note=f"diffprivlib: {caller.f_code.co_qualname}"):
                pass
        except BudgetExceeded as refusal:
            raise BudgetRefused(refusal.decision) from None
        with self._lock:
            self._charged.append((float(cost.epsilon), float(getattr(cost, "delta", 0))))

    def _open_checks(self) -> dict[CodeType, _Cost]:
        """Return this thread's checks that are not confirmed by a spend yet, by the function that made them."""
        if not hasattr(self._thread, "checks"):
            self._thread.checks = {}
        checks: dict[CodeType, _Cost] = self._thread.checks
        return checks


def cost_of(mechanism: Any, *, neighbors: str = "add-remove") -> _Cost:  # noqa: ANN401, ARG001  untyped; as asked
    """Return the (epsilon, delta) of a diffprivlib mechanism; a transformer costs what it wraps.

    Theorem: by its own proof: each mechanism's, as its documentation cites it.
    Assumes: its sensitivity is that of the query, for the policy's neighbors: the mechanism cannot know.
    """
    while isinstance(mechanism, _transforms.DPTransformer):
        mechanism = mechanism.parent
    if not isinstance(mechanism, _library.mechanisms.DPMechanism):
        raise InvalidGuarantee(
            f"mechanism must be one of diffprivlib's, such as Laplace(epsilon=0.1, ...) (got {mechanism!r})"
        )
    return _cost(mechanism.epsilon, mechanism.delta)


def _cost(epsilon: float, delta: float) -> _Cost:
    _validation.check_epsilon_delta(epsilon, delta)
    return ApproxDP(epsilon, delta) if delta else PureDP(epsilon)


def _caller(accountant: BudgetAccountant) -> FrameType:
    """Return the nearest calling frame outside this file and outside the methods of a subclass."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_locals.get("self") is accountant):
        frame = frame.f_back
    if frame is None:
        raise OdographError("BudgetAccountant needs the stack frames of CPython, to match each spend with its check")
    return frame


def _for_neighbors(cost: _Cost, caller: FrameType, neighbors: str) -> _Cost:
    """Return the cost of a function of diffprivlib for the policy's neighbors, from the cost that it claims.

    Theorem: group privacy, Dwork and Roth (2014): two steps of (epsilon, delta)-DP are (2 epsilon, (1 + e^epsilon)
        delta)-DP.
    Assumes: the table; replacing a record is removing one and adding one. There is no theorem for the other
        direction: replacements never lead to a dataset of another size.
    """
    module, _, name = str(caller.f_globals.get("__name__")).partition(".")
    if module != "diffprivlib":
        return cost
    claim = _TABLE.get(f"{name}.{caller.f_code.co_qualname}")
    if claim is None:
        raise UnprovenComposition(
            f"diffprivlib's {name}.{caller.f_code.co_qualname} is not among the supported tools and models. {_ADVICE}"
        )
    _check_claim(claim.names, caller.f_locals)
    times = {"add-remove": claim.added, "replace-one": claim.replaced}[neighbors]
    if times is None and claim.replaced is not None:
        names = " or ".join(name for name in claim.names if ".nan" not in name)
        raise UnprovenComposition(
            f"diffprivlib's {names} covers replaced records only ({claim.reason}); it needs a policy with"
            f" neighbors='replace-one' (got {neighbors!r})"
        )
    if times is None:
        raise UnprovenComposition(
            f"diffprivlib's {claim.names[0]} does not have the privacy that it claims: {claim.reason}. {_ADVICE}"
        )
    if times == 1:
        return cost
    twice = 2 * exact_of(cost.epsilon)
    if isinstance(cost, PureDP):
        return PureDP(twice)
    factor = exactly(up(1.0 + math.exp(min(float(cost.epsilon), 700.0))))
    return ApproxDP(twice, exact_of(cost.delta) * factor)


def _check_claim(names: tuple[str, ...], given: Mapping[str, Any]) -> None:
    """Raise for arguments with which a function does not have the privacy that it claims."""
    name = names[0]
    if given.get("nan") and name != "tools.sum":
        raise UnprovenComposition(
            f"diffprivlib's {' or '.join(name for name in names if '.nan' in name)} scales its noise to all records,"
            f" and divides by those that are not NaN; fill the gaps: {name}(np.nan_to_num(array, nan=a value within"
            " the bounds), ...)"
        )
    if given.get("nan") and not given["lower"] <= 0 <= given["upper"]:
        raise UnprovenComposition(
            "diffprivlib's tools.nansum counts a NaN as 0, which these bounds do not contain; pass bounds that do"
        )
    if name in _SUMS and not _is_precise(_sum_dtype(name, given), integers=name == "tools.sum"):
        raise UnprovenComposition(
            f"diffprivlib's {name} sums in {_sum_dtype(name, given)} here, where rounding or overflow makes one"
            " record count for more than the noise covers; pass the data as floats, array.astype(float), and leave"
            " dtype= out"
        )
    if isinstance(given.get("bins"), str):
        raise UnprovenComposition(
            f"diffprivlib's {name} with bins={given['bins']!r} takes the number of bins from the data; pass a number,"
            " or the edges"
        )
    if given.get("weights") is not None:
        raise UnprovenComposition(
            f"diffprivlib's {name} with weights= adds the noise of a plain count; leave weights= out"
        )
    if name == "models.LogisticRegression" and not _is_covered(given["self"]):
        raise UnprovenComposition(
            "diffprivlib's models.LogisticRegression takes the norm of a record where the proof has its square, and"
            " does not regularize the intercept: its claim holds for norms up to 1 without an intercept. Divide the"
            " features by the norm, and pass data_norm=1, fit_intercept=False"
        )
    if name == "models.GaussianNB" and not _contain_zero(given["self"].bounds):
        raise UnprovenComposition(
            "diffprivlib's models.GaussianNB covers a record that changes its label only if 0 is within the bounds of"
            " every feature; shift the features, and pass such bounds="
        )


def _sum_dtype(name: str, given: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the type in which NumPy sums the records of a function."""
    own: np.dtype[Any]
    if given.get("dtype") is not None:
        own = np.dtype(given["dtype"])
        return own
    try:
        own = np.asarray(given[_SUMS[name]]).dtype
    except Exception:  # noqa: BLE001  the tool raises it again, and is charged for that
        return np.dtype(float)
    if own.kind not in "biu":
        return own
    return np.dtype(np.int64 if name == "tools.sum" else float)  # narrower integers are widened


def _is_precise(kind: np.dtype[Any], *, integers: bool) -> bool:
    """Whether a type has enough digits for a sum: single precision has eight, too few for a sum of dates."""
    return kind.itemsize >= 8 and (kind.kind == "f" or (integers and kind.kind == "i"))


def _is_covered(model: Any) -> bool:  # noqa: ANN401  untyped library
    """Whether objective perturbation of Chaudhuri, Monteleoni and Sarwate (2011) covers a logistic regression.

    It covers records of norm at most 1 and an objective that is strongly convex in every coefficient. For norm R the
    curvature of a record is at most R^2/4, and diffprivlib allows for R/4 only.
    """
    return not model.fit_intercept and model.data_norm is not None and model.data_norm <= 1


def _contain_zero(bounds: Any) -> bool:  # noqa: ANN401  untyped library
    return bounds is not None and bool(np.all(np.asarray(bounds[0]) <= 0) and np.all(np.asarray(bounds[1]) >= 0))


def _unpickle(account: Account, charged: list[tuple[float, float]]) -> BudgetAccountant:
    accountant = BudgetAccountant(account)
    accountant._charged.extend(charged)  # noqa: SLF001  the constructor of a pickle
    return accountant
