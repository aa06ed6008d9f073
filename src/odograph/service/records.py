"""Records: entries, pending reservations, verify, checkpoint, export and import, erasure."""

from __future__ import annotations

import io
import json
from tempfile import SpooledTemporaryFile
from typing import IO, Annotated, Final

from msgspec import Meta, Struct

from odograph.errors import LedgerCorrupt, LedgerError
from odograph.ledger.copies import check_checkpoint
from odograph.ledger.ledger import Ledger
from odograph.ledger.receipts import Checkpoint, Verification
from odograph.service.answers import (
    CheckpointForm,
    EntriesForm,
    ErasedForm,
    ReservationsForm,
    VerificationForm,
)
from odograph.service.door import Call, File
from odograph.service.problems import BadDocument, NotEmpty
from odograph.service.views import entries_form, pending_of

__all__ = [
    "Span",
    "checkpoint",
    "entries",
    "erase_note",
    "erase_principal",
    "export",
    "import_",
    "pending",
    "verify",
]

_IN_MEMORY: Final = 1 << 24


class Span(Struct, forbid_unknown_fields=True):
    """Which entries: from a sequence on, or, where it is negative, from so many before the end."""

    first: Annotated[int, Meta(ge=-(10**18), le=10**18)] = 0
    count: Annotated[int, Meta(ge=1, le=1000)] = 100


async def entries(call: Call) -> EntriesForm:
    """Show an account's entries, page by page: charges, refusals, reservations and what became of them."""
    ledger, span = call.office.ledger_of(call.caller), call.query
    return await call.office.compute(entries_form, ledger, call.caller, call.path["name"], span.first, span.count)


async def pending(call: Call) -> ReservationsForm:
    """Show the reservations of an account that nobody has committed or voided."""
    ledger, name = call.office.ledger_of(call.caller), call.path["name"]
    return ReservationsForm(name, await call.office.run(pending_of, ledger, call.caller, name))


async def verify(call: Call) -> VerificationForm:
    """Replay every entry of every account; with a checkpoint, also show that nothing was removed or rewritten."""
    kept = None if call.form.checkpoint is None else _kept(call.form.checkpoint)
    with call.office.auditing():
        found = await call.office.audit(call.office.ledger_of(call.caller).verify, checkpoint=kept)
    return _verification(found)


async def checkpoint(call: Call) -> CheckpointForm:
    """Say where every account stands, to be kept elsewhere: verify then sees what was removed or rewritten."""
    return _checkpoint(await call.office.run(call.office.ledger_of(call.caller).checkpoint))


async def export(call: Call) -> File:
    """Send the whole ledger at one moment, as JSON Lines; the last line is its checkpoint."""
    return File(b"application/x-ndjson", await call.office.audit(_exported, call.office.ledger_of(call.caller)))


async def import_(call: Call) -> VerificationForm:
    """Read an export into this ledger, which must be empty.

    A first line {"against": checkpoint} before the export shows that it is current; without one every account is
    closed.
    """
    if call.file is None:
        raise LedgerError("there is nothing to read in")
    with call.file as file:
        found = await call.office.audit(_imported, call.office.ledger_of(call.caller), file)
    call.office.forget_principals()  # the copy has brought their identities
    return _verification(found)


async def erase_note(call: Call) -> ErasedForm:
    """Erase the note of an entry, such as census%2317; the entry keeps its digest."""
    ledger = call.office.ledger_of(call.caller)
    return ErasedForm(await call.office.run(ledger.erase_note, call.path["entry"]))


async def erase_principal(call: Call) -> ErasedForm:
    """Erase a principal's name; entries keep the random identity."""
    ledger = call.office.ledger_of(call.caller)
    erased = await call.office.run(ledger.erase_principal, call.path["principal"])
    call.office.forget_principals()
    return ErasedForm(erased)


def _exported(ledger: Ledger) -> IO[bytes]:
    """Write the export to a temporary file first: an error is told before the first byte is sent."""
    file = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  closed by whoever sends it
    text = io.TextIOWrapper(file, encoding="utf-8", write_through=True)
    ledger.export(text)
    text.detach()
    file.seek(0)
    return file


def _imported(ledger: Ledger, file: IO[bytes]) -> Verification:
    kept = None
    try:
        form = json.loads(file.readline(_IN_MEMORY))
    except (RecursionError, ValueError) as problem:
        raise BadDocument("line 1 is not JSON; nothing was taken in") from problem
    if isinstance(form, dict) and "against" in form:
        kept = _kept(form["against"])
    else:
        file.seek(0)
    if ledger.books.balances():
        raise NotEmpty("this ledger is not empty: a copy can only be read into a new one; nothing was taken in")
    try:
        return ledger.import_(io.TextIOWrapper(file, encoding="utf-8"), checkpoint=kept)
    except LedgerCorrupt as problem:
        raise BadDocument(str(problem)) from problem


def _kept(form: object) -> Checkpoint:
    """Read a checkpoint that was kept elsewhere."""
    try:
        kept = Checkpoint.from_dict(form if isinstance(form, dict) else {})
        check_checkpoint(kept)
    except LedgerError as problem:
        raise BadDocument(str(problem)) from problem
    return kept


def _checkpoint(found: Checkpoint) -> CheckpointForm:
    form = found.to_dict()
    return CheckpointForm(form["form"], form["head"], form["accounts"])


def _verification(found: Verification) -> VerificationForm:
    return VerificationForm(
        verified=True,
        entries=found.entries,
        accounts=len(found.checkpoint.accounts),
        notes_erased=found.notes_erased,
        principals_erased=found.principals_erased,
        set_back=[*found.set_back],
        checkpoint=_checkpoint(found.checkpoint),
        uncertified=[*found.uncertified],
    )
