"""What a request costs, as options: `--pure 0.05`, or `--cost jan=pure:0.1` for each of several accounts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import typer

from odograph.core.guarantees import GDP, ZCDP, ApproxDP, Guarantee, ProbDP, PureDP, guarantee_from_dict
from odograph.core.mechanisms import gaussian, laplace
from odograph.errors import InvalidGuarantee

__all__ = ["Asked", "from_json"]


class _Kind(NamedTuple):
    """How a guarantee is made from numbers, which are passed on as text so that they are read exactly."""

    make: Callable[..., Guarantee]
    numbers: tuple[str, ...]
    least: int  # how many of the numbers must be there


_KINDS: Final = {
    "pure": _Kind(PureDP, ("EPSILON",), 1),
    "approx": _Kind(ApproxDP, ("EPSILON", "DELTA"), 2),
    "prob": _Kind(ProbDP, ("EPSILON", "DELTA"), 2),
    "zcdp": _Kind(ZCDP, ("RHO", "DELTA"), 1),
    "gdp": _Kind(GDP, ("MU",), 1),
    "gaussian": _Kind(gaussian, ("SIGMA", "SENSITIVITY"), 1),
    "laplace": _Kind(laplace, ("SCALE", "SENSITIVITY"), 1),
}
_OPTIONS: Final = "--pure, --approx, --prob, --zcdp, --gdp, --gaussian-sigma, --laplace-scale or --json-cost"


def _option(metavar: str, text: str) -> Any:  # noqa: ANN401  what Typer's own function returns
    return typer.Option(metavar=metavar, help=text, rich_help_panel="Cost: one of")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. Numbers are read exactly as they are typed."""

    pure: Annotated[str | None, _option("EPSILON", "epsilon-DP.")] = None
    approx: Annotated[str | None, _option("EPSILON,DELTA", "(epsilon, delta)-DP.")] = None
    prob: Annotated[str | None, _option("EPSILON,DELTA", "(epsilon, delta)-probabilistic DP.")] = None
    zcdp: Annotated[str | None, _option("RHO", "rho-zCDP; RHO,DELTA for approximate zCDP.")] = None
    gdp: Annotated[str | None, _option("MU", "mu-Gaussian DP.")] = None
    gaussian_sigma: Annotated[str | None, _option("SIGMA", "Gaussian noise of this standard deviation.")] = None
    laplace_scale: Annotated[str | None, _option("SCALE", "Laplace noise of this scale.")] = None
    sensitivity: Annotated[
        str | None, _option("SENSITIVITY", "With a sigma or scale: how far one unit moves the query; 1 if left out.")
    ] = None
    json_cost: Annotated[str | None, _option("JSON", "Any guarantee, as its to_dict() writes it.")] = None
    cost: Annotated[
        list[str] | None,
        _option(
            "ACCOUNT=KIND:NUMBERS", "A cost of its own for each account, as in jan=pure:0.1 or feb=approx:0.1,1e-9."
        ),
    ] = None

    def costs(self, accounts: Sequence[str]) -> dict[str, Guarantee]:
        """Return what is asked of each account."""
        pairs = [_pair(text) for text in self.cost or ()]
        if pairs and (accounts or self._given()):
            raise InvalidGuarantee("--cost names its account itself: leave out other accounts and costs")
        if not pairs:
            if not accounts:
                raise InvalidGuarantee("name at least one account, as in: census-2030 --pure 0.05")
            one = self.guarantee()
            pairs = [(name, one) for name in accounts]
        costs = dict(pairs)
        if len(costs) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise InvalidGuarantee(
                f"{twice!r} is named twice; nothing was charged. Name it once, with its whole cost"
            )
        return costs

    def guarantee(self) -> Guarantee:
        """Return the one cost that was given."""
        given = self._given()
        if len(given) != 1:
            both = f", and not {' and '.join(given)} together" if given else ""
            raise InvalidGuarantee(f"say what it costs by one of {_OPTIONS}{both}")
        ((option, text),) = given.items()
        if option == "--json-cost":
            return from_json(text)
        if self.sensitivity is not None:
            if option not in ("--gaussian-sigma", "--laplace-scale"):
                raise InvalidGuarantee(
                    f"--sensitivity goes with --gaussian-sigma or --laplace-scale, not with {option}"
                )
            text = f"{text},{self.sensitivity}"
        return _made(option.removeprefix("--").split("-")[0], text, option)

    def _given(self) -> dict[str, str]:
        options = {
            "--pure": self.pure,
            "--approx": self.approx,
            "--prob": self.prob,
            "--zcdp": self.zcdp,
            "--gdp": self.gdp,
            "--gaussian-sigma": self.gaussian_sigma,
            "--laplace-scale": self.laplace_scale,
            "--json-cost": self.json_cost,
        }
        return {option: text for option, text in options.items() if text is not None}


def from_json(text: str) -> Guarantee:
    """Read a guarantee as its `to_dict` writes it."""
    try:
        form = json.loads(text, parse_float=str)  # a float would lose digits
    except ValueError as problem:
        raise InvalidGuarantee(f"--json-cost is not JSON ({problem}): {text!r}") from problem
    return guarantee_from_dict(form)


def _pair(text: str) -> tuple[str, Guarantee]:
    name, _, cost = text.partition("=")
    kind, colon, numbers = cost.partition(":")
    if not name or not colon or kind not in _KINDS:
        raise InvalidGuarantee(
            f"--cost is written ACCOUNT=KIND:NUMBERS, with a kind of {', '.join(_KINDS)}, as in jan=pure:0.1;"
            f" {text!r} is not"
        )
    return name, _made(kind, numbers, f"--cost {name}={kind}:")


def _made(kind: str, text: str, option: str) -> Guarantee:
    make, names, least = _KINDS[kind]
    numbers = [number.strip() for number in text.split(",")]
    if not least <= len(numbers) <= len(names):
        shape = ",".join(names[:least]) + "".join(f"[,{name}]" for name in names[least:])
        raise InvalidGuarantee(f"{option} takes {shape}, and {text!r} is not that")
    return make(*numbers)
