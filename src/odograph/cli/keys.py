"""API keys of the service: make, list, revoke. They work on the store itself; the service need not run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from odograph.cli.options import DEFAULT_URL, AsJson, account_names, new_file, say, with_options
from odograph.connect import connect
from odograph.errors import LedgerError
from odograph.ledger.entries import moment
from odograph.service.access import ApiKey, Role
from odograph.service.keys import KeyStore, connect_keys

__all__ = ["Keys", "keys_app", "list_", "make", "revoke"]

keys_app = typer.Typer(
    name="keys",
    help="Make, list and revoke the API keys of the service.\n\nThey are kept beside the ledger, never in it.",
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the ledger is whose service takes these keys, and how the answer is printed."""

    url: Annotated[
        str,
        typer.Option(
            envvar="ODOGRAPH_URL",
            help="Where the ledger is: sqlite:///FILE, sqlite:////FOLDER/FILE or postgresql://USER@HOST/DATABASE.",
        ),
    ] = DEFAULT_URL
    json: AsJson = False

    def store(self) -> KeyStore:
        """Return the key store; only the first key makes it."""
        if self.url.startswith("memory:"):
            raise LedgerError(f"keys in memory would end with this command; use a ledger such as {DEFAULT_URL}")
        return connect_keys(self.url)

    def user(self) -> str:
        """Return who asks: the user of the operating system."""
        with connect(self.url) as ledger:
            return ledger.principal


@keys_app.command("make")
@with_options
def make(  # noqa: PLR0913  each is an option
    principal: Annotated[str, typer.Argument(help="Whom the key is for; the same when keys are renewed.")],
    *,
    at: Keys,
    role: Annotated[
        Role,
        typer.Option(
            help="owner: everything. analyst: spends and reserves. runner: commits and voids too. auditor: reads and"
            " verifies."
        ),
    ],
    account: Annotated[
        list[str] | None,
        typer.Option(help="An account that the key is for; may be given again.", autocompletion=account_names),
    ] = None,
    every_account: Annotated[
        bool, typer.Option("--every-account", help="For all accounts, also those opened later.")
    ] = False,
    expires: Annotated[float | None, typer.Option(metavar="SECONDS", help="Never, if left out.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the token to this new file, which only you can read.")
    ] = None,
) -> None:
    """Make a key and print its token: this once, for only its digest is kept."""
    # The file is made before there is a token to lose.
    with at.store() as store, nullcontext() if out is None else new_file(out) as file:
        token, key = store.make(
            principal,
            role,
            accounts=account or (),
            every_account=every_account,
            expires=expires,
            made_by=at.user(),
        )
        if file is not None:
            file.write(f"{token}\n")
    if out is None:
        say({"token": token, "key": _to_dict(key)}, token, as_json=at.json)
    else:
        say({"file": str(out), "key": _to_dict(key)}, f"wrote {out}: the token of key {key.id}", as_json=at.json)


@keys_app.command("list")
@with_options
def list_(*, at: Keys) -> None:
    """Show every key that was ever made, the newest first. Tokens are not kept, and so not shown."""
    with at.store() as store:
        keys, now = store.keys(), store.now()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("key", "principal", "role", "accounts", "made (UTC)", "by", "state"):
        table.add_column(name, no_wrap=name in ("key", "role", "made (UTC)"))
    for key in keys:
        names = "all" if key.every_account else " ".join(key.accounts)
        table.add_row(key.id, key.principal, key.role, names, _minute(key.made), key.made_by, _state(key, now))
    form = {"keys": [_to_dict(key) | {"valid": key.valid_at(now)} for key in keys]}
    say(form, table if keys else "no key was ever made; `odograph keys make` makes one", as_json=at.json)


@keys_app.command("revoke")
@with_options
def revoke(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="The key's identity, as `odograph keys list` shows it.")
    ],
    *,
    at: Keys,
) -> None:
    """Revoke a key, for good, and end its sessions. It stays listed."""
    with at.store() as store:
        key = store.revoke(key_id, at.user())
    when = "" if key.revoked is None else f" since {_minute(key.revoked)} by {key.revoked_by}"
    say({"key": _to_dict(key)}, f"key {key.id} of {key.principal} is revoked{when}", as_json=at.json)


def _state(key: ApiKey, now: int) -> str:
    if key.revoked is not None:
        return f"revoked {_minute(key.revoked)} by {key.revoked_by}"
    if key.expires is None:
        return "valid"
    return f"{'valid until' if key.valid_at(now) else 'expired'} {_minute(key.expires)}"


def _minute(time: int) -> str:
    return f"{moment(time):%Y-%m-%d %H:%M}"


def _to_dict(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "principal": key.principal,
        "role": key.role,
        "accounts": list(key.accounts),
        "every_account": key.every_account,
        "made": moment(key.made).isoformat(),
        "made_by": key.made_by,
        "expires": None if key.expires is None else moment(key.expires).isoformat(),
        "revoked": None if key.revoked is None else moment(key.revoked).isoformat(),
        "revoked_by": key.revoked_by,
    }
