"""The form that opens an account: what was typed becomes a policy, or comes back with what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from odograph.core.policy import Policy
from odograph.core.rules import RULES
from odograph.ledger.entries import check_name
from odograph.ledger.ledger import Ledger
from odograph.service import views
from odograph.service.access import Caller, new_secret
from odograph.service.answers import Problem
from odograph.service.dashboard.markup import Answer

__all__ = ["choices", "open_page", "policy_of"]

_USUAL: Final = {
    "name": "",
    "epsilon": "1",
    "delta": "1e-6",
    "rule": "exact",
    "delta_steps": "",
    "unit": "person",
    "neighbours": "add-remove",
    "parent": "",
    "successor_of": "",
    "dataset": "",
    "note": "",
}


def policy_of(typed: Mapping[str, str]) -> Policy:
    """Make the policy that was typed, numbers read exactly; or say what is wrong, also with the account's name."""
    check_name(typed.get("name", "").strip())
    return Policy(
        typed.get("epsilon", "").strip(),
        typed.get("delta", "").strip(),
        delta_steps=typed.get("delta_steps", "").strip() or None,
        rule=typed.get("rule", "exact"),
        unit=typed.get("unit", "").strip(),
        neighbours=typed.get("neighbours", ""),
    )


def choices(typed: Mapping[str, str]) -> dict[str, Any]:
    """Return how `Ledger.open_account` is called, beside the policy."""
    texts = {field: typed.get(field, "").strip() for field in ("parent", "successor_of", "dataset", "note")}
    # The form's own key: sent twice, it opens one account.
    return {"name": typed.get("name", "").strip(), "key": typed.get("key") or None, **texts}


def open_page(
    ledger: Ledger, caller: Caller, typed: Mapping[str, str] | None = None, problem: Problem | None = None
) -> Answer:
    """Return the form, with what was typed and what is wrong with it."""
    caller.require("open")
    kept = _USUAL if typed is None else {field: typed.get(field, "") for field in _USUAL}
    names = [row.name for row in views.rows(ledger, caller)]
    status, message = (200, "") if problem is None else (problem.status, problem.detail)
    key = (typed or {}).get("key") or new_secret()
    context = {"typed": kept, "message": message, "rules": sorted(RULES), "names": names, "key": key}
    twin = {"fields": kept, "rules": sorted(RULES), "message": message}
    return Answer("open.html", "Open an account", twin, context, status)
