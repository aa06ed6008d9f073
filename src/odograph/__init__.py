"""Privacy filters and odometers for fully adaptive analysis."""

from odograph.accountant import Accountant
from odograph.compile import compile_policy
from odograph.connect import connect
from odograph.core import filters, gate, odometers, planning
from odograph.core.compiled import Compiled
from odograph.core.gate import Decision, Price, Totals, decide
from odograph.core.guarantees import (
    GDP,
    RDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
    Parallel,
    ProbDP,
    PureDP,
    guarantee_from_dict,
)
from odograph.core.mechanisms import (
    discrete_gaussian,
    exponential,
    exponential_zcdp,
    gaussian,
    laplace,
    laplace_zcdp,
    parallel,
    randomized_response,
    subsampled_gaussian,
    subsampled_gaussian_menu,
)
from odograph.core.menu import MenuItem
from odograph.core.odometers import Reading
from odograph.core.planning import Quote
from odograph.core.policy import Policy
from odograph.document import Entry
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    BudgetExceeded,
    IdempotencyConflict,
    InvalidGuarantee,
    InvalidPolicy,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    MissingExtra,
    OdographError,
    ReservationNotFound,
    ReservationResolved,
    ServiceUnavailable,
    UnprovenComposition,
)
from odograph.integrations import cost_of
from odograph.ledger.account import LedgerAccount, Reservation
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import Checkpoint, Receipt, Verification
from odograph.population.population import Population
from odograph.population.prices import Prices, vectorized_price
from odograph.progress import progress_bar
from odograph.session import Session, private, session
from odograph.training import TrainingPlan, dpsgd_policy

__all__ = [
    "GDP",
    "RDP",
    "ZCDP",
    "AccountClosed",
    "AccountExists",
    "AccountNotFound",
    "Accountant",
    "ApproxDP",
    "BudgetExceeded",
    "Checkpoint",
    "Compiled",
    "Decision",
    "Entry",
    "Guarantee",
    "IdempotencyConflict",
    "InvalidGuarantee",
    "InvalidPolicy",
    "Ledger",
    "LedgerAccount",
    "LedgerBusy",
    "LedgerCorrupt",
    "LedgerError",
    "Mechanism",
    "MenuItem",
    "MissingExtra",
    "OdographError",
    "Parallel",
    "Policy",
    "Population",
    "Price",
    "Prices",
    "ProbDP",
    "PureDP",
    "Quote",
    "Reading",
    "Receipt",
    "Reservation",
    "ReservationNotFound",
    "ReservationResolved",
    "ServiceUnavailable",
    "Session",
    "Totals",
    "TrainingPlan",
    "UnprovenComposition",
    "Verification",
    "compile_policy",
    "connect",
    "cost_of",
    "decide",
    "discrete_gaussian",
    "dpsgd_policy",
    "exponential",
    "exponential_zcdp",
    "filters",
    "gate",
    "gaussian",
    "guarantee_from_dict",
    "laplace",
    "laplace_zcdp",
    "odometers",
    "parallel",
    "planning",
    "private",
    "progress_bar",
    "randomized_response",
    "session",
    "subsampled_gaussian",
    "subsampled_gaussian_menu",
    "vectorized_price",
]
