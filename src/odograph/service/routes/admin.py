"""Administration: verify, checkpoint, export and import, erasure; API keys, the caller, health, metrics."""

from __future__ import annotations

import io
import json
from importlib.metadata import version
from tempfile import SpooledTemporaryFile
from typing import IO, Final

from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerError
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import Checkpoint, Verification
from odograph.ledger.transfer import check_checkpoint
from odograph.service import schemas
from odograph.service.endpoint import Call, Json, Reply, Stream, page_reply
from odograph.service.key_store import require_existing
from odograph.service.monitoring import CONTENT_TYPE
from odograph.service.schemas import ErasedForm, HealthForm
from odograph.service.state import AppState
from odograph.service.visibility import BadDocument, NotEmpty

__all__ = [
    "checkpoint",
    "erase_note",
    "erase_principal",
    "export",
    "health",
    "import_",
    "list_keys",
    "make_key",
    "metrics",
    "ready",
    "revoke_key",
    "rotate_key",
    "show_key",
    "verify",
    "who",
]

_EXPORT_IN_MEMORY: Final = 1 << 24  # bytes; a larger export goes to a temporary file


async def verify(call: Call) -> Json:
    """Replay every entry of every account; with a checkpoint, also show that nothing was removed or rewritten."""
    kept = None if call.form.checkpoint is None else _read_checkpoint(call.form.checkpoint)
    with call.state.auditing():
        found = await call.state.audit(call.state.ledger_of(call.caller).verify, checkpoint=kept)
    return found.to_dict()


async def checkpoint(call: Call) -> Json:
    """Return a checkpoint of every account; stored elsewhere, it lets verify detect what was removed or rewritten."""
    return (await call.state.run(call.state.ledger_of(call.caller).checkpoint)).to_dict()


async def export(call: Call) -> Stream:
    """Send the whole ledger at one moment, as JSON Lines; the last line is its checkpoint."""
    return Stream(b"application/x-ndjson", await call.state.audit(_write_export, call.state.ledger_of(call.caller)))


async def import_(call: Call) -> Json:
    """Read an export into this ledger, which must be empty.

    A first line {"against": checkpoint} before the export shows that it is current; without one every account is
    closed.
    """
    if call.upload is None:
        raise LedgerError("the body is missing; send an export")
    with call.upload as file:
        found = await call.state.audit(_read_export, call.state.ledger_of(call.caller), file)
    call.state.forget_principals()  # the export brings identities of its own
    return found.to_dict()


async def erase_note(call: Call) -> ErasedForm:
    """Erase the note of an entry, such as census%2317; the entry keeps its digest."""
    ledger = call.state.ledger_of(call.caller)
    return ErasedForm(await call.state.run(ledger.erase_note, call.path["entry"]))


async def erase_principal(call: Call) -> ErasedForm:
    """Erase a principal's name; entries keep the random identity."""
    ledger = call.state.ledger_of(call.caller)
    erased = await call.state.run(ledger.erase_principal, call.path["principal"])
    call.state.forget_principals()
    return ErasedForm(erased)


async def who(call: Call) -> Json:
    """Show the caller and what its key allows."""
    return call.caller.to_dict()


async def make_key(call: Call) -> Json:
    """Make an API key. Its token is shown only this once; a principal may have several keys over time."""
    form: schemas.MakeKeyForm = call.form
    await call.state.run(require_existing, call.state.ledger_of(call.caller), form.accounts)
    token, key = await call.state.run(
        call.state.keys.make,
        form.principal,
        form.role,
        accounts=form.accounts,
        every_account=form.every_account,
        expires=form.expires,
        made_by=call.caller.principal,
        request=call.idempotency_key or "",
    )
    return {"token": token, "key": key.to_dict()}


async def list_keys(call: Call) -> Reply:
    """List the API keys, newest first, including revoked and expired ones."""
    query: schemas.KeysQuery = call.query
    found = await call.state.run(call.state.keys.keys, query.after, query.count + 1)
    page = found[: query.count]
    following = page[-1].id if len(page) < len(found) else None
    return page_reply(call, {"keys": [key.to_dict() for key in page], "next": following}, after=following)


async def show_key(call: Call) -> Json:
    """Show an API key by its id."""
    return (await call.state.run(call.state.keys.key, call.path["key"])).to_dict()


async def revoke_key(call: Call) -> Json:
    """Revoke an API key; every worker refuses it within a second."""
    key = await call.state.run(call.state.keys.revoke, call.path["key"], call.caller.principal)
    call.state.forget()
    return key.to_dict()


async def rotate_key(call: Call) -> Json:
    """Make another key for the same principal, role and accounts. The old one stays valid for `overlap` seconds."""
    token, key = await call.state.run(
        call.state.keys.rotate,
        call.path["key"],
        overlap=call.form.overlap,
        made_by=call.caller.principal,
        request=call.idempotency_key or "",
    )
    call.state.forget()
    return {"token": token, "key": key.to_dict()}


async def metrics(call: Call) -> Stream:
    """Send the metrics, for Prometheus."""
    state = call.state
    state.metrics.set_queue_depth(state.writer.unanswered)
    state.metrics.fold()  # on the event loop
    return Stream(CONTENT_TYPE.encode(), io.BytesIO(await state.compute(state.metrics.render, state.ledger)))


def health() -> HealthForm:
    """Return that the process responds."""
    return HealthForm("ok", version("odograph"))


async def ready(state: AppState) -> HealthForm:
    """Return whether keys and accounts can be read and charges can be written, after trying each."""
    return HealthForm(await state.readiness() or "ok", version("odograph"))


def _write_export(ledger: Ledger) -> IO[bytes]:
    """Write the export to a temporary file, so that an error is reported before the first byte is sent."""
    file = SpooledTemporaryFile(_EXPORT_IN_MEMORY)  # noqa: SIM115  closed when it was sent
    text = io.TextIOWrapper(file, encoding="utf-8", write_through=True)
    ledger.export(text)
    text.detach()
    file.seek(0)
    return file


def _read_export(ledger: Ledger, file: IO[bytes]) -> Verification:
    kept = None
    try:
        form = json.loads(file.readline(_EXPORT_IN_MEMORY))
    except (RecursionError, ValueError) as problem:
        raise BadDocument("line 1 is not JSON; nothing was imported") from problem
    if isinstance(form, dict) and "against" in form:
        kept = _read_checkpoint(form["against"])
    else:
        file.seek(0)
    if ledger.backend.balances():
        raise NotEmpty("this ledger is not empty; nothing was imported. Import into a new ledger")
    try:
        return ledger.import_(io.TextIOWrapper(file, encoding="utf-8"), checkpoint=kept)
    except LedgerCorrupt as problem:
        raise BadDocument(str(problem)) from problem


def _read_checkpoint(form: object) -> Checkpoint:
    """Read a checkpoint that was stored elsewhere."""
    try:
        kept = Checkpoint.from_dict(form if isinstance(form, dict) else {})
        check_checkpoint(kept)
    except (InvalidArgument, LedgerError) as problem:
        raise BadDocument(str(problem)) from problem
    return kept
