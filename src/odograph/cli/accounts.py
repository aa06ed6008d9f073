"""Accounts and their charges: open, show, accounts, close; spend, reserve, commit, void; and what would fit.

`apply` opens the accounts that a file declares, `renew` those of current epochs, and `declare` writes such a file.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from odograph.account import caution_of_delta, spent_text
from odograph.cli.options import (
    CostOptions,
    Key,
    LedgerOptions,
    Note,
    account_names,
    guarantee_from_json,
    new_file,
    print_result,
    progress,
    with_options,
)
from odograph.compile import compile_policy
from odograph.core.filters import FILTERS, Filter
from odograph.core.filters.smooth import RESERVES
from odograph.core.fixed_point import brief_above, brief_below, exact_of, text_of
from odograph.core.guarantees import SIZED, Guarantee, guarantee_from_dict
from odograph.core.mechanisms import NOISES
from odograph.core.odometers import ODOMETER_NAMES, odometer_from_dict
from odograph.core.planning import used
from odograph.core.policy import Compiled, Policy
from odograph.errors import AccountExists, InvalidArgument, InvalidPolicy, LedgerNotFound, OdographError, load_extra
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import check_name, check_note
from odograph.ledger.epochs import EVERY, Renewal, RenewalStep, accounts_of, next_step, scheduled
from odograph.ledger.ledger import Ledger, LedgerAccount
from odograph.ledger.results import Receipt
from odograph.ledger.stores.base import Balance

__all__ = [
    "Declared",
    "Difference",
    "accounts",
    "apply",
    "calibrate",
    "close",
    "commit",
    "decide",
    "declare",
    "declared_form",
    "how_many",
    "largest",
    "open_",
    "read_accounts",
    "read_document",
    "renew",
    "reserve",
    "show",
    "spend",
    "void",
    "yaml_of",
]

_REFUSED_EXIT_CODE: Final = 3
_DIFFERS_EXIT_CODE: Final = 5

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
        typer.Option(help="What readings add to the loss, so that they cover steps with a delta."),
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
    _warn_of_large_delta(policy)
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


def _warn_of_large_delta(policy: Policy) -> None:
    if text := caution_of_delta(policy.delta):
        typer.echo(f"odograph: warning: {text}", err=True)


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
            left = f"{brief_below(meter['left'])} left" if meter["counts"] else "no longer counts"
            grid.add_row("", f"{name}: {brief_above(meter['spent'])} spent, {left}")
    grid.add_row("reading", str(account.reading()))
    offers = [guarantee_from_dict(offer).brief(offered=True) for offer in form["largest"]]
    fits = ", ".join(offers) or (
        "any: no limit is fixed here"
        if policy.is_unlimited and not summary["parent"]
        else "none: no request is admitted"
    )
    grid.add_row("largest next", "none: the account is closed" if summary["closed"] else fits)
    for reservation in account.pending:
        until = "" if reservation.expires is None else f", voidable until {reservation.expires:%Y-%m-%d %H:%M:%S} UTC"
        grid.add_row("pending", f"{reservation.id}: {reservation.receipt.costs}{until}")
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
    each = f"admitted: {', '.join(f'{cost.brief()} of {name}' for name, cost in costs.items())}"
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
    text = "none: no request of this kind is admitted" if found is None else found.brief(offered=True)
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


# Accounts declared in a file. Every scalar is kept as it was typed, so numbers are read exactly and an account may be
# called `no` or `2030`; each field knows what it wants to be.

_Path: TypeAlias = tuple[str, ...]  # the names of the fields that lead to a value
_FORM: Final = 1  # of a file
_YAML_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]*( [A-Za-z0-9._/@+-]+)*")  # needs no quotes in YAML
_NOT_TEXT: Final = frozenset({"false", "n", "no", "null", "off", "on", "true", "y", "yes"})  # as YAML reads it
_SIZES: Final = ("epsilon", "rho", "mu")  # of a promise: one of them
_PROMISED: Final = (*_SIZES, "delta", "privacy_unit", "neighbors")
_CHOICES: Final = ("delta_steps", "filter", "reserve", "odometer", "slack")
_RELATIVES: Final = ("parent", "successor_of")
_SCHEDULE: Final = ("renew", "from", "times", "until")  # of a budget that renews
_FIELDS: Final = (*_PROMISED, *_CHOICES, *_RELATIVES, "dataset", "note", "closed", *_SCHEDULE)
_TRUTH: Final[dict[object, bool]] = {"true": True, "false": False}
_SHOWN: Final = 80  # characters of a value in a message


class _Bare(str):
    """A scalar without quotes, as it was typed: a number or a truth value where a field wants one."""

    __slots__ = ()


class _Document(NamedTuple):
    """A file that was parsed, and where its fields are."""

    file: str
    content: Any
    lines: dict[_Path, int]  # none are known of JSON

    def error(self, path: _Path, problem: str) -> InvalidArgument:
        """Return the error for a field, with the file and the nearest line that is known."""
        known = next((path[:end] for end in range(len(path), -1, -1) if path[:end] in self.lines), None)
        line = "" if known is None else f", line {self.lines[known]}"
        return InvalidArgument(f"{self.file}{line}: {'.'.join(path) or 'the file'} {problem}. Nothing was opened")


class Declared(NamedTuple):
    """An account, or a budget that renews, as a file declares it.

    `given` are the arguments of its policy that the file names.
    """

    name: str
    policy: Policy
    given: Mapping[str, Any]
    parent: str = ""
    successor_of: str = ""
    dataset: str = ""
    note: str = ""
    closed: bool = False
    renewal: Renewal | None = None  # it has an account for each epoch, and none of its own name


class Difference(NamedTuple):
    """A field of which a file says something else than the ledger, and what to do about it."""

    account: str
    field: str
    ledger: str
    file: str
    advice: str

    def __str__(self) -> str:
        return f"{self.account}: {self.field}: the ledger has {self.ledger}, the file says {self.file}. {self.advice}"


class _Plan(NamedTuple):
    """What applying a file does, in this order, or why it does nothing."""

    opens: list[Declared]
    closes: list[str]
    same: list[str]
    differences: list[Difference]
    not_in_file: list[str]
    renews: list[tuple[Declared, Renewal]]


@with_options
def apply(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="YAML or JSON with the accounts, as `odograph declare` writes it; - for standard input.",
        ),
    ],
    *,
    options: LedgerOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
) -> None:
    """Open the accounts that a file declares and the ledger does not have. Running it again changes nothing.

    A promise never changes: a file that would change one does nothing, says what to do, and exits with 5.

    odograph apply accounts.yaml --dry-run
    """
    declared = read_accounts(file)
    with options.ledger() as ledger:
        plan = _plan(ledger, declared)
        renewed: list[dict[str, Any]] = []
        if not plan.differences:
            for line in _carry_out(ledger, plan, options, renewed, dry_run=dry_run):
                if not options.json:
                    typer.echo(line)
        form = {
            "url": ledger.url,
            "dry_run": dry_run,
            "opened": [] if plan.differences else [one.name for one in plan.opens],
            "closed": [] if plan.differences else plan.closes,
            "same": plan.same,
            "differences": [one._asdict() for one in plan.differences],
            "not_in_file": plan.not_in_file,
            "renewed": [] if plan.differences else renewed,
        }
        print_result(form, "\n".join(_summary(plan, ledger.url, dry_run=dry_run)), as_json=options.json)
    if plan.differences:
        raise typer.Exit(_DIFFERS_EXIT_CODE)


@with_options
def renew(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The file that `odograph apply` reads; - for standard input."),
    ],
    *,
    options: LedgerOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
) -> None:
    """Open the accounts of the current epochs, for the budgets of a file that renew, and close those before them.

    Run it from cron or a systemd timer: it can be repeated, and by several machines. Epochs in which it did not run \
get no account afterwards.

    odograph renew accounts.yaml
    """
    declared = [one for one in read_accounts(file) if one.renewal is not None]
    if not declared:
        raise InvalidArgument(f"{file} must have an account with `renew`, such as `renew: monthly` (got none)")
    with options.ledger() as ledger:
        plan = _plan(ledger, declared)
        renewed: list[dict[str, Any]] = []
        if not plan.differences:
            for line in _carry_out(ledger, plan, options, renewed, dry_run=dry_run):
                if not options.json:
                    typer.echo(line)
        differences = [one._asdict() for one in plan.differences]
        form = {"url": ledger.url, "dry_run": dry_run, "renewed": renewed, "differences": differences}
        lines = [*map(str, plan.differences)]
        lines += [f"nothing was done in {ledger.url}" + ": this was a dry run" * dry_run] if dry_run or lines else []
        if options.json or lines:
            print_result(form, "\n".join(lines), as_json=options.json)
    if plan.differences:
        raise typer.Exit(_DIFFERS_EXIT_CODE)


@with_options
def declare(
    *,
    options: LedgerOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this new file; by default to standard output.")
    ] = None,
) -> None:
    """Write the accounts of a ledger as a file that `odograph apply` reads: promises and relations, no charges.

    odograph declare --out accounts.yaml
    """
    with options.ledger() as ledger:
        form = {"form": _FORM, "accounts": _declared_forms(ledger)}
    if out is None:
        print_result(form, yaml_of(form).removesuffix("\n"), as_json=options.json)
        return
    with new_file(out) as written:
        written.write(yaml_of(form) if out.suffix != ".json" else json.dumps(form, indent=1) + "\n")
    count = len(form["accounts"])  # type: ignore[arg-type]
    text = f"wrote {out}: {count} account{'s' * (count != 1)}; `odograph apply {out}` finds nothing to do"
    print_result(form | {"file": str(out)}, text, as_json=options.json)


def read_document(file: Path) -> dict[str, Any]:
    """Read a file in YAML or JSON that has named fields."""
    content = _typed(_parse(file).content)
    if not isinstance(content, dict):
        raise InvalidArgument(f"{file} must have named fields (got {_brief(content)})")
    return content


def read_accounts(file: Path) -> list[Declared]:
    """Read the accounts of a file; what is wrong with it is raised with its line and field."""
    document = _parse(file)
    content = document.content
    if not isinstance(content, dict) or not isinstance(content.get("accounts"), dict):
        raise document.error((), "must have a field `accounts`: the name of each account, with its promise below it")
    for field in content:
        if field not in {"form", "accounts"}:
            raise document.error((field,), "is not a field of this file; it has `form` and `accounts`")
    if content.get("form", _FORM) not in {_FORM, str(_FORM)}:
        raise document.error(("form",), f"must be {_FORM} (got {content['form']!r}); upgrade Odograph to read others")
    found = {name: _declared(document, name, form) for name, form in content["accounts"].items()}
    for one in found.values():
        for name in accounts_of(one.name, found) if one.renewal is not None else ():
            raise document.error(("accounts", name), f"has a name that the schedule of {one.name!r} gives")
        if not one.closed and one.parent in found and found[one.parent].closed:
            raise document.error(
                ("accounts", one.name, "parent"),
                f"must be an open account (got {one.parent!r}, which the file closes with everything below it)",
            )
    return _in_order(document, found)


def _in_order(document: _Document, found: dict[str, Declared]) -> list[Declared]:
    """Return the accounts so that each comes after those it refers to; raise if some refer to each other."""
    ordered: dict[str, Declared] = {}
    while len(ordered) < len(found):
        ready = [
            one
            for one in found.values()
            if one.name not in ordered and all(name not in found or name in ordered for name in _relatives(one))
        ]
        if not ready:
            names = [name for name in found if name not in ordered]
            raise document.error(
                ("accounts", names[0]), f"must not refer to itself through its relatives (see {', '.join(names)})"
            )
        ordered |= {one.name: one for one in ready}
    return [*ordered.values()]


def _relatives(one: Declared) -> list[str]:
    return [*filter(None, (one.parent, one.successor_of))]


def _declared(document: _Document, name: str, form: object) -> Declared:
    path = ("accounts", name)
    if not isinstance(form, dict):
        raise document.error(path, f"must have fields, such as epsilon and delta (got {_brief(form)})")
    for field in form:
        if field not in _FIELDS:
            raise document.error((*path, field), f"is not a field of an account; it has {', '.join(_FIELDS)}")
    sizes = [field for field in _SIZES if form.get(field) is not None]
    if len(sizes) != 1:
        raise document.error(path, f"must have one of {', '.join(_SIZES)} (got {' and '.join(sizes) or 'none'})")
    if sizes == ["epsilon"] and form.get("delta") is None:
        raise document.error(path, "must have delta")
    texts = {field: form.get(field) or "" for field in (*_RELATIVES, "dataset", "note")}
    try:
        check_name(name)
        for field in (*_RELATIVES, "dataset"):
            if texts[field] != "":
                check_name(texts[field], field)
        check_note(texts["note"])
        given = {
            field: _choice(field, form[field]) for field in (*_PROMISED, *_CHOICES) if form.get(field) is not None
        }
        policy = Policy(**given)
    except (InvalidArgument, TypeError, ValueError, ZeroDivisionError) as problem:
        said = str(problem) if isinstance(problem, OdographError) else "a value has the wrong form"
        wrong = next((field for field in form if re.search(rf"\b{field}\b", said)), None)
        raise document.error(path if wrong is None else (*path, wrong), f"cannot be read: {said}") from problem
    closed = _typed(form.get("closed")) or False
    if not isinstance(closed, bool):
        raise document.error((*path, "closed"), f"must be true or false (got {_brief(closed)})")
    return Declared(name, policy, given, **texts, closed=closed, renewal=_renewal_of(document, name, form))


def _renewal_of(document: _Document, name: str, form: Mapping[str, Any]) -> Renewal | None:
    """Return the schedule of a budget that renews; None of an account that does not."""
    path = ("accounts", name)
    values = {field: form.get(field) for field in _SCHEDULE}
    if values["renew"] is None:
        for field in _SCHEDULE:
            if field in form:
                raise document.error((*path, field), f"needs renew: {', '.join(EVERY[:-1])} or {EVERY[-1]}")
        return None
    for field in ("successor_of", "closed"):
        if form.get(field) is not None:
            raise document.error(
                (*path, field), "cannot be given with renew: the schedule opens, links and closes its accounts"
            )
    try:
        renewal = Renewal(name, scheduled(values["renew"], values["from"], values["times"], values["until"]))
        renewal.name_of(next(renewal.schedule.epochs()))
    except InvalidArgument as problem:
        wrong = str(problem).split(maxsplit=1)[0]
        raise document.error((*path, wrong) if wrong in form else path, f"cannot be read: {problem}") from problem
    return renewal


def _choice(field: str, value: Any) -> Any:  # noqa: ANN401  as a policy takes it
    """Return the value of a field as an argument of a policy."""
    if field == "filter" and isinstance(value, str):
        return _parse_filter(value)
    if field == "filter":
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise InvalidPolicy(
                f"filter must be a name, shares, or a list of filters with a kind (got {_brief(value)})"
            )
        return [(_filter_of(one), one.get("share", 1)) for one in _typed(value)]
    if field == "odometer" and isinstance(value, dict):
        return odometer_from_dict(_typed(value))
    if not isinstance(value, str):
        raise InvalidPolicy(f"{field} must be one value (got {_brief(value)})")
    return None if field == "epsilon" and value == "none" else value


def _filter_of(form: Mapping[str, Any]) -> Filter:
    """Return a filter with the options that are named."""
    kind = FILTERS.get(str(form.get("kind")))
    if kind is None:
        raise InvalidPolicy(f"filter must be of a kind of {', '.join(sorted(FILTERS))} (got {form.get('kind')!r})")
    options = {name: value for name, value in form.items() if name not in {"kind", "share"}}
    if set(options) - set(kind.options):
        raise InvalidPolicy(f"filter {kind.kind!r} has the options {[*kind.options]} (got {sorted(options)})")
    return kind(**{name: kind.options[name](value) for name, value in options.items()})


def _typed(value: Any) -> Any:  # noqa: ANN401  any part of a document
    """Return a part of a document with its truth values, and its numbers where a number holds them exactly."""
    if isinstance(value, dict):
        return {name: _typed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_typed(one) for one in value]
    if not isinstance(value, _Bare) or value in _TRUTH:
        return _TRUTH[value] if isinstance(value, _Bare) else value
    try:
        exact = Fraction(value)
        near = float(exact)
    except (OverflowError, ValueError, ZeroDivisionError):
        return value
    return int(exact) if re.fullmatch("-?[0-9]+", value) else near if exact_of(near) == exact else value


def _brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# Parsing: YAML as nodes, which know their lines and build no objects; JSON by the standard library.


def _parse(file: Path) -> _Document:
    name = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise InvalidArgument(f"{name} must be text in UTF-8 (byte {problem.start} is not)") from problem
    try:
        if file.suffix == ".json" or text.lstrip()[:1] == "{":
            return _Document(name, _parse_json(name, text), {})
        return _parse_yaml(name, text)
    except RecursionError:
        raise InvalidArgument(f"{name} is nested too deeply") from None


def _parse_json(name: str, text: str) -> Any:  # noqa: ANN401  any document
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise InvalidArgument(f"{name}: {twice} must be there once (got it twice). Nothing was opened")
        return found

    try:
        return json.loads(text, parse_float=_Bare, parse_int=_Bare, parse_constant=_Bare, object_pairs_hook=unique)
    except json.JSONDecodeError as problem:
        raise InvalidArgument(
            f"{name}, line {problem.lineno}, column {problem.colno}: this is not JSON ({problem.msg})"
        ) from problem


def _parse_yaml(name: str, text: str) -> _Document:
    yaml = load_extra("yaml")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        reason = getattr(problem, "problem", None) or getattr(problem, "reason", None) or "it cannot be read"
        raise InvalidArgument(f"{name}{where}: this is not YAML ({reason})") from problem
    document = _Document(name, None, {})
    return document if root is None else document._replace(content=_content(document, root, (), set()))


def _content(document: _Document, node: Any, path: _Path, seen: set[int]) -> Any:  # noqa: ANN401  a node of PyYAML
    """Return a node's content in plain types, and remember its line."""
    document.lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in seen:
        raise document.error(path, "must be written out: aliases (*name) are not read here")
    seen.add(id(node))
    if not node.tag.startswith(_YAML_TAG):
        raise document.error(path, f"must be plain: the tag {node.tag} is not read here")
    if node.id == "scalar":
        plain = _Bare(node.value) if node.style is None else str(node.value)
        return None if node.tag == f"{_YAML_TAG}null" else plain
    if node.id == "sequence":
        return [_content(document, one, (*path, str(place)), seen) for place, one in enumerate(node.value)]
    found: dict[str, Any] = {}
    for key, value in node.value:
        inner = (*path, str(key.value))
        document.lines[inner] = key.start_mark.line + 1
        if key.id != "scalar" or key.value in found:
            raise document.error(inner, "must be there once" if key.id == "scalar" else "must have a name before it")
        found[key.value] = _content(document, value, inner, seen)
    return found


# Comparing and applying.


def _plan(ledger: Ledger, declared: list[Declared]) -> _Plan:
    """Compare what is declared with what the ledger has."""
    try:
        there = ledger.backend.balances()
    except LedgerNotFound:  # the first account creates it
        there = {}
    plan = _Plan([], [], [], [], [], [])
    names = {one.name for one in declared if one.renewal is None}
    for one in declared:
        if one.renewal is not None:
            plan.renews.append((one, one.renewal))
            plan.differences.extend(_renewal_differences(one, one.renewal, names, there, ledger))
            continue
        balance = there.get(one.name)
        if balance is None:
            plan.opens.append(one)
            found = [*_missing_relatives(one, names, there)]
        else:
            found = [*_differences(one, balance, ledger)]
            if not found and (balance.closed or not one.closed):
                plan.same.append(one.name)
        plan.differences.extend(found)
        if one.closed and not (balance is not None and balance.closed):
            plan.closes.append(one.name)
    names |= {name for one, _ in plan.renews for name in accounts_of(one.name, there)}
    own = [name for name in there if name not in names and ledger.backend.opened(name).population is None]
    plan.not_in_file.extend(own)
    return plan


def _renewal_differences(
    one: Declared, renewal: Renewal, names: set[str], there: Mapping[str, Balance], ledger: Ledger
) -> Iterator[Difference]:
    """Yield why a budget cannot renew as the file says: its accounts are different, or a relative is missing."""
    _local(ledger)
    if one.name in there:
        advice = f"Its accounts would be named {one.name}@ and a date: declare the schedule under another name."
        yield Difference(one.name, "renew", "an account that does not renew", str(renewal.schedule), advice)
    found = accounts_of(one.name, there)
    for name in found:
        opened, balance = ledger.backend.opened(name), there[name]
        if opened.renewal != renewal:
            has = "an account that does not renew" if opened.renewal is None else str(opened.renewal.schedule)
            advice = "The promise of a schedule never changes: declare another budget, under another name."
            yield Difference(name, "renew", has, str(renewal.schedule), advice)
            return
        same = one._replace(name=name, successor_of=balance.head.successor_of, closed=balance.closed)
        yield from _differences(same, balance, ledger)
    if not found:
        yield from _missing_relatives(one, names, there)


def _local(ledger: Ledger) -> LocalBackend:
    """Return the backend of a ledger whose transactions and clock can be reached, or raise."""
    if not isinstance(ledger.backend, LocalBackend):
        raise InvalidArgument(
            f"--url must be the database of the ledger, SQLite or PostgreSQL, where budgets renew (got {ledger.url}):"
            " run this where the service runs"
        )
    return ledger.backend


def _missing_relatives(one: Declared, names: set[str], there: Mapping[str, Balance]) -> Iterator[Difference]:
    """Yield why an account could not be opened: a relative is not there, or takes nothing below it."""
    for field in _RELATIVES:
        name = getattr(one, field)
        if name and name not in names and name not in there:
            yield Difference(
                one.name, field, "no such account", name, f"Declare {name} in the file too, or correct the name."
            )
    if one.parent in there and there[one.parent].closed:
        yield Difference(
            one.name,
            "parent",
            f"{one.parent} as a closed account",
            one.parent,
            f"Nothing can be opened below a closed account: declare a successor of {one.parent}, and name that.",
        )


def _differences(one: Declared, balance: Balance, ledger: Ledger) -> Iterator[Difference]:
    """Yield what the file says differently of an account that exists. What it leaves to Odograph is not compared."""
    opened, head = ledger.backend.opened(one.name), balance.head
    if opened.population is not None:
        yield Difference(one.name, "name", "a population", "an account", "Give the account another name.")
        return
    successor = f"or declare another account with `successor_of: {one.name}`"
    promise = "A promise never changes: write `{}` in the file, " + successor + "."
    promised, declared = _promised(opened.compiled.policy), _promised(one.policy)
    for field in (field for field in _PROMISED if promised.get(field) != declared.get(field)):
        has, says = promised.get(field, "nothing"), declared.get(field, "nothing")
        write = (
            f"{field}: {has}"
            if field in promised
            else "`, `".join(f"{name}: {promised[name]}" for name in promised if name in _SIZES)
        )
        yield Difference(one.name, field, has, says, promise.format(write))
    for field, has, says in _changed_choices(one, opened.compiled):
        yield Difference(one.name, field, has, says, promise.format(f"{field}: {has}"))
    for field in (*_RELATIVES, "dataset"):
        has, says = getattr(head, field), getattr(one, field)
        if has != says:
            write = f"write `{field}: {has}` in the file" if has else f"remove `{field}` from the file"
            yield Difference(
                one.name,
                field,
                has or "none",
                says or "none",
                f"An account stays where it was opened: {write}, or declare the account under another name.",
            )
    if balance.closed and not one.closed:
        advice = f"A closed account stays closed: write `closed: true` in the file, {successor}."
        yield Difference(one.name, "closed", "true", "false", advice)


def _changed_choices(one: Declared, compiled: Compiled) -> Iterator[tuple[str, str, str]]:
    """Yield the choices that the file names and the account does not have: field, what it has, what the file says."""
    policy = compiled.policy
    own = {
        "delta_steps": policy.delta_steps,
        "filter": [*policy.filters],
        "odometer": policy.odometer,
        "slack": policy.slack,
    }
    form = policy.to_dict()
    for field in _CHOICES:
        if field not in one.given:
            continue
        written = "filter" if field == "reserve" else field
        arguments = own | {"filter": None} if field == "reserve" else own
        try:  # as if this one choice had been made for the account's promise, with all its other choices
            chosen = Policy(
                policy.epsilon,
                policy.delta,
                **arguments | {field: one.given[field]},
                privacy_unit=policy.privacy_unit,
                neighbors=policy.neighbors,
            ).to_dict()[written]
        except InvalidPolicy:
            chosen = None
        if chosen != form[written]:
            says = one.given[field] if isinstance(one.given[field], str) else one.policy.to_dict()[written]
            yield field, _short_choice(policy, field), _shown(says)


def _short_choice(policy: Policy, field: str) -> str:
    """Return how a file would name the choice that a policy has made."""
    return _shown(_policy_form(policy).get(field, policy.to_dict()["filter" if field == "reserve" else field]))


def _shown(value: object) -> str:
    if isinstance(value, float | Fraction):
        return text_of(value).removesuffix(".0")
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, default=str)


def _carry_out(
    ledger: Ledger, plan: _Plan, options: LedgerOptions, renewed: list[dict[str, Any]], *, dry_run: bool
) -> Iterator[str]:
    """Open, renew and close what the plan says, and yield lines for each; what is renewed is added to `renewed`.

    If it stops, the error says how far it came.
    """
    done: list[str] = []
    try:
        for one in plan.opens:
            if not dry_run:
                with progress(f"solving for {one.name}", quiet=options.json) as report:
                    compiled = compile_policy(one.policy, progress=report)
                _warn_of_large_delta(one.policy)
                ledger.open_account(
                    one.name,
                    compiled,
                    parent=one.parent,
                    successor_of=one.successor_of,
                    dataset=one.dataset,
                    note=one.note,
                )
            done.append(f"opened {one.name}")
            kept = f"{one.policy.promise}, by the filter {one.policy.filter_text}"
            yield f"{'would open' if dry_run else 'opened'} {one.name}{_position(one)}: {kept}"
        for one, renewal in plan.renews:
            form, lines = _renew(ledger, one, renewal, options, dry_run=dry_run)
            renewed.append(form)
            done += [f"opened {form['opened']}"] if form["opened"] else []
            yield from lines
        for name in plan.closes:
            if not dry_run:
                ledger.account(name).close(note="declared as closed")
            done.append(f"closed {name}")
            yield f"{'would close' if dry_run else 'closed'} {name}, and everything below it"
    except OdographError as problem:
        before = ", ".join(done) or "nothing was done"
        problem.args = (f"{problem}. Before that: {before}. The same command goes on from there",)
        raise


def _renew(
    ledger: Ledger, one: Declared, renewal: Renewal, options: LedgerOptions, *, dry_run: bool
) -> tuple[dict[str, Any], list[str]]:
    """Renew a budget, or only find out what is to be done; return that for programs and as lines for people."""
    backend = _local(ledger)
    if dry_run:
        step = _dry_step(backend, renewal)
    else:
        with progress(f"solving for {one.name}", quiet=options.json) as report:
            compiled = compile_policy(one.policy, progress=report)
        step = backend.renew(renewal, compiled, parent=one.parent, dataset=one.dataset, note=one.note)
    promise = renewal.schedule.promise_text(one.policy)
    form = {
        "account": one.name,
        "opened": step.opens,
        "closed": [*step.closes],
        "current": step.opens or step.previous,
        "lifetime_promise": promise,
    }
    would = "would be " * dry_run
    lines = [f"{name}: {would}closed: its epoch is over" for name in step.closes]
    opened = one._replace(successor_of=step.previous)
    if step.opens:
        kept = f"{one.policy.promise}, by the filter {one.policy.filter_text}"
        lines.insert(0, f"{step.opens}: {would}opened{_position(opened)}: {kept}")
    elif not lines:
        lines.append(f"{one.name}: nothing to do: {_why_not(renewal, step)}")
    return form, [*lines, f"{one.name}: lifetime promise: {promise}"]


def _dry_step(backend: LocalBackend, renewal: Renewal) -> RenewalStep:
    try:
        return backend.next_step(renewal)
    except LedgerNotFound:  # there is no store yet whose clock could be read
        return next_step(renewal, {}, time.time_ns() // 1000)


def _why_not(renewal: Renewal, step: RenewalStep) -> str:
    if step.epoch is None:
        return f"it is not between the first and the last day of the schedule, {renewal.schedule}"
    own = renewal.name_of(step.epoch)
    if own == step.previous:
        return f"{own} is there until {step.epoch.end}"
    return f"there is {step.previous}, which is later than the clock, so {own} is not opened any more"


def _position(one: Declared) -> str:
    words = ((" below", one.parent), (" after", one.successor_of), (" as a block of", one.dataset))
    return "".join(f"{word} {name}" for word, name in words if name)


def _summary(plan: _Plan, url: str, *, dry_run: bool) -> Iterator[str]:
    yield from map(str, plan.differences)
    if plan.differences:
        count = len(plan.differences)
        yield f"{count} difference{'s' * (count != 1)}: nothing was done in {url}"
        return
    if plan.same:
        count = len(plan.same)
        yield f"{count} account{'s' * (count != 1)} there already: {', '.join(plan.same)}"
    if plan.not_in_file:
        yield f"not in the file, and not changed: {', '.join(plan.not_in_file)}"
    if dry_run and (plan.opens or plan.closes):
        yield f"nothing was done in {url}: this was a dry run"
    else:
        yield f"{url} is as the file says"


# Writing.


def _declared_forms(ledger: Ledger) -> dict[str, Any]:
    """Return what declares the accounts of a ledger; the epochs of one schedule are declared together."""
    found: dict[str, Any] = {}
    accounts = {one.name: one for one in ledger.accounts()}
    for name, one in accounts.items():
        form, renewal = declared_form(one), ledger.backend.opened(name).renewal
        if renewal is not None and renewal.account not in accounts:
            kept = {field: value for field, value in form.items() if field not in {"successor_of", "closed"}}
            fields = {field: value for field, value in renewal.to_dict().items() if field != "account"}
            found[renewal.account] = kept | fields
        else:
            found[name] = form
    return found


def declared_form(account: LedgerAccount) -> dict[str, Any]:
    """Return the fields that a file needs to declare an account as it is."""
    summary = account.summary()
    form = _policy_form(account.policy)
    form |= {field: summary[field] for field in (*_RELATIVES, "dataset") if summary[field]}
    return form | ({"closed": True} if summary["closed"] else {})


def _policy_form(policy: Policy) -> dict[str, Any]:
    """Return the shortest fields of which a policy is made again; in full, if no shorter ones give the same."""
    full = policy.to_dict()
    form: dict[str, Any] = {name: value for name, value in _promised(policy).items() if value != _DEFAULTS.get(name)}
    form |= {"slack": _shown(policy.slack)} if policy.slack is not None else {}
    kinds = {one.kind for one, _ in policy.filters}
    filters: list[dict[str, Any]] = [
        {},
        *({"reserve": name} for name in RESERVES),
        *({"filter": one} for one in kinds),
    ]
    asides: list[dict[str, Any]] = [{}, {"delta_steps": _shown(policy.delta_steps)}]
    odometers: list[dict[str, Any]] = [{}, *({"odometer": name} for name in ODOMETER_NAMES)]
    whole = ({"filter": full["filter"]}, {"odometer": full["odometer"]})
    for parts in product(asides, [*filters, whole[0]], [*odometers, whole[1]]):
        choices = {name: value for part in parts for name, value in part.items()}
        try:
            arguments = {field: _choice(field, value) for field, value in (form | choices).items()}
            if Policy(**arguments) == policy:
                return form | choices
        except InvalidPolicy:
            continue
    return form | asides[1] | whole[0] | whole[1]  # pragma: no cover  the loop tries this too


def _promised(policy: Policy) -> dict[str, str]:
    """Return what a policy promises, as fields of a file."""
    total = policy.total
    size = {"epsilon": policy.epsilon} if total is None else {name: getattr(total, name) for name in total.options}
    fields = size | {"delta": policy.delta, "privacy_unit": policy.privacy_unit, "neighbors": policy.neighbors}
    return {name: _shown(value) for name, value in fields.items()}


_DEFAULTS: Final = {"privacy_unit": "person", "neighbors": "add-remove"}


def yaml_of(form: Mapping[str, Any]) -> str:
    """Write accounts as YAML. PyYAML would quote every number, because here they are text."""
    lines = [f"form: {form['form']}", "accounts:" if form["accounts"] else "accounts: {}"]
    for name, fields in form["accounts"].items():
        lines.append(f"  {_scalar(name)}:")
        lines += [f"    {field}: {_scalar(value)}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:  # noqa: ANN401  text, or a part of a document, in the JSON that YAML reads too
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)
