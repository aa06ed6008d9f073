"""The service: `serve` runs it on a SQLite file or PostgreSQL; `keys` makes, lists and revokes its API keys.

`keys` works on the key store itself; the service need not run.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from odograph.cli.accounts import read_document
from odograph.cli.options import DEFAULT_URL, AsJson, account_names, new_file, print_result, with_options
from odograph.connection import connect
from odograph.errors import InvalidArgument
from odograph.extras import load
from odograph.ledger.entries import moment
from odograph.service.auth import ApiKey, Role
from odograph.service.key_store import KeyStore, connect_keys, require_existing

__all__ = ["KeyStoreOptions", "keys_app", "list_", "make", "revoke", "serve"]


def serve(  # noqa: PLR0913  each is one option
    *,
    url: Annotated[
        str, typer.Option(envvar="ODOGRAPH_URL", help="URL of the ledger: sqlite:///FILE or postgresql://...")
    ] = DEFAULT_URL,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8300,
    workers: Annotated[int, typer.Option(help="Number of worker processes; more than one needs PostgreSQL.")] = 1,
    rate: Annotated[
        float, typer.Option(help="Maximum requests per second for one API key; 0 for no limit.")
    ] = 1000.0,
    connections: Annotated[int, typer.Option(help="Maximum connections to one worker.")] = 2000,
    connections_per_address: Annotated[
        int, typer.Option(help="Maximum connections from one address; 0 for no limit, as behind a proxy.")
    ] = 256,
    receive_timeout: Annotated[
        float, typer.Option(help="Seconds in which the head of a request, and then its body, must arrive.")
    ] = 20.0,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds to wait at startup for a database that cannot be reached.")
    ] = 300.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error or critical.")] = "info",
    owner_key_file: Annotated[
        Path | None, typer.Option(help="File for the first owner's API key; by default next to the ledger.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate file, for the service to serve TLS itself.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key file of the certificate.")] = None,
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http",
            help="Listen on any address without TLS, because a proxy in front of the service terminates it.",
        ),
    ] = False,
    trusted_proxy: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address or network of a proxy that signs people in to the dashboard; with --proxy-header.",
        ),
    ] = None,
    proxy_header: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Header in which the trusted proxy names the principal of a browser."),
    ] = None,
    alerts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML or JSON with thresholds and a webhook for alerts on budgets."),
    ] = None,
    accept_fsync_off: Annotated[
        bool,
        typer.Option(
            "--accept-fsync-off", help="Accept a PostgreSQL with fsync off, which may lose acknowledged charges."
        ),
    ] = False,
) -> None:
    """Serve a ledger over HTTP, with a dashboard at /. The first start writes an owner's API key to a file.

    odograph serve

    odograph serve --url postgresql://odograph@db/budgets --workers 4
    """
    load("starlette")
    settings = import_module("odograph.service.settings").Settings(
        url=url,
        host=host,
        port=port,
        workers=workers,
        rate=rate,
        connections=connections,
        connections_per_address=connections_per_address,
        receive_timeout=receive_timeout,
        start_timeout=start_timeout,
        log_level=log_level,
        owner_key_file=owner_key_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        plain_http=plain_http,
        trusted_proxy=trusted_proxy,
        proxy_header=proxy_header,
        accept_fsync_off=accept_fsync_off,
        alerts=None if alerts is None else _read_alerts(alerts),
    )
    import_module("odograph.service.server").serve(settings, typer.echo)


def _read_alerts(file: Path) -> dict[str, Any]:
    """Return the rules of a file; the secret's file is beside it if its path is relative."""
    content = read_document(file)
    webhook = content.get("webhook")
    if isinstance(webhook, dict) and isinstance(webhook.get("secret_file"), str):
        webhook["secret_file"] = str(file.absolute().parent / webhook["secret_file"])
    return content


keys_app = typer.Typer(
    name="keys",
    help="Make, list and revoke the API keys of the service.\n\nThey are stored next to the ledger, never in it.",
)


@dataclass(frozen=True, slots=True)
class KeyStoreOptions:
    """The ledger whose service accepts these keys, and the form of the output."""

    url: Annotated[
        str,
        typer.Option(
            envvar="ODOGRAPH_URL",
            help="URL of the ledger: sqlite:///FILE, sqlite:////FOLDER/FILE or postgresql://USER@HOST/DATABASE.",
        ),
    ] = DEFAULT_URL
    json: AsJson = False

    def store(self) -> KeyStore:
        """Return the key store; making the first key creates it."""
        if self.url.startswith("memory:"):
            raise InvalidArgument(
                f"--url must not be in memory (got {self.url!r}): its keys would end with this command. Use a URL"
                f" such as {DEFAULT_URL}"
            )
        return connect_keys(self.url)

    def user(self) -> str:
        """Return the principal: the user of the operating system."""
        with connect(self.url) as ledger:
            return ledger.principal


@keys_app.command("make")
@with_options
def make(  # noqa: PLR0913  each is an option
    principal: Annotated[
        str, typer.Argument(help="The principal that the key identifies; use the same name when a key is renewed.")
    ],
    *,
    options: KeyStoreOptions,
    role: Annotated[
        Role,
        typer.Option(
            help="owner: may do everything. analyst: may spend and reserve. runner: may also commit and void."
            " auditor: may read and verify."
        ),
    ],
    account: Annotated[
        list[str] | None,
        typer.Option(help="An account that the key is for; may be repeated.", autocompletion=account_names),
    ] = None,
    every_account: Annotated[
        bool, typer.Option("--every-account", help="The key is for all accounts, including those opened later.")
    ] = False,
    expires: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Lifetime of the key; by default it does not expire.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the token to this new file, readable only by you.")
    ] = None,
) -> None:
    """Make a key and print its token, once: only a digest is stored."""
    with connect(options.url) as ledger:
        require_existing(ledger, account or ())
    # The file is made first: a token that cannot be written would be lost.
    with options.store() as store, nullcontext() if out is None else new_file(out) as file:
        token, key = store.make(
            principal,
            role,
            accounts=account or (),
            every_account=every_account,
            expires=expires,
            made_by=options.user(),
        )
        if file is not None:
            file.write(f"{token}\n")
    if out is None:
        print_result({"token": token, "key": key.to_dict()}, token, as_json=options.json)
    else:
        print_result(
            {"file": str(out), "key": key.to_dict()}, f"wrote {out}: the token of key {key.id}", as_json=options.json
        )


@keys_app.command("list")
@with_options
def list_(*, options: KeyStoreOptions) -> None:
    """List every key ever made, newest first. Tokens are not stored, and so not shown."""
    with options.store() as store:
        keys, now = store.keys(), store.now()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("key", "principal", "role", "accounts", "made (UTC)", "by", "state"):
        table.add_column(name, no_wrap=name in ("key", "role", "made (UTC)"))
    for key in keys:
        names = "all" if key.every_account else " ".join(key.accounts)
        table.add_row(key.id, key.principal, key.role, names, _minute(key.made), key.made_by, _state(key, now))
    form = {"keys": [key.to_dict() | {"valid": key.valid_at(now)} for key in keys]}
    print_result(
        form, table if keys else "there are no keys; make one with `odograph keys make`", as_json=options.json
    )


@keys_app.command("revoke")
@with_options
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the key, as `odograph keys list` shows it.")],
    *,
    options: KeyStoreOptions,
) -> None:
    """Revoke a key permanently, and end its sessions. It remains in the list."""
    with options.store() as store:
        key = store.revoke(key_id, options.user())
    when = "" if key.revoked is None else f" since {_minute(key.revoked)} by {key.revoked_by}"
    print_result({"key": key.to_dict()}, f"key {key.id} of {key.principal} is revoked{when}", as_json=options.json)


def _state(key: ApiKey, now: int) -> str:
    if key.revoked is not None:
        return f"revoked {_minute(key.revoked)} by {key.revoked_by}"
    if key.expires is None:
        return "valid"
    return f"{'valid until' if key.valid_at(now) else 'expired'} {_minute(key.expires)}"


def _minute(time: int) -> str:
    return f"{moment(time):%Y-%m-%d %H:%M}"
