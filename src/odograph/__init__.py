"""Privacy filters and odometers for fully adaptive analysis."""

from odograph.budgets import compile_policy
from odograph.core.compiled import Compiled, compiled_from_dict, price, reading
from odograph.core.decide import Decision, Price, Totals, decide, decide_many
from odograph.core.guarantees import (
    GDP,
    RDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
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
    randomized_response,
)
from odograph.core.menu import MenuItem
from odograph.core.odometers import Reading
from odograph.core.offers import Quote, ask, how_many, largest, quote
from odograph.core.policy import Policy
from odograph.core.subsampling import subsampled_gaussian_menu
from odograph.errors import (
    BudgetExceeded,
    InvalidGuarantee,
    InvalidPolicy,
    MissingExtra,
    OdographError,
    UnprovenComposition,
)
from odograph.integrations.dp_accounting import subsampled_gaussian
from odograph.progress import progress_bar

__all__ = [
    "GDP",
    "RDP",
    "ZCDP",
    "ApproxDP",
    "BudgetExceeded",
    "Compiled",
    "Decision",
    "Guarantee",
    "InvalidGuarantee",
    "InvalidPolicy",
    "Mechanism",
    "MenuItem",
    "MissingExtra",
    "OdographError",
    "Policy",
    "Price",
    "ProbDP",
    "PureDP",
    "Quote",
    "Reading",
    "Totals",
    "UnprovenComposition",
    "ask",
    "compile_policy",
    "compiled_from_dict",
    "decide",
    "decide_many",
    "discrete_gaussian",
    "exponential",
    "exponential_zcdp",
    "gaussian",
    "guarantee_from_dict",
    "how_many",
    "laplace",
    "laplace_zcdp",
    "largest",
    "price",
    "progress_bar",
    "quote",
    "randomized_response",
    "reading",
    "subsampled_gaussian",
    "subsampled_gaussian_menu",
]
