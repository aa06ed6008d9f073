"""Accounts: open, show, accounts, close."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from odograph.budgets import compile_policy
from odograph.cli.options import At, Key, Note, account_names, progress, say, with_options
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.offers import offers_of, standing, used
from odograph.core.policy import Policy
from odograph.core.rules import RULES
from odograph.errors import AccountExists
from odograph.ledger.account import LedgerAccount

__all__ = ["accounts", "close", "open_", "show"]

Account = Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)]


@with_options
def open_(  # noqa: PLR0913  each is one choice, fixed for ever
    name: Annotated[str, typer.Argument(help="The new account's name.")],
    *,
    at: At,
    epsilon: Annotated[str, typer.Option(help="The promise's epsilon, read exactly.", show_default=False)],
    delta: Annotated[str, typer.Option(help="The promise's delta, read exactly.", show_default=False)],
    rule: Annotated[
        str, typer.Option(help=f"{', '.join(sorted(RULES))}, or shares of delta such as exact=0.9,zcdp=0.1.")
    ] = "exact",
    delta_steps: Annotated[str | None, typer.Option(help="The part of delta set aside for steps' own.")] = None,
    unit: Annotated[str, typer.Option(help="What is protected.")] = "person",
    neighbours: Annotated[str, typer.Option(help="add-remove or replace-one.")] = "add-remove",
    parent: Annotated[
        str,
        typer.Option(metavar="ACCOUNT", help="What it spends, this one spends too.", autocompletion=account_names),
    ] = "",
    successor_of: Annotated[
        str,
        typer.Option(metavar="ACCOUNT", help="The old account, for a new policy.", autocompletion=account_names),
    ] = "",
    dataset: Annotated[str, typer.Option(help="The dataset of which it is a block (a day, a region).")] = "",
    key: Key = None,
    note: Note = "",
) -> None:
    """Open an account: a promise, and the rule that keeps it. Neither ever changes.

    odograph open census-2030 --epsilon 1 --delta 1e-6
    """
    policy = Policy(epsilon, delta, delta_steps=delta_steps, rule=_rule(rule), unit=unit, neighbours=neighbours)
    with progress("solving the exact rule", quiet=at.json) as report:
        compiled = compile_policy(policy, progress=report)
    with at.ledger() as ledger:
        try:
            account = ledger.open_account(
                name, compiled, parent=parent, successor_of=successor_of, dataset=dataset, key=key, note=note
            )
        except AccountExists as problem:  # the library's own advice is in Python
            raise AccountExists(
                f"there is an account {name!r} already: see odograph show {name}. A new policy is a new account,"
                f" opened under another name with --successor-of {name}"
            ) from problem
        lifetime = account.lifetime
        lines = [f"opened {name} in {ledger.url}: {policy.promise}, by the rule {policy.rule_text}"]
        lines += [f"lifetime promise {lifetime}"] if lifetime else []
        offers = [] if account.closed else offers_of(account)
        say(_form(account, ledger.url, offers), "\n".join(lines), as_json=at.json)


@with_options
def show(account: Account, *, at: At) -> None:
    """Show an account: its promise, what is spent and left, its reading, what fits next."""
    with at.ledger() as ledger:
        own = ledger.account(account)
        offers = [] if own.closed else offers_of(own)
        form = _form(own, ledger.url, offers)
        say(form, _card(own, form, offers), as_json=at.json)


@with_options
def accounts(*, at: At) -> None:
    """List the accounts of a ledger."""
    table = Table("account", "promise", "rule", "spent", "steps", "below", "", box=None, header_style="bold")
    rows = []
    with at.ledger() as ledger:
        for account in ledger.accounts():
            policy, totals, parent = account.policy, account.totals, account.parent
            part, above = used(account.compiled, totals), "" if parent is None else parent.name
            closed = "closed" if account.closed else ""
            rule, steps = policy.rule_text, totals.steps
            table.add_row(account.name, policy.target, rule, f"{part:.1%}", str(steps), above, closed)
            rows.append(
                {
                    "account": account.name,
                    "epsilon": float(policy.epsilon),
                    "delta": float(policy.delta),
                    "rule": rule,
                    "spent": part,
                    "steps": steps,
                    "parent": above,
                    "dataset": account.dataset,
                    "closed": account.closed,
                }
            )
        say({"url": ledger.url, "accounts": rows}, table, as_json=at.json)


@with_options
def close(account: Account, *, at: At, note: Note = "") -> None:
    """Take no new charges any more, here and below, for ever; reservations can still be resolved."""
    with at.ledger() as ledger:
        own = ledger.account(account)
        before = own.closed
        own.close(note=note)
        text = f"{account} was closed before" if before else f"closed {account}, and every account below it"
        say({"account": account, "closed": True, "closed_before": before}, text, as_json=at.json)


def _rule(text: str) -> str | list[tuple[str, str]]:
    """Read a rule's name, or shares by name."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return [(name.strip(), share.strip()) for name, _, share in pairs]


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "loss": reading.loss if math.isfinite(reading.loss) else None,
        "delta": reading.delta,
        "odometer": reading.method,
        "licence": reading.licence,
    }


def _form(account: LedgerAccount, url: str, offers: Sequence[Guarantee]) -> dict[str, Any]:
    """Return all that the card says, in plain types."""
    policy, totals, lifetime, parent = account.policy, account.totals, account.lifetime, account.parent
    now = standing(account.compiled, totals)
    return {
        "account": account.name,
        "url": url,
        "promise": {"epsilon": float(policy.epsilon), "delta": float(policy.delta), "text": policy.promise},
        "policy": policy.to_dict(),
        "source": account.compiled.note,
        "certification": account.certification,
        "spent": used(account.compiled, totals),
        "steps": totals.steps,
        "meters": {name: {"spent": now.spent[name], "left": now.left[name]} for name in now.spent},
        "reading": _reading(account.reading()),
        "largest": [offer.to_dict() for offer in offers],
        "parent": None if parent is None else parent.name,
        "children": [child.name for child in account.children],
        "dataset": account.dataset,
        "lifetime": None if lifetime is None else lifetime.to_dict(),
        "pending": [reservation.receipt.to_dict() for reservation in account.pending],
        "entries": account.size,
        "closed": account.closed,
    }


def _card(account: LedgerAccount, form: dict[str, Any], offers: Sequence[Guarantee]) -> Table:
    policy, steps = account.policy, form["steps"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("account", account.name + (" (closed: takes no new charges)" if form["closed"] else ""))
    grid.add_row("ledger", form["url"])
    grid.add_row("promise", form["promise"]["text"])
    grid.add_row("rule", policy.rule_text + (f"; {form['source']}" if form["source"] else ""))
    if account.certification.warning:
        grid.add_row("warning", account.certification.warning)
    for word in ("parent", "dataset"):
        if form[word]:
            grid.add_row(word, form[word])
    if form["children"]:
        grid.add_row("children", ", ".join(form["children"]))
    if account.lifetime:
        grid.add_row("lifetime promise", str(account.lifetime))
    grid.add_row("spent", f"{form['spent']:.1%} of the budget in {steps} step{'s' * (steps != 1)}")
    grid.add_row("", ProgressBar(total=1.0, completed=form["spent"], width=40))
    for name, meter in form["meters"].items():
        if name != "delta" or policy.delta_steps:
            grid.add_row("", f"{name}: {meter['spent']:.6g} spent, {meter['left']:.6g} left")
    grid.add_row("reading", str(account.reading()))
    fits = ", ".join(map(str, offers)) or "nothing fits any more"
    grid.add_row("largest next", "nothing: it is closed" if form["closed"] else fits)
    for reservation in account.pending:
        until = "" if reservation.expires is None else f", voidable until {reservation.expires:%Y-%m-%d %H:%M:%S} UTC"
        costs = ", ".join(f"{line.cost} of {line.account}" for line in reservation.receipt.lines)
        grid.add_row("pending", f"{reservation.id}: {costs}{until}")
    grid.add_row("entries", str(form["entries"]))
    return grid
