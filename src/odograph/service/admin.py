"""Administration: API keys, who asks, health, metrics."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version
from io import BytesIO

from odograph.ledger.entries import moment
from odograph.service import forms
from odograph.service.access import ApiKey
from odograph.service.answers import HealthForm, KeyForm, KeysForm, NewKeyForm, WhoForm
from odograph.service.door import Call, File
from odograph.service.metrics import CONTENT_TYPE
from odograph.service.office import Office

__all__ = ["health", "list_keys", "make_key", "metrics", "ready", "revoke_key", "show_key", "who"]


async def who(call: Call) -> WhoForm:
    """Say who asks, and what the key allows."""
    caller = call.caller
    accounts = None if caller.accounts is None else sorted(caller.accounts)
    return WhoForm(caller.principal, caller.role, caller.key, accounts, _time(caller.expires))


async def make_key(call: Call) -> NewKeyForm:
    """Make an API key. Its token is shown this once; the principal stays the same when its keys change."""
    form: forms.MakeKeyForm = call.form
    token, key = await call.office.run(
        call.office.keys.make,
        form.principal,
        form.role,
        accounts=form.accounts,
        every_account=form.every_account,
        expires=form.expires,
        made_by=call.caller.principal,
        request=call.key or "",
    )
    return NewKeyForm(token, _key(key))


async def list_keys(call: Call) -> KeysForm:
    """List the API keys, the newest first, with those that were revoked or have expired."""
    return KeysForm([_key(key) for key in await call.office.run(call.office.keys.keys)])


async def show_key(call: Call) -> KeyForm:
    """Show an API key by its id."""
    return _key(await call.office.run(call.office.keys.key, call.path["key"]))


async def revoke_key(call: Call) -> KeyForm:
    """Revoke an API key; every worker knows it within a second."""
    key = await call.office.run(call.office.keys.revoke, call.path["key"], call.caller.principal)
    call.office.forget()
    return _key(key)


async def metrics(call: Call) -> File:
    """Send what the service counts, for Prometheus."""
    office = call.office
    office.metrics.queued(office.pen.waiting)
    office.metrics.fold()  # here, where nothing is counted meanwhile
    return File(CONTENT_TYPE.encode(), BytesIO(await office.compute(office.metrics.render, office.ledger)))


def health() -> HealthForm:
    """Say that the process answers."""
    return HealthForm("ok", version("odograph"))


async def ready(office: Office) -> HealthForm:
    """Say whether keys and accounts can be read, and charges be written: it is tried, by the process that writes."""
    return HealthForm(await office.readiness() or "ok", version("odograph"))


def _key(key: ApiKey) -> KeyForm:
    return KeyForm(
        id=key.id,
        principal=key.principal,
        role=key.role,
        accounts=[*key.accounts],
        every_account=key.every_account,
        made=moment(key.made).isoformat(),
        made_by=key.made_by,
        expires=_time(key.expires),
        revoked=_time(key.revoked),
        revoked_by=key.revoked_by,
    )


def _time(microseconds: int | None) -> str | None:
    time: datetime | None = None if microseconds is None else moment(microseconds)
    return None if time is None else time.isoformat()
