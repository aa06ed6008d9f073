"""The cost of a request as options: `--pure 0.05`, or `--cost jan=pure:0.1` for each of several accounts.

Each kind of guarantee that is made of numbers has an option, from its class: `--approx EPSILON,DELTA`. Also
`odograph budget`: the certified budget of the exact filter for a target.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.table import Table

from odograph.cli.options import AsJson, print_result, progress
from odograph.compile import certified
from odograph.core.conversions import filter_time
from odograph.core.filters import Exact
from odograph.core.guarantees import SIZED, Guarantee, guarantee_from_dict
from odograph.core.mechanisms import gaussian, laplace
from odograph.core.policy import Policy
from odograph.core.value_iteration import COARSE, FAMILIES, FINE, refuted_intrinsic
from odograph.errors import InvalidGuarantee, InvalidPolicy

if TYPE_CHECKING:
    from odograph.core.value_iteration import Budget

__all__ = ["CostOptions", "budget", "from_json"]


class _Spelling(NamedTuple):
    """How a guarantee is made from numbers, which are passed on as strings so that they are read exactly."""

    make: Callable[..., Guarantee]
    numbers: tuple[str, ...]
    required: int  # how many of the numbers must be given

    @property
    def form(self) -> str:
        """The numbers as they are typed, such as RHO[,DELTA]."""
        return ",".join(self.numbers[: self.required]) + "".join(
            f"[,{name}]" for name in self.numbers[self.required :]
        )


_NOISE_OPTIONS: Final = {"gaussian_sigma": "gaussian", "laplace_scale": "laplace"}
_NOISE: Final = {
    "gaussian": _Spelling(gaussian, ("SIGMA", "SENSITIVITY"), 1),
    "laplace": _Spelling(laplace, ("SCALE", "SENSITIVITY"), 1),
}


def _spellings() -> dict[str, _Spelling]:
    """Return the kinds that can be typed: guarantees made of numbers, and noise."""
    return {kind: _spelling(cls) for kind, cls in SIZED.items()} | _NOISE


def _spelling(cls: type[Guarantee]) -> _Spelling:
    numbers = tuple(name.upper() for name in cls.__match_args__)
    return _Spelling(cls, numbers, sum(one.default is MISSING for one in fields(cls)))


def _option(metavar: str, text: str) -> Any:  # noqa: ANN401  an annotation for Typer
    return typer.Option(metavar=metavar, help=text, rich_help_panel="Cost: one of")


def _text_option(metavar: str, text: str) -> Any:  # noqa: ANN401  an annotation for Typer
    return Annotated[str | None, _option(metavar, text)]


_OPTIONS: Final[dict[str, Any]] = {
    **{
        kind: _text_option(_spelling(cls).form, (inspect.getdoc(cls) or "").partition("\n")[0])
        for kind, cls in SIZED.items()
    },
    "gaussian_sigma": _text_option("SIGMA", "Gaussian noise of this standard deviation."),
    "laplace_scale": _text_option("SCALE", "Laplace noise of this scale."),
    "json_cost": _text_option("JSON", "Any guarantee, as its to_dict() returns it."),
}


if TYPE_CHECKING:

    class _Options:
        sensitivity: str | None
        cost: list[str] | None
else:
    _Options = make_dataclass(
        "_Options",
        [
            *[(name, option, field(default=None)) for name, option in _OPTIONS.items()],
            (
                "sensitivity",
                _text_option(
                    "SENSITIVITY", "With a sigma or scale: how far one privacy unit moves the query; by default 1."
                ),
                field(default=None),
            ),
            (
                "cost",
                Annotated[
                    list[str] | None,
                    _option(
                        "ACCOUNT=KIND:NUMBERS",
                        "A separate cost for each account, as in jan=pure:0.1 or feb=approx:0.1,1e-9;"
                        " may be repeated.",
                    ),
                ],
                field(default=None),
            ),
        ],
        frozen=True,
        namespace={"__module__": __name__},
    )


class CostOptions(_Options):
    """What a request costs. Numbers are read exactly as they are typed."""

    def costs(self, accounts: Sequence[str]) -> dict[str, Guarantee]:
        """Return the cost for each account."""
        pairs = [_pair(text) for text in self.cost or ()]
        if pairs and (accounts or self._given()):
            raise InvalidGuarantee("--cost names its account itself: remove the other accounts and costs")
        if not pairs:
            if not accounts:
                raise InvalidGuarantee("name at least one account, as in: census-2030 --pure 0.05")
            one = self.guarantee()
            pairs = [(name, one) for name in accounts]
        costs = dict(pairs)
        if len(costs) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise InvalidGuarantee(
                f"accounts must be named once (got {twice!r} twice): name it once, with its whole cost. Nothing was"
                " charged"
            )
        return costs

    def guarantee(self) -> Guarantee:
        """Return the one cost that was given."""
        given = self._given()
        if len(given) != 1:
            both = f" (got {' and '.join(map(_flag, given))})" if given else ""
            raise InvalidGuarantee(f"pass exactly one cost: {', '.join(map(_flag, _OPTIONS))}{both}")
        ((option, text),) = given.items()
        if option == "json_cost":
            return from_json(text)
        if self.sensitivity is not None:
            if option not in _NOISE_OPTIONS:
                raise InvalidGuarantee(
                    f"--sensitivity is for --gaussian-sigma and --laplace-scale only (got {_flag(option)})"
                )
            text = f"{text},{self.sensitivity}"
        return _guarantee(_NOISE_OPTIONS.get(option, option), text, _flag(option))

    def _given(self) -> dict[str, str]:
        texts = {name: getattr(self, name) for name in _OPTIONS}
        return {name: text for name, text in texts.items() if text is not None}


def from_json(text: str) -> Guarantee:
    """Read a guarantee as its `to_dict` writes it."""
    try:
        form = json.loads(text, parse_float=str)  # a float would lose digits
    except ValueError as problem:
        raise InvalidGuarantee(f"--json-cost must be JSON (got {text!r}): {problem}") from problem
    return guarantee_from_dict(form)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pair(text: str) -> tuple[str, Guarantee]:
    name, _, cost = text.partition("=")
    kind, colon, numbers = cost.partition(":")
    spellings = _spellings()
    if not name or not colon or kind not in spellings:
        raise InvalidGuarantee(
            f"--cost must be ACCOUNT=KIND:NUMBERS, such as jan=pure:0.1, with a kind of {', '.join(spellings)}"
            f" (got {text!r})"
        )
    return name, _guarantee(kind, numbers, f"--cost {name}={kind}:")


def _guarantee(kind: str, text: str, option: str) -> Guarantee:
    spelling = _spellings()[kind]
    numbers = [number.strip() for number in text.split(",")]
    if not spelling.required <= len(numbers) <= len(spelling.numbers):
        raise InvalidGuarantee(f"{option} must be {spelling.form} (got {text!r})")
    return spelling.make(*numbers)


_LATTICE: Final = 200  # spacings of the adversary's lattice in epsilon


def budget(  # noqa: PLR0913  each is one option
    epsilon: Annotated[str, typer.Option(help="Epsilon of the target, read exactly as typed.")],
    delta: Annotated[str, typer.Option(help="Delta of the target, all of it for the filter.")],
    *,
    fine: Annotated[
        bool, typer.Option("--fine", help="Solve at the resolution of the shipped table: a minute or two.")
    ] = False,
    pure_only: Annotated[
        bool, typer.Option("--pure-only", help="For pure DP steps only, without Gaussian ones.")
    ] = False,
    adversary: Annotated[
        bool, typer.Option("--adversary", help="Also print a budget that an explicit adversary refutes.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Print the certified budget of the exact filter for a target, solving for it if necessary."""
    policy = Policy(epsilon, delta, filter=Exact(takes=("pure",) if pure_only else FAMILIES))
    need = policy.need
    if need is None:  # pragma: no cover  the policy's filter is the exact one
        raise InvalidPolicy("the policy has no exact filter")
    with progress("solving", quiet=json) as report:
        found, source = certified(need, fineness=FINE if fine else COARSE, progress=report)
    paper = filter_time(float(need.epsilon), float(need.delta))
    rows = [
        ("target", f"{policy.target}, for {' and '.join(found.takes)} steps of any size"),
        ("quantum", f"{float(found.quantum):.12g} of intrinsic time"),
        ("units", str(found.units)),
        ("quantum x units", f"{found.intrinsic:.6g} (for comparison; the budget is the pair)"),
        ("the paper's y*", f"{paper:.6g}"),
        ("ratio", f"{found.intrinsic / paper:.4g} times the paper's"),
        ("source", source),
    ]
    form = {
        "epsilon": float(need.epsilon),
        "delta": float(need.delta),
        "takes": [*found.takes],
        "quantum": str(found.quantum),
        "units": found.units,
        "intrinsic": found.intrinsic,
        "paper": paper,
        "source": source,
    }
    if adversary:
        refuted = float(refuted_intrinsic(need.epsilon, need.delta, float(need.epsilon) / _LATTICE))
        form["refuted"] = refuted
        rows.append(("refuted", _refuted_text(refuted, found)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    print_result(form, table, as_json=json)


def _refuted_text(refuted: float, found: Budget) -> str:
    gap = refuted / found.intrinsic - 1
    return f"{refuted:.6g} by an analyst with steps of multiples of epsilon/{_LATTICE}: {gap:.2%} above"
