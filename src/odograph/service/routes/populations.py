"""Populations: create, charge, join, remove; who takes part, for a runner; and the rounds, for an auditor.

The ledger alone answers what an auditor may read. Everything else uses the files of a population, which are below the
service's population root, in a thread of its own: a round may take minutes, and no spend waits for it.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile, TemporaryFile
from typing import IO, Any, Final, TypeVar, cast

import msgspec
import numpy as np

from odograph.core.guarantees import Guarantee, PureDP
from odograph.core.policy import Compiled
from odograph.errors import (
    IdempotencyConflict,
    InvalidArgument,
    InvalidGuarantee,
    LedgerError,
    OdographError,
    listed_as,
)
from odograph.ledger.commands import Open, check_repeated
from odograph.ledger.entries import check_name
from odograph.ledger.stores.base import Head
from odograph.population.population import Population, RoundReceipt
from odograph.population.prices import Prices
from odograph.population.version_store import pin
from odograph.service import logs, schemas
from odograph.service.endpoint import Call, Reply, Stream, page_reply
from odograph.service.routes.accounts import compile_form, page_of
from odograph.service.schemas import (
    MAX_PEOPLE,
    MAX_TERMS,
    QUICK,
    ClosedForm,
    CostForm,
    NoisyCountForm,
    PopulationForm,
    PopulationsForm,
    RoundReceiptForm,
    RoundsForm,
    decoder,
    guarantee_of,
)
from odograph.service.state import AppState
from odograph.service.visibility import (
    HttpProblem,
    PopulationUnusable,
    population_form,
    population_rows,
    require_visible,
    rounds_form,
    visible_population,
)

__all__ = [
    "charge_people",
    "close_population",
    "count_active",
    "create_population",
    "join_people",
    "list_populations",
    "list_rounds",
    "participants",
    "remove_people",
    "show_population",
]

_T = TypeVar("_T")
_Ids = Any  # what the population's engine reads
_Update = Callable[[Population, Call], RoundReceipt]

_CREATED: Final = 201
_OK: Final = 200
_CONFLICT: Final = 409
_GONE: Final = 410
_FOLDER: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NOT_IN_FOLDER: Final = re.compile(r"[^A-Za-z0-9_-]")
_READABLE_LENGTH: Final = 40  # characters of a folder's name that are taken from the population's
_MEMORY_LIMIT: Final = "2GB"  # for DuckDB; what does not fit is spilled to the disk
_MAX_ROWS: Final = 1_000_000_000  # of a file that DuckDB reads by itself
_MAX_GUARANTEES: Final = 1 << 16  # of an upload
_MAX_GUARANTEES_LENGTH: Final = 1 << 24  # characters of them in JSON, which take five times as much memory when read
_PARTICIPANTS_IN_MEMORY: Final = 1 << 20  # bytes; more go to a temporary file
_NDJSON: Final = b"application/x-ndjson"

_decode_guarantees: Final = decoder(list[CostForm])


async def create_population(call: Call) -> Reply:
    """Create a population without people; the same key again returns the first one."""
    require_visible(call.caller, [call.form.name])
    compiled = await compile_form(call, call.form)
    repeated = await call.state.run_population(_guarded, _create, call, compiled)
    form = await call.state.run(population_form, call.state.ledger_of(call.caller), call.caller, call.form.name)
    return Reply(_OK if repeated else _CREATED, form)


async def list_populations(call: Call) -> Reply:
    """List the populations that the key may see, by name."""
    found = await call.state.compute(population_rows, call.state.ledger_of(call.caller), call.caller)
    page, following = page_of(found, call.query)
    return page_reply(call, PopulationsForm(page, following), after=following)


async def show_population(call: Call) -> PopulationForm:
    """Show a population: its promise to each person, and how many rounds there were; nothing about any person."""
    ledger = call.state.ledger_of(call.caller)
    return await call.state.run(population_form, ledger, call.caller, call.path["name"])


async def list_rounds(call: Call) -> RoundsForm:
    """Show a page of a population's rounds: acts, keys and what everyone was asked for, nothing about any person."""
    ledger, name, span = call.state.ledger_of(call.caller), call.path["name"], call.query
    return await call.state.compute(rounds_form, ledger, call.caller, name, span.first, span.count)


async def charge_people(call: Call) -> Reply:
    """Charge each person whose filter admits it, durably. Send JSON, or Parquet with the columns id and which.

    The metadata of a Parquet file has the guarantees, a JSON list, under `guarantees`, and perhaps a note under
    `note`. Without the column id there is one row for each person, in id order.
    """
    return await _make_round(call, _charge)


async def join_people(call: Call) -> Reply:
    """Add people who have spent nothing. Send JSON, or Parquet with the column id.

    People who were removed before join as spent.
    """
    return await _make_round(call, _join)


async def remove_people(call: Call) -> Reply:
    """Remove people, and forget what they spent. Send JSON, or Parquet with the column id.

    A mark of each remains, so that they can only join again as spent.
    """
    return await _make_round(call, _remove)


async def count_active(call: Call) -> Reply:
    """Count, with noise, who could take part in a round of `probe`; it is a round of its own.

    A key that was used before is refused: another answer would be another charge.
    """
    return Reply(_CREATED, await _with_population(call, _count))


async def participants(call: Call) -> Stream:
    """Send the ids of those who take part in a round that this principal charged, one JSON value a line.

    They are kept for the last two rounds.
    """
    return Stream(_NDJSON, await _with_population(call, _write_participants))


async def close_population(call: Call) -> ClosedForm:
    """Close a population, permanently: it takes no new rounds."""
    name = call.path["name"]
    await call.state.run(_close, call)
    return ClosedForm(name, closed=True)


async def _make_round(call: Call, update: _Update) -> Reply:
    """Carry a round out, and return its receipt."""
    try:
        receipt = await _with_population(call, partial(_update_and_close, update))
    except OdographError:  # of a call that has ended, or was not begun
        _close_upload(call)
        raise
    return Reply(_OK if receipt.repeated else _CREATED, RoundReceiptForm(**receipt.to_dict()))


async def _with_population(call: Call, function: Callable[[Population, Call], _T]) -> _T:
    """Call what uses the files of a population, in the thread for that."""
    require_visible(call.caller, [call.path["name"]])
    return await call.state.run_population(_guarded, lambda: function(_open(call), call))


def _update_and_close(update: _Update, people: Population, call: Call) -> RoundReceipt:
    """Carry a round out and close what was sent, in one thread: the request may be canceled while this goes on."""
    try:
        return update(people, call)
    finally:
        _close_upload(call)


def _close_upload(call: Call) -> None:
    if call.upload is not None:
        call.upload.close()


def _guarded(function: Callable[..., _T], *arguments: object) -> _T:
    """Call a function; a problem with the files of a population is not one of the ledger."""
    try:
        return function(*arguments)
    except LedgerError as problem:
        if listed_as(problem) is not LedgerError or isinstance(problem, PopulationUnusable):
            raise
        logs.state("error", "population", str(problem))
        raise PopulationUnusable(
            "the service cannot use the files of this population, or not in this way; its log has the reason"
        ) from problem


# What runs in the thread of populations.


def _root(state: AppState) -> Path:
    root = state.settings.population_root
    if root is None:
        raise HttpProblem(
            _CONFLICT, "this service keeps no populations; its operator can start it with --population-root"
        )
    return root.absolute()


def _new_folder(name: str) -> str:
    """Return the name of a new folder: letters of the population's name, for the operator, and random digits."""
    return f"{_NOT_IN_FOLDER.sub('_', name)[:_READABLE_LENGTH]}-{secrets.token_hex(8)}"


def _folder_of(about: Mapping[str, Any]) -> str:
    """Return the name of a population's folder below the root, whatever path the ledger has."""
    found = Path(str(about.get("location"))).name
    if not _FOLDER.fullmatch(found):
        raise LedgerError(f"the folder {found!r} of a population is not one below the population root")
    return found


def _create(call: Call, compiled: Compiled) -> bool:
    """Create a population; return whether its key had created it before."""
    form: schemas.CreatePopulationForm = call.form
    check_name(form.name)
    root, ledger, backend = (
        _root(call.state),
        call.state.population_ledger(call.caller),
        call.state.backend_of(call.caller),
    )
    author = backend.author(call.idempotency_key, form.note)
    record = backend.find_key(author.principal, author.key)
    if record is None:
        location = root / _new_folder(form.name)
        Population.create(
            form.name,
            compiled,
            ledger=ledger,
            location=location,
            engine=form.engine,
            unknown=form.unknown,
            key=author.key,
            note=form.note,
        )
        return False
    policy = compiled.policy
    head = Head(form.name, "", "", "", policy.privacy_unit, policy.neighbors)
    check_repeated(record, author, Open(author, head, compiled).digest)
    about = backend.opened(form.name).population or {}
    if (about.get("engine"), about.get("unknown")) != (form.engine, form.unknown):
        raise IdempotencyConflict("the idempotency key created this population with another engine or unknown")
    return True


def _open(call: Call) -> Population:
    """Open a population that the caller may see, and whose files are kept here."""
    ledger, name = call.state.population_ledger(call.caller), call.path["name"]
    about = visible_population(ledger, call.caller, name)
    engine = str(about.get("engine"))
    if engine not in ("numpy", "duckdb"):
        raise HttpProblem(_CONFLICT, f"the service does not run the engine {engine!r}; a program of your own can")
    location = _root(call.state) / _folder_of(about)
    return Population.open(
        name, ledger=ledger, location=location, memory_limit=_MEMORY_LIMIT if engine == "duckdb" else None
    )


def _charge(people: Population, call: Call) -> RoundReceipt:
    if call.upload is None:
        form: schemas.RoundForm = call.form
        prices, note = _prices_of(form), form.note
        if form.records is not None:
            _check_count(people, call, form.records)
    else:
        prices, note = _read_prices(people, call.upload)
    return people.charge(prices, key=str(call.idempotency_key), note=note).receipt


def _check_count(people: Population, call: Call, records: int) -> None:
    """Raise unless there is a record for each person, for a round that was not made before."""
    if not people.ordered:
        raise InvalidArgument("records must be left out for a population whose people are in no order")
    backend = call.state.backend_of(call.caller)
    if backend.find_key(backend.identity(), str(call.idempotency_key)) is None:  # people may have joined since
        people.check(range(records))


def _join(people: Population, call: Call) -> RoundReceipt:
    ids, note = _people_of(people, call)
    return people.join(ids, key=str(call.idempotency_key), note=note)


def _remove(people: Population, call: Call) -> RoundReceipt:
    ids, note = _people_of(people, call)
    return people.remove(ids, key=str(call.idempotency_key), note=note)


def _count(people: Population, call: Call) -> NoisyCountForm:
    form: schemas.CountActiveForm = call.form
    cost = guarantee_of(form.cost)
    if not isinstance(cost, PureDP):
        raise InvalidGuarantee(f"cost must be pure, with a positive epsilon (got {cost!r})")
    found = people.noisy_active_count(guarantee_of(form.probe), cost, key=str(call.idempotency_key), note=form.note)
    return NoisyCountForm(people.name, found)


def _close(call: Call) -> None:
    ledger = call.state.ledger_of(call.caller)
    visible_population(ledger, call.caller, call.path["name"])
    ledger.backend.close(call.path["name"], call.form.note)


def _write_participants(people: Population, call: Call) -> IO[bytes]:
    """Write the ids to a temporary file, a line each, so that a problem is reported before the first is sent."""
    active = people.participants(call.path["round"])
    with pin(active.folder):  # a later round would remove it
        if not active.folder.is_dir():
            raise HttpProblem(
                _GONE, "the participants of this round are no longer kept: only those of the last two are"
            )
        file = SpooledTemporaryFile(_PARTICIPANTS_IN_MEMORY)  # noqa: SIM115  closed when it was sent
        encoder = msgspec.json.Encoder()
        for ids in active.chunks():
            file.write(encoder.encode_lines(ids))
    file.seek(0)
    return file


# What was sent: JSON or Parquet.


def _prices_of(form: schemas.RoundForm) -> Prices | Guarantee:
    guarantees = [guarantee_of(one) for one in form.guarantees]
    if form.which is not None:
        return Prices(guarantees, form.which, ids=None if form.ids is None else _same_kind(form.ids))
    if len(guarantees) > 1 or form.ids is not None:
        raise InvalidArgument("which must be sent with several guarantees, or with ids: an index for each person")
    return guarantees[0]


def _same_kind(ids: list[int | str]) -> list[int | str]:
    """Return ids that are all integers of 64 bits or all strings: NumPy would turn mixed ones into strings."""
    whole = [one for one in ids if isinstance(one, int)]
    if len(whole) not in (0, len(ids)):
        raise InvalidArgument("ids must be all integers, or all strings")
    if whole and not -(2**63) <= min(whole) <= max(whole) < 2**63:
        raise InvalidArgument("ids must be integers of 64 bits, or strings")
    return ids


def _people_of(people: Population, call: Call) -> tuple[_Ids, str]:
    """Return the ids that were sent in any form, and the note."""
    if call.upload is not None:
        ids, _, metadata = _read_upload(people, call.upload)
        return ids, metadata.get("note", "")
    form: schemas.PeopleForm = call.form
    if form.ids is not None and form.count is None:
        return _same_kind(form.ids), form.note
    if form.count is None or form.ids is not None:
        raise InvalidArgument("send either ids or a count")
    return np.arange(form.count), form.note


def _read_prices(people: Population, upload: IO[bytes]) -> tuple[Prices, str]:
    """Return the prices of a Parquet file, and the note in its metadata."""
    ids, which, metadata = _read_upload(people, upload)
    text = metadata.get("guarantees", "[]")
    if len(text) > _MAX_GUARANTEES_LENGTH:
        raise InvalidArgument(
            f"`guarantees` must have at most {_MAX_GUARANTEES_LENGTH:,} characters (got {len(text):,})"
        )
    try:
        forms = _decode_guarantees(text.encode())
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise InvalidGuarantee("the file's metadata must have `guarantees`: a JSON list of guarantees") from None
    slow = sum(not isinstance(one, QUICK) for one in forms)
    if len(forms) > _MAX_GUARANTEES or (slow and len(forms) > MAX_TERMS):
        raise InvalidArgument(f"there must be at most {_MAX_GUARANTEES:,} guarantees, {MAX_TERMS:,} with curves")
    guarantees = [guarantee_of(one) for one in forms]
    note = metadata.get("note", "")
    return (Prices(guarantees, table=ids) if which is None else Prices(guarantees, which, ids=ids)), note


def _read_upload(people: Population, upload: IO[bytes]) -> tuple[_Ids, _Ids, Mapping[str, str]]:
    """Return the columns id and which of a Parquet file, as far as they are there, and its metadata.

    For an engine that reads tables, the first is the file itself and the second None: it need not fit into memory.
    """
    from odograph.population.engines.duckdb import UploadedTable  # noqa: PLC0415  loaded when the first file is sent

    file = cast("SpooledTemporaryFile[bytes]", upload)
    file.rollover()  # it has no name, so a crash leaves nothing behind
    table = UploadedTable.open(f"/dev/fd/{file.fileno()}")
    most = MAX_PEOPLE if people.ordered else _MAX_ROWS
    if table.rows > most:
        raise InvalidArgument(f"a file must have at most {most:,} rows for this population (got {table.rows:,})")
    if not people.ordered:
        with TemporaryFile() as copy:
            table.rewrite(f"/dev/fd/{copy.fileno()}", _MEMORY_LIMIT)
            file.seek(0)
            file.truncate()
            shutil.copyfileobj(copy, file)
            file.flush()
        return table.path, None, table.metadata
    columns = table.columns(_MEMORY_LIMIT)
    return columns.get("id"), columns.get("which"), table.metadata
