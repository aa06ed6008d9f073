"""Accounts and their charges: open, show, accounts, close; spend, reserve, commit, void; and what would fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Final

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from odograph.account import spent_text
from odograph.cli.options import (
    CostOptions,
    Key,
    LedgerOptions,
    Note,
    account_names,
    guarantee_from_json,
    print_result,
    progress,
    with_options,
)
from odograph.compile import compile_policy
from odograph.core.filters import FILTERS
from odograph.core.guarantees import SIZED, Guarantee, guarantee_from_dict
from odograph.core.mechanisms import NOISES
from odograph.core.planning import used
from odograph.core.policy import Policy
from odograph.errors import AccountExists, InvalidArgument
from odograph.ledger.ledger import Ledger, LedgerAccount
from odograph.ledger.results import Receipt

__all__ = [
    "accounts",
    "calibrate",
    "close",
    "commit",
    "decide",
    "how_many",
    "largest",
    "open_",
    "reserve",
    "show",
    "spend",
    "void",
]

_REFUSED_EXIT_CODE: Final = 3

Account = Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)]
Accounts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ACCOUNT", help="The accounts to charge, each with the same cost.", autocompletion=account_names
    ),
]
ReservationId = Annotated[
    str, typer.Argument(metavar="RESERVATION", help="The id that `reserve` printed, such as census-2030#17.")
]


@with_options
def open_(  # noqa: PLR0913  each is one choice, which cannot be changed later
    name: Annotated[str, typer.Argument(help="The new account's name.")],
    *,
    options: LedgerOptions,
    epsilon: Annotated[
        str | None,
        typer.Option(help="Epsilon of the promise, read exactly as typed; none for no limit, only readings."),
    ] = None,
    delta: Annotated[
        str | None, typer.Option(help="Delta of the promise, read exactly as typed; 0 by default for --rho and --mu.")
    ] = None,
    rho: Annotated[str | None, typer.Option(help="Promise rho-zCDP instead of an epsilon.")] = None,
    mu: Annotated[str | None, typer.Option(help="Promise mu-GDP instead of an epsilon.")] = None,
    reserve: Annotated[
        str | None,
        typer.Option(help="What the default filter favors: mixed (every kind of step), pure, or training."),
    ] = None,
    filter_: Annotated[
        str | None,
        typer.Option(
            "--filter",
            help=f"Instead of the default, which takes every kind of step: one of {', '.join(sorted(FILTERS))}, or"
            " shares of delta, such as smooth=0.9,zcdp=0.1.",
        ),
    ] = None,
    delta_steps: Annotated[
        str | None, typer.Option(help="The part of delta reserved for the deltas of the steps.")
    ] = None,
    odometer: Annotated[
        str | None,
        typer.Option(help="The odometer that is read, instead of the default: filter, lines, mixture or stitched."),
    ] = None,
    slack: Annotated[
        str | None,
        typer.Option(help="What readings add to the loss, so that they cover steps with a delta (Theorem 6)."),
    ] = None,
    privacy_unit: Annotated[str, typer.Option(help="Whom or what the promise protects.")] = "person",
    neighbors: Annotated[str, typer.Option(help="Neighboring relation: add-remove or replace-one.")] = "add-remove",
    parent: Annotated[
        str,
        typer.Option(
            metavar="ACCOUNT", help="Parent account: every charge is also made to it.", autocompletion=account_names
        ),
    ] = "",
    successor_of: Annotated[
        str,
        typer.Option(
            metavar="ACCOUNT",
            help="The account that this one replaces, with a new policy.",
            autocompletion=account_names,
        ),
    ] = "",
    dataset: Annotated[
        str, typer.Option(help="The dataset of which the account is a block, such as a day or a region.")
    ] = "",
    key: Key = None,
    note: Note = "",
) -> None:
    """Open an account with a policy: a promise, and the filter that keeps it. Neither can be changed later.

    odograph open census-2030 --epsilon 1 --delta 1e-6
    """
    policy = Policy(
        ... if epsilon is None else None if epsilon.casefold() == "none" else epsilon,
        delta,
        rho=rho,
        mu=mu,
        delta_steps=delta_steps,
        filter=None if filter_ is None else _parse_filter(filter_),
        reserve=reserve,
        odometer=odometer,
        slack=slack,
        privacy_unit=privacy_unit,
        neighbors=neighbors,
    )
    with progress("solving the exact filter", quiet=options.json) as report:
        compiled = compile_policy(policy, progress=report)
    with options.ledger() as ledger:
        try:
            account = ledger.open_account(
                name, compiled, parent=parent, successor_of=successor_of, dataset=dataset, key=key, note=note
            )
        except AccountExists as problem:  # the library's own message advises in Python
            raise AccountExists(
                f"the account {name!r} exists already: see odograph show {name}. For a new policy, open an account"
                f" with another name and --successor-of {name}"
            ) from problem
        lifetime = account.lifetime
        lines = [f"opened {name} in {ledger.url}: {policy.promise}, by the filter {policy.filter_text}"]
        lines += [f"lifetime promise {lifetime}"] if lifetime else []
        print_result(account.describe() | {"url": ledger.url}, "\n".join(lines), as_json=options.json)


@with_options
def show(account: Account, *, options: LedgerOptions) -> None:
    """Show an account: its promise, what is spent and left, its odometer reading, and the largest next charges."""
    with options.ledger() as ledger:
        own = ledger.account(account)
        form = own.describe() | {"url": ledger.url}
        print_result(form, _account_table(own, form), as_json=options.json)


@with_options
def accounts(*, options: LedgerOptions) -> None:
    """List the accounts of a ledger."""
    table = Table("account", "promise", "filter", "spent", "steps", "below", "", box=None, header_style="bold")
    rows = []
    with options.ledger() as ledger:
        for account in ledger.accounts():
            policy, totals, parent = account.policy, account.totals, account.parent
            part = "" if policy.is_unlimited else f"{used(account.compiled, totals):.1%}"
            above, closed = "" if parent is None else parent.name, "closed" if account.closed else ""
            kept_by, steps = policy.filter_text, totals.steps
            table.add_row(account.name, policy.target, kept_by, part, str(steps), above, closed)
            rows.append(account.summary())
        print_result({"url": ledger.url, "accounts": rows}, table, as_json=options.json)


@with_options
def close(account: Account, *, options: LedgerOptions, note: Note = "") -> None:
    """Close an account and all accounts below it permanently. Pending reservations can still be resolved."""
    with options.ledger() as ledger:
        own = ledger.account(account)
        before = own.closed
        own.close(note=note)
        text = f"{account} was closed before" if before else f"closed {account} and every account below it"
        print_result({"account": account, "closed": True, "closed_before": before}, text, as_json=options.json)


def _parse_filter(text: str) -> str | list[tuple[str, str]]:
    """Parse the name of a filter, or shares of delta by name."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return [(name.strip(), share.strip()) for name, _, share in pairs]


def _account_table(account: LedgerAccount, form: dict[str, Any]) -> Table:
    policy, summary = account.policy, form["account"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("account", account.name + (" (closed)" if summary["closed"] else ""))
    grid.add_row("ledger", form["url"])
    grid.add_row("promise", summary["promise"]["text"])
    grid.add_row("filter", policy.filter_text + (f"; {form['source']}" if form["source"] else ""))
    if account.certification.warning:
        grid.add_row("warning", account.certification.warning)
    for word in ("parent", "dataset"):
        if summary[word]:
            grid.add_row(word, summary[word])
    if form["children"]:
        grid.add_row("children", ", ".join(form["children"]))
    if account.lifetime:
        grid.add_row("lifetime promise", str(account.lifetime))
    steps = f"{summary['steps']} step{'s' * (summary['steps'] != 1)}"
    if policy.is_unlimited:
        grid.add_row("spent", f"{steps}; no budget is fixed")
    else:
        grid.add_row("spent", f"{summary['spent']:.1%} of the budget in {steps}")
        grid.add_row("", ProgressBar(total=1.0, completed=summary["spent"], width=40))
    for name, meter in form["meters"].items():
        if name != "delta" or policy.delta_steps:
            grid.add_row("", f"{name}: {meter['spent']:.6g} spent, {meter['left']:.6g} left")
    grid.add_row("reading", str(account.reading()))
    fits = ", ".join(str(guarantee_from_dict(offer)) for offer in form["largest"]) or (
        "any: no limit is fixed here"
        if policy.is_unlimited and not summary["parent"]
        else "none: no request is admitted"
    )
    grid.add_row("largest next", "none: the account is closed" if summary["closed"] else fits)
    for reservation in account.pending:
        until = "" if reservation.expires is None else f", voidable until {reservation.expires:%Y-%m-%d %H:%M:%S} UTC"
        costs = ", ".join(f"{line.cost} of {line.account}" for line in reservation.receipt.lines)
        grid.add_row("pending", f"{reservation.id}: {costs}{until}")
    grid.add_row("entries", str(summary["sequence"] + 1))
    return grid


@with_options
def spend(
    accounts: Accounts = None, *, asked: CostOptions, options: LedgerOptions, key: Key = None, note: Note = ""
) -> None:
    """Charge one account, or several together or not at all. Charge first, then run the mechanism.

    odograph spend census-2030 --pure 0.05 --key q-17
    """
    costs = asked.costs(accounts or ())
    with options.ledger() as ledger:
        receipt = ledger.spend(costs, key=key, note=note)
        print_result(receipt.to_dict(), "\n".join([str(receipt), *_spent_lines(ledger, costs)]), as_json=options.json)


@with_options
def reserve(  # noqa: PLR0913  each is one option
    accounts: Accounts = None,
    *,
    asked: CostOptions,
    options: LedgerOptions,
    expires: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long the reservation can be voided; by default without limit."),
    ] = None,
    key: Key = None,
    note: Note = "",
) -> None:
    """Charge now, and commit or void later. The charge stands until it is voided."""
    costs = asked.costs(accounts or ())
    with options.ledger() as ledger:
        reservation = ledger.reserve(costs, key=key, expires=expires, note=note)
        until = "" if reservation.expires is None else f", before {reservation.expires:%Y-%m-%d %H:%M:%S} UTC"
        lines = [
            str(reservation.receipt),
            *_spent_lines(ledger, costs),
            f"after running the mechanism: odograph commit {reservation.id}",
            f"if it was not run{until}: odograph void {reservation.id} --reason WHY",
        ]
        print_result(reservation.receipt.to_dict(), "\n".join(lines), as_json=options.json)


@with_options
def commit(reservation: ReservationId, *, options: LedgerOptions, note: Note = "") -> None:
    """Commit a reservation: its mechanism was run, or may have been. Can be repeated, and works after expiry."""
    with options.ledger() as ledger:
        _print_resolution(ledger, ledger.commit(reservation, note=note), options)


@with_options
def void(
    reservation: ReservationId,
    *,
    options: LedgerOptions,
    reason: Annotated[str, typer.Option(help="Why the mechanism was not run.", show_default=False)],
) -> None:
    """Void a reservation whose mechanism was not run. Impossible after it was committed or has expired."""
    with options.ledger() as ledger:
        _print_resolution(ledger, ledger.void(reservation, reason), options)


@with_options
def decide(accounts: Accounts = None, *, asked: CostOptions, options: LedgerOptions) -> None:
    """Check whether a cost would be admitted, and if not, what would, without charging. A refusal exits with 3."""
    costs = asked.costs(accounts or ())
    with options.ledger() as ledger:
        decision = ledger.decide(costs)
    several = decision.admitted and len(costs) > 1
    each = f"admitted: {', '.join(f'{cost} of {name}' for name, cost in costs.items())}"
    text = "; ".join([each, *decision.notes]) if several else str(decision)
    print_result(decision.to_dict(), text, as_json=options.json)
    if not decision.admitted:
        raise typer.Exit(_REFUSED_EXIT_CODE)


@with_options
def largest(  # noqa: PLR0913  each is one option
    account: Annotated[str, typer.Argument(autocompletion=account_names)],
    *,
    options: LedgerOptions,
    kind: Annotated[str, typer.Option(help=f"Kind of guarantee: {', '.join(SIZED)}.")] = "pure",
    delta: Annotated[str | None, typer.Option(help="Delta of each request, for approx, prob and zcdp.")] = None,
    json_cost: Annotated[
        str | None, typer.Option(metavar="JSON", help="A guarantee of the wanted form, as its to_dict() writes it.")
    ] = None,
    times: Annotated[int, typer.Option(help="The number of equal requests that must fit.")] = 1,
) -> None:
    """Print the largest request that would be admitted, or the largest that would be admitted several times."""
    like = _like(kind, delta) if json_cost is None else guarantee_from_json(json_cost)
    with options.ledger() as ledger:
        found = ledger.account(account).largest(like, times)
    text = "none: no request of this kind is admitted" if found is None else str(found)
    form = {"account": account, "times": times, "largest": None if found is None else found.to_dict()}
    print_result(form, text, as_json=options.json)


@with_options
def calibrate(  # noqa: PLR0913  each is one option
    account: Account,
    mechanism: Annotated[str, typer.Argument(help=f"One of {', '.join(NOISES)}.")],
    *,
    options: LedgerOptions,
    sensitivity: Annotated[
        str | None, typer.Option(help="How far one privacy unit moves the query; by default 1.")
    ] = None,
    dimension: Annotated[
        str | None, typer.Option(help="Coordinates of discrete_gaussian's query; by default 1.")
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Grid of discrete_gaussian's values; by default 1.")] = None,
    categories: Annotated[str | None, typer.Option(help="Answers of randomized_response; by default 2.")] = None,
    sampling_rate: Annotated[str | None, typer.Option(help="Rate of subsampled_gaussian.")] = None,
    steps: Annotated[str | None, typer.Option(help="Steps of each subsampled_gaussian; by default 1.")] = None,
    times: Annotated[int, typer.Option(help="The number of equal requests that must fit.")] = 1,
) -> None:
    """Print the least noise with which a mechanism would be admitted, once or several times.

    odograph calibrate census-2030 laplace --sensitivity 3 --times 20
    """
    if mechanism not in NOISES:
        raise InvalidArgument(f"MECHANISM must be one of {', '.join(NOISES)} (got {mechanism!r})")
    given = {
        "sensitivity": sensitivity,
        "dimension": dimension,
        "grid": grid,
        "categories": categories,
        "sampling_rate": sampling_rate,
        "steps": steps,
    }
    settings = {name: text for name, text in given.items() if text is not None}
    with options.ledger() as ledger:
        found = ledger.account(account).calibrate(NOISES[mechanism].mechanism, times=times, **settings)
    text = "none: no amount of noise is admitted" if found is None else str(found)
    form = {"account": account, "calibration": None if found is None else found.to_dict()}
    print_result(form, text, as_json=options.json)


@with_options
def how_many(account: Account, *, asked: CostOptions, options: LedgerOptions) -> None:
    """Print how many requests of one cost would be admitted in a row, without charging.

    odograph how-many census-2030 --pure 0.05
    """
    cost = asked.guarantee()
    with options.ledger() as ledger:
        count = ledger.account(account).how_many(cost)
    print_result({"account": account, "how_many": count}, str(count), as_json=options.json)


def _like(kind: str, delta: str | None) -> type[Guarantee] | Guarantee:
    if kind not in SIZED:
        raise InvalidArgument(f"--kind must be one of {', '.join(SIZED)} (got {kind!r})")
    if delta is None:
        return SIZED[kind]
    with_delta = [name for name, cls in SIZED.items() if "delta" in cls.__match_args__]
    if kind not in with_delta:
        raise InvalidArgument(f"--delta is for the kinds {', '.join(with_delta)} only (got {kind})")
    return replace(SIZED[kind].with_size(1), delta=delta)


def _print_resolution(ledger: Ledger, receipt: Receipt, options: LedgerOptions) -> None:
    accounts = [line.account for line in receipt.lines]
    print_result(receipt.to_dict(), "\n".join([str(receipt), *_spent_lines(ledger, accounts)]), as_json=options.json)


def _spent_lines(ledger: Ledger, accounts: Iterable[str]) -> list[str]:
    lines = []
    for name in accounts:
        account = ledger.account(name)
        lines.append(f"{name}: {spent_text(account.compiled, account.totals, ' of the budget')}")
    return lines
