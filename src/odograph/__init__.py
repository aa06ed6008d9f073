"""Privacy filters and odometers for fully adaptive analysis."""

from odograph.accountant import Accountant
from odograph.budgets import compile_policy
from odograph.connect import connect
from odograph.core import odometers
from odograph.core.compiled import Compiled, compiled_from_dict, price, reading
from odograph.core.decide import Decision, Price, Totals, decide, decide_many
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
)
from odograph.core.menu import MenuItem
from odograph.core.odometers import Reading
from odograph.core.offers import Quote, ask, how_many, largest, quote
from odograph.core.policy import Policy
from odograph.core.subsampling import subsampled_gaussian, subsampled_gaussian_menu
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
from odograph.ledger.receipts import Checkpoint, Receipt, Verification
from odograph.population.population import Population
from odograph.population.prices import Prices
from odograph.population.running import rowwise
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
    "ask",
    "compile_policy",
    "compiled_from_dict",
    "connect",
    "cost_of",
    "decide",
    "decide_many",
    "discrete_gaussian",
    "dpsgd_policy",
    "exponential",
    "exponential_zcdp",
    "gaussian",
    "guarantee_from_dict",
    "how_many",
    "laplace",
    "laplace_zcdp",
    "largest",
    "odometers",
    "parallel",
    "price",
    "private",
    "progress_bar",
    "quote",
    "randomized_response",
    "reading",
    "rowwise",
    "session",
    "subsampled_gaussian",
    "subsampled_gaussian_menu",
]
