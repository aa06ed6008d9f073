"""Charges: decide, spend, reserve, commit, void, largest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Final

import typer

from odograph.cli.costs import Asked, from_json
from odograph.cli.options import At, Key, Note, account_names, say, with_options
from odograph.core.guarantees import SIZED, ZCDP, ApproxDP, Guarantee, ProbDP
from odograph.core.offers import used
from odograph.errors import InvalidGuarantee, InvalidPolicy
from odograph.ledger.ledger import Ledger
from odograph.ledger.receipts import Receipt

__all__ = ["commit", "decide", "largest", "reserve", "spend", "void"]

_REFUSED: Final = 3
_WITH_DELTA: Final[dict[str, Callable[[int, str], Guarantee]]] = {"approx": ApproxDP, "prob": ProbDP, "zcdp": ZCDP}

Accounts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ACCOUNT", help="The accounts; each is charged the same cost.", autocompletion=account_names
    ),
]
ReservationId = Annotated[str, typer.Argument(metavar="RESERVATION", help="As reserve printed it: census-2030#17.")]


@with_options
def spend(accounts: Accounts = None, *, asked: Asked, at: At, key: Key = None, note: Note = "") -> None:
    """Charge one account, or several, all or nothing. Charge first, then run the mechanism.

    odograph spend census-2030 --pure 0.05 --key q-17
    """
    costs = asked.costs(accounts or ())
    with at.ledger() as ledger:
        receipt = ledger.spend(costs, key=key, note=note)
        say(receipt.to_dict(), "\n".join([str(receipt), *_spent(ledger, costs)]), as_json=at.json)


@with_options
def reserve(  # noqa: PLR0913  each is one option
    accounts: Accounts = None,
    *,
    asked: Asked,
    at: At,
    expires: Annotated[float | None, typer.Option(metavar="SECONDS", help="For how long it can be voided.")] = None,
    key: Key = None,
    note: Note = "",
) -> None:
    """Charge now, and commit or void later. It stays charged until it is voided."""
    costs = asked.costs(accounts or ())
    with at.ledger() as ledger:
        reservation = ledger.reserve(costs, key=key, expires=expires, note=note)
        until = "" if reservation.expires is None else f", before {reservation.expires:%Y-%m-%d %H:%M:%S} UTC"
        lines = [
            str(reservation.receipt),
            *_spent(ledger, costs),
            f"when the mechanism has run:   odograph commit {reservation.id}",
            f"if it was not run{until}: odograph void {reservation.id} --reason WHY",
        ]
        say(reservation.receipt.to_dict(), "\n".join(lines), as_json=at.json)


@with_options
def commit(reservation: ReservationId, *, at: At, note: Note = "") -> None:
    """Say that a reservation's mechanism was run, or may have been; works after it expired, and again."""
    with at.ledger() as ledger:
        _resolved(ledger, ledger.commit(reservation, note=note), at)


@with_options
def void(
    reservation: ReservationId,
    *,
    at: At,
    reason: Annotated[str, typer.Option(help="Why the mechanism was not run.", show_default=False)],
) -> None:
    """Take a reservation back: its mechanism was not run. Not after it was committed or has expired."""
    with at.ledger() as ledger:
        _resolved(ledger, ledger.void(reservation, reason), at)


@with_options
def decide(accounts: Accounts = None, *, asked: Asked, at: At) -> None:
    """Say whether a cost would be admitted, and what would fit instead; spend nothing. A refusal exits with 3."""
    costs = asked.costs(accounts or ())
    with at.ledger() as ledger:
        decision = ledger.decide(costs)
    several = decision.admitted and len(costs) > 1
    text = f"admitted: {', '.join(f'{cost} of {name}' for name, cost in costs.items())}" if several else str(decision)
    say(decision.to_dict(), text, as_json=at.json)
    if not decision.admitted:
        raise typer.Exit(_REFUSED)


@with_options
def largest(  # noqa: PLR0913  each is one option
    account: Annotated[str, typer.Argument(autocompletion=account_names)],
    *,
    at: At,
    kind: Annotated[str, typer.Option(help=f"Of which kind: {', '.join(SIZED)}.")] = "pure",
    delta: Annotated[str | None, typer.Option(help="The delta of each request, for approx, prob and zcdp.")] = None,
    json_cost: Annotated[
        str | None, typer.Option(metavar="JSON", help="Like this guarantee, as its to_dict() writes it.")
    ] = None,
    times: Annotated[int, typer.Option(help="How many equal requests are to fit.")] = 1,
) -> None:
    """Print the largest request that would be admitted, or the largest of which several would be."""
    like = _like(kind, delta) if json_cost is None else from_json(json_cost)
    with at.ledger() as ledger:
        found = ledger.account(account).largest(like, times)
    text = "none: no request of this kind fits any more" if found is None else str(found)
    form = {"account": account, "times": times, "largest": None if found is None else found.to_dict()}
    say(form, text, as_json=at.json)


def _like(kind: str, delta: str | None) -> type[Guarantee] | Guarantee:
    if kind not in SIZED:
        raise InvalidPolicy(f"there is no kind {kind!r}; there are {', '.join(SIZED)}")
    if delta is None:
        return SIZED[kind]
    if kind not in _WITH_DELTA:
        raise InvalidGuarantee(f"--delta goes with {', '.join(_WITH_DELTA)}, not with {kind}")
    return _WITH_DELTA[kind](1, delta)


def _resolved(ledger: Ledger, receipt: Receipt, at: At) -> None:
    accounts = [line.account for line in receipt.lines]
    say(receipt.to_dict(), "\n".join([str(receipt), *_spent(ledger, accounts)]), as_json=at.json)


def _spent(ledger: Ledger, accounts: Iterable[str]) -> list[str]:
    lines = []
    for name in accounts:
        account = ledger.account(name)
        totals = account.totals
        part, steps = used(account.compiled, totals), totals.steps
        lines.append(f"{name}: {part:.1%} of the budget spent in {steps} step{'s' * (steps != 1)}")
    return lines
