"""Who may do what: roles, API keys, and what a caller may do and see. Pure, but for fresh random tokens.

A token is shown once, when its key is made; only its SHA-256 is kept. It has 256 random bits, so that nobody can
guess it from the digest, and a slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, Self, TypeAlias

from odograph.errors import BadRequest, NotPermitted
from odograph.ledger.entries import check_key, check_name, shown

__all__ = [
    "MAY",
    "ApiKey",
    "Caller",
    "Role",
    "Session",
    "Verb",
    "check_key_request",
    "check_seconds",
    "digest_of_token",
    "looks_like_digest",
    "looks_like_key_id",
    "looks_like_token",
    "new_key_id",
    "new_secret",
    "new_token",
    "same",
]

_LONGEST: Final = 1_000_000_000  # seconds: some thirty years
_MOST_ACCOUNTS: Final = 1000
# 32 bytes are 43 characters of base64url, and the last of them has only four bits.
_TOKEN: Final = re.compile("odo_[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]")
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_KEY_ID: Final = re.compile("[0-9a-f]{12}")


class Role(StrEnum):
    """What a key is for."""

    OWNER = "owner"
    ANALYST = "analyst"
    RUNNER = "runner"
    AUDITOR = "auditor"


Verb: TypeAlias = Literal[
    "open",
    "close",
    "spend",
    "reserve",
    "resolve",
    "decide",
    "read",
    "verify",
    "export",
    "metrics",
    "administer",
    "erase",
]

_OWNER: Final = frozenset({Role.OWNER})
_SPENDERS: Final = _OWNER | {Role.ANALYST, Role.RUNNER}
_AUDITORS: Final = _OWNER | {Role.AUDITOR}
_ALL: Final = frozenset(Role)

MAY: Final[dict[Verb, frozenset[Role]]] = {
    "open": _OWNER,
    "close": _OWNER,
    "spend": _SPENDERS,
    "reserve": _SPENDERS,
    # Not an analyst: one who could run, look and then void would get answers for free.
    "resolve": _OWNER | {Role.RUNNER},
    "decide": _ALL,  # asking spends nothing
    "read": _ALL,
    "verify": _AUDITORS,
    "export": _AUDITORS,
    "metrics": _AUDITORS,
    "administer": _OWNER,
    "erase": _OWNER,
}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: who has it, what for, since when and until when. Times are microseconds, UTC."""

    id: str
    digest: str = field(repr=False)
    principal: str
    role: Role
    accounts: tuple[str, ...]  # sorted; none if it is for every account
    every_account: bool
    made: int
    made_by: str
    expires: int | None = None
    revoked: int | None = None
    revoked_by: str = ""

    def valid_at(self, now: int) -> bool:
        """Say whether the key opens anything at this time."""
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that signed in with a key. The secret is in its cookie; its digest is kept."""

    digest: str = field(repr=False)
    key: str  # the key's identity
    csrf: str = field(repr=False)
    began: int
    ends: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the key allows. `accounts` is None for a key that sees all of them."""

    principal: str
    role: Role
    key: str  # the key's identity
    accounts: frozenset[str] | None
    expires: int | None = None

    @classmethod
    def of(cls, key: ApiKey) -> Self:
        """Return the caller that a valid key stands for."""
        accounts = None if key.every_account else frozenset(key.accounts)
        return cls(key.principal, key.role, key.id, accounts, key.expires)

    def may(self, verb: Verb) -> bool:
        """Say whether the role allows the verb."""
        return self.role in MAY[verb]

    def require(self, verb: Verb) -> None:
        """Raise `NotPermitted` unless the role allows the verb."""
        if not self.may(verb):
            who = " or ".join(_whose(role) for role in Role if role in MAY[verb])
            raise NotPermitted(f"{_whose(self.role)} key may not {verb}; {who} key can")

    def sees(self, name: str) -> bool:
        """Say whether the caller may know that there is an account of this name."""
        return self.accounts is None or name in self.accounts

    def require_whole(self, verb: Verb) -> None:
        """Raise `NotPermitted` for a caller bound to accounts: the verb is about all of them."""
        if self.accounts is not None:
            raise NotPermitted(
                f"{verb} is about the whole ledger, and this key is bound to some accounts; a key made with"
                " every_account can"
            )


def check_key_request(
    principal: object, role: object, accounts: object, every_account: object, expires: object
) -> tuple[Role, tuple[str, ...], bool]:
    """Return role, sorted accounts and whether it is every account, if a key can be made so; or say what is wrong.

    An owner always has every account. Any other key names its accounts or says that it is for all: nothing is given
    by leaving something out.
    """
    check_key(principal, "principal")
    if not isinstance(role, str) or role not in tuple(Role):
        raise BadRequest(f"role must be one of {', '.join(Role)}, and {shown(role)} is not")
    if not isinstance(every_account, bool):
        raise BadRequest(f"every_account must be true or false, and {shown(every_account)} is neither")
    if isinstance(accounts, str) or not isinstance(accounts, Iterable):
        raise BadRequest(f"accounts must be a list of names, and {shown(accounts)} is not")
    names = tuple(sorted({check_name(name, "accounts") for name in accounts}))
    if expires is not None:
        check_seconds(expires, "expires")
    known = Role(role)
    if known is Role.OWNER and names:
        raise BadRequest(f"accounts must be empty for an owner, who has every account, and names {names[0]!r}")
    if names and every_account:
        raise BadRequest(f"a key has either accounts or every_account, and this one has both; leave out {names[0]!r}")
    if known is not Role.OWNER and not names and not every_account:
        raise BadRequest(f"accounts must name at least one account for {_whose(known)} key, or say every_account")
    if len(names) > _MOST_ACCOUNTS:
        raise BadRequest(f"accounts must be at most {_MOST_ACCOUNTS} names, not {len(names)}; say every_account")
    return known, names, every_account or known is Role.OWNER


def check_seconds(seconds: object, field: str) -> float:
    """Return a number of seconds if it can be one."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST:
        raise BadRequest(f"{field} must be seconds, above 0 and at most {_LONGEST:,}, and {shown(seconds)} is not")
    return seconds


def new_token() -> str:
    """Return a new token: what a program sends to be known."""
    return f"odo_{new_secret()}"


def new_secret() -> str:
    """Return 256 random bits as text, fit for a cookie or a form."""
    return secrets.token_urlsafe(32)


def new_key_id() -> str:
    """Return a new identity for a key. It is public: logs and pages show it."""
    return secrets.token_hex(6)


def digest_of_token(token: str) -> str:
    """Return what is kept of a token, or of any other secret."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def looks_like_token(text: str) -> bool:
    """Say whether a text can be a token, before anything is looked up."""
    return _TOKEN.fullmatch(text) is not None


def looks_like_digest(text: str) -> bool:
    """Say whether a text can be a digest."""
    return _DIGEST.fullmatch(text) is not None


def looks_like_key_id(text: str) -> bool:
    """Say whether a text can be the identity of a key."""
    return _KEY_ID.fullmatch(text) is not None


def same(one: str, other: str) -> bool:
    """Compare two texts in a time that does not tell where they differ."""
    if one.isascii() and other.isascii():
        return hmac.compare_digest(one, other)
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))


def _whose(role: Role) -> str:
    return f"{'a' if role is Role.RUNNER else 'an'} {role}'s"
