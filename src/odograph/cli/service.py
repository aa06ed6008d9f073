"""The service: `serve` runs it on a SQLite file or PostgreSQL; `keys` makes, lists, rotates and revokes its API keys.

`keys` works on the key store itself; the service need not run. `population` works on a service, or on a ledger whose
populations have their files on this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group
from rich.table import Table

from odograph.cli.accounts import read_document
from odograph.cli.options import (
    DEFAULT_URL,
    AsJson,
    CostOptions,
    Key,
    LedgerOptions,
    Note,
    account_names,
    new_file,
    print_result,
    with_options,
)
from odograph.connection import connect
from odograph.core.guarantees import guarantee_from_dict
from odograph.core.policy import Policy
from odograph.errors import AccountNotFound, InvalidArgument, load_extra
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import moment
from odograph.ledger.epochs import accounts_of, scheduled
from odograph.ledger.ledger import Ledger
from odograph.population.population import Round
from odograph.population.prices import Prices
from odograph.service.auth import ApiKey, Role
from odograph.service.key_store import KeyStore, connect_keys, require_existing

__all__ = [
    "KeyStoreOptions",
    "charge_population",
    "create_population",
    "join_population",
    "keys_app",
    "list_",
    "make",
    "participants",
    "population_app",
    "remove_population",
    "renew_population",
    "retire_population",
    "revoke",
    "rotate",
    "rounds",
    "serve",
    "show_population",
]


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
    population_root: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the files of populations; as private as the data."),
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
    load_extra("starlette")
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
        population_root=population_root,
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
    help="Make, list, rotate and revoke the API keys of the service.\n\nThey are stored next to the ledger.",
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

    def new_key(store: KeyStore) -> tuple[str, ApiKey]:
        return store.make(
            principal,
            role,
            accounts=account or (),
            every_account=every_account,
            expires=expires,
            made_by=options.user(),
        )

    _show_token(options, out, new_key)


@keys_app.command("rotate")
@with_options
def rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the key, as `odograph keys list` shows it.")],
    *,
    options: KeyStoreOptions,
    overlap: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the old key stays valid; by default it is revoked now.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the token to this new file, readable only by you.")
    ] = None,
) -> None:
    """Make another key for the same principal, role and accounts, and print its token, once."""
    _show_token(options, out, lambda store: store.rotate(key_id, overlap=overlap, made_by=options.user()))


def _show_token(
    options: KeyStoreOptions, out: Path | None, new_key: Callable[[KeyStore], tuple[str, ApiKey]]
) -> None:
    """Make a key, and print its token or write it to a new file."""
    # The file is made first: a token that cannot be written would be lost.
    with options.store() as store, nullcontext() if out is None else new_file(out) as file:
        token, key = new_key(store)
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


population_app = typer.Typer(
    name="population",
    help="One budget per person: create a population, charge its people, read its rounds.\n\nAt a service, or with"
    " files on this machine.",
)

PeopleFile = Annotated[
    Path | None,
    typer.Option(
        "--ids",
        metavar="FILE",
        help="Parquet with the column id, or text with one id a line, a number or a string in quotes.",
    ),
]
PopulationName = Annotated[str, typer.Argument(help="The population's name.")]
RoundKey = Annotated[str, typer.Option(help="Idempotency key: repeating a round with the same key charges nothing.")]
_MEMORY_LIMIT: Final = "2GB"  # for reading a file
_SHOWN_ROUNDS: Final = 10


@population_app.command("create")
@with_options
def create_population(  # noqa: PLR0913  each is one choice, which cannot be changed later
    name: PopulationName,
    *,
    options: LedgerOptions,
    epsilon: Annotated[str, typer.Option(help="Epsilon of the promise to each person, read exactly as typed.")],
    delta: Annotated[str, typer.Option(help="Delta of the promise to each person, read exactly as typed.")],
    filter_: Annotated[
        str | None, typer.Option("--filter", help="Each person's filter, instead of the default; see `open`.")
    ] = None,
    privacy_unit: Annotated[str, typer.Option(help="Whom the promise protects.")] = "person",
    engine: Annotated[str, typer.Option(help="numpy for the ids 0, 1, 2, ...; duckdb for any.")] = "numpy",
    unknown: Annotated[
        str, typer.Option(help="People in a charge who are not in the population: leave-out or join.")
    ] = "leave-out",
    location: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder for the files; not for a service.")
    ] = None,
    renew: Annotated[
        str | None,
        typer.Option(help="daily, weekly or monthly: each person's budget renews. This is the first epoch."),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="DAY", help="First day of the schedule, such as 2026-11-01; UTC.")
    ] = None,
    times: Annotated[str | None, typer.Option(metavar="NUMBER", help="How many epochs there are.")] = None,
    until: Annotated[str | None, typer.Option(metavar="DAY", help="Instead: the day on which they end.")] = None,
    key: Key = None,
    note: Note = "",
) -> None:
    """Create a population without people; they come with `join`.

    odograph population create telemetry --epsilon 1 --delta 1e-6 --location people
    """
    policy = Policy(epsilon, delta, filter=filter_, privacy_unit=privacy_unit)
    if renew is None and (from_, times, until) != (None, None, None):
        raise InvalidArgument("--from, --times and --until need --renew: daily, weekly or monthly")
    schedule = None if renew is None else scheduled(renew, from_, times, until)
    with options.ledger() as ledger:
        people = ledger.create_population(
            name, policy, location=location, engine=engine, unknown=unknown, renew=schedule, key=key, note=note
        )
        _print_population(people, f"created the population {people.name} in {ledger.url}", options)


@population_app.command("renew")
@with_options
def renew_population(
    name: Annotated[str, typer.Argument(help="The name from which its epochs are named, without a date.")],
    *,
    options: LedgerOptions,
    note: Note = "",
) -> None:
    """Open the population of the current epoch, with the same people, and close the one before it.

    For populations that were created with --renew, where the database and the files are. It can be repeated, and run
    by a timer.
    """
    with options.ledger() as ledger:
        _require_files(ledger)
        epochs = accounts_of(name, ledger.backend.balances())
        if not epochs:
            raise AccountNotFound(f"there is no population {name!r} that renews: create one with --renew")
        people = ledger.population(epochs[-1]).renew(note=note)
        _print_population(people, f"current: {people.name} in {ledger.url}", options)


@population_app.command("retire")
@with_options
def retire_population(
    name: PopulationName,
    epoch: Annotated[str, typer.Argument(metavar="DAY", help="First day of an epoch that is over.")],
    *,
    options: LedgerOptions,
    key: RoundKey,
    note: Note = "",
) -> None:
    """Forget what people spent in an epoch that is over, as a round of the current population.

    odograph population retire telemetry@2026-12-01 2026-11-01 --key retired
    """
    with options.ledger() as ledger:
        _require_files(ledger)
        _print_round(ledger.population(name).retire(epoch, key=key, note=note), f"retired {epoch}", options)


def _require_files(ledger: Ledger) -> None:
    """Raise unless the files of populations are on this machine."""
    if not isinstance(ledger.backend, LocalBackend):
        raise InvalidArgument(
            "--url must be the database of the ledger, SQLite or PostgreSQL, where populations renew (got"
            f" {ledger.url})"
        )


def _print_population(people: Any, text: str, options: LedgerOptions) -> None:  # noqa: ANN401  local or remote
    form = {"population": people.name, "policy": people.policy.to_dict()}
    if people.lifetime is not None:
        form["lifetime"] = people.lifetime.to_dict()
    print_result(form, f"{text}: {people.policy.promise}{_lifetime_text(people)}", as_json=options.json)


def _lifetime_text(people: Any) -> str:  # noqa: ANN401  as above
    return "" if people.lifetime is None else f"\nlifetime promise {people.lifetime}"


@population_app.command("join")
@with_options
def join_population(  # noqa: PLR0913  each is one option
    name: PopulationName,
    *,
    options: LedgerOptions,
    key: RoundKey,
    ids: PeopleFile = None,
    count: Annotated[int | None, typer.Option(help="Instead of a file: the ids 0, 1, 2, ..., so many.")] = None,
    note: Note = "",
) -> None:
    """Add people who have spent nothing; those who were removed before join as spent."""
    with options.ledger() as ledger:
        people = ledger.population(name)
        _print_round(people.join(_read_people(people, ids, count), key=key, note=note), "joined", options)


@population_app.command("remove")
@with_options
def remove_population(
    name: PopulationName, *, options: LedgerOptions, key: RoundKey, ids: PeopleFile = None, note: Note = ""
) -> None:
    """Remove people and forget what they spent. They can only join again as spent."""
    with options.ledger() as ledger:
        people = ledger.population(name)
        _print_round(people.remove(_read_people(people, ids, None), key=key, note=note), "removed", options)


@population_app.command("charge")
@with_options
def charge_population(  # noqa: PLR0913  each is one option
    name: PopulationName,
    *,
    asked: CostOptions,
    options: LedgerOptions,
    key: RoundKey,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of one cost for everyone: a Parquet file with the columns id and which, and a JSON list"
            " under `guarantees` in its metadata.",
        ),
    ] = None,
    note: Note = "",
) -> None:
    """Charge each person whose filter admits it: everyone the same, or each one of several prices.

    odograph population charge telemetry --pure 0.05 --key monday
    """
    if prices is not None and asked.is_given:
        raise InvalidArgument("pass either a cost for everyone or --prices, not both")
    with options.ledger() as ledger:
        people = ledger.population(name)
        asked_of = asked.guarantee() if prices is None else _read_prices(people, prices)
        _print_round(people.charge(asked_of, key=key, note=note).receipt, "charged", options)


@population_app.command("participants")
@with_options
def participants(
    name: PopulationName,
    key: Annotated[str, typer.Argument(help="The key of a round that you charged.")],
    *,
    options: LedgerOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this new file, readable only by you.")
    ] = None,
) -> None:
    """Print who takes part in one of the last two rounds, one id a line. It is as private as the data."""
    with options.ledger() as ledger, nullcontext(sys.stdout) if out is None else new_file(out) as file:
        for chunk in ledger.population(name).participants(key).chunks():
            file.writelines(f"{json.dumps(one)}\n" for one in chunk)


@population_app.command("show")
@with_options
def show_population(name: PopulationName, *, options: LedgerOptions) -> None:
    """Show a population's promise and its last rounds. How many people it has is private."""
    with options.ledger() as ledger:
        people = ledger.population(name)
        rounds = people.rounds(-_SHOWN_ROUNDS, _SHOWN_ROUNDS)
        form = {"population": name, "policy": people.policy.to_dict(), "rounds": [one.to_dict() for one in rounds]}
        promise = f"{name} in {ledger.url}: {people.policy.promise}, by the filter {people.policy.filter_text}"
        promise += _lifetime_text(people)
        if people.lifetime is not None:
            form["lifetime"] = people.lifetime.to_dict()
        print_result(form, Group(promise, _rounds_table(rounds)), as_json=options.json)


@population_app.command("rounds")
@with_options
def rounds(
    name: PopulationName,
    *,
    options: LedgerOptions,
    first: Annotated[int, typer.Option(help="The first round; negative counts from the end.")] = 0,
    count: Annotated[int, typer.Option(help="How many.")] = 1000,
) -> None:
    """List rounds: acts, keys, and what everyone was asked for. Individual prices are private."""
    with options.ledger() as ledger:
        found = ledger.population(name).rounds(first, count)
        form = {"population": name, "rounds": [one.to_dict() for one in found]}
        print_result(form, _rounds_table(found), as_json=options.json)


def _rounds_table(found: Sequence[Round]) -> Table:
    table = Table("round", "time (UTC)", "act", "cost", "by", "key", "note", box=None, header_style="bold")
    for one in found:
        cost = one.cost.brief() if one.cost is not None else "individual" if one.act == "charge" else ""
        table.add_row(str(one.version), f"{one.time:%Y-%m-%d %H:%M}", one.act, cost, one.principal, one.key, one.note)
    return table


def _print_round(receipt: Any, verb: str, options: LedgerOptions) -> None:  # noqa: ANN401  local or remote
    before = "before, nothing was changed now" if receipt.repeated else "now"
    text = f"{verb} {before}: round {receipt.version} of {receipt.population}, key {receipt.key}"
    print_result(receipt.to_dict(), text, as_json=options.json)


def _read_people(people: Any, file: Path | None, count: int | None) -> Any:  # noqa: ANN401  what an engine reads
    """Return the ids of a file, or 0, 1, 2, ... up to a count."""
    if (file is None) == (count is None):
        raise InvalidArgument("pass --ids FILE, or --count with `join`")
    if file is None:
        return range(count or 0)
    if file.suffix != ".parquet":
        return _read_lines(file)
    if not people.ordered:
        return file
    columns = _uploaded(file).columns(_MEMORY_LIMIT)
    if "id" not in columns:
        raise InvalidArgument(f"--ids {file} must have the column id")
    return columns["id"]


def _read_lines(file: Path) -> list[Any]:
    """Return the ids of a file of text."""
    found: list[Any] = []
    try:
        found += (json.loads(line) for line in file.read_text("utf-8").splitlines())
    except (RecursionError, ValueError):  # its message would contain an id
        raise InvalidArgument(
            f"--ids {file} must be Parquet, or have an id on each line: a number, or a string in quotation marks"
            f" (line {len(found) + 1} has none)"
        ) from None
    return found


def _read_prices(people: Any, file: Path) -> Prices:  # noqa: ANN401  local or remote
    """Return the prices of a Parquet file."""
    table = _uploaded(file)
    try:
        forms = [*json.loads(table.metadata.get("guarantees", "[]"), parse_float=str)]
    except (RecursionError, TypeError, ValueError):
        raise InvalidArgument(f"--prices {file}: the metadata must have `guarantees`, a JSON list") from None
    guarantees = [guarantee_from_dict(form) for form in forms]
    if not people.ordered:
        return Prices(guarantees, table=str(file))
    columns = table.columns(_MEMORY_LIMIT)
    return Prices(guarantees, columns.get("which"), ids=columns.get("id"))


def _uploaded(file: Path) -> Any:  # noqa: ANN401  loaded when used
    return import_module("odograph.population.engines.duckdb").UploadedTable.open(str(file))


def _state(key: ApiKey, now: int) -> str:
    if key.revoked is not None:
        return f"revoked {_minute(key.revoked)} by {key.revoked_by}"
    if key.expires is None:
        return "valid"
    return f"{'valid until' if key.valid_at(now) else 'expired'} {_minute(key.expires)}"


def _minute(time: int) -> str:
    return f"{moment(time):%Y-%m-%d %H:%M}"
