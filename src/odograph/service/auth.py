"""Authentication and authorization: roles, API keys, browser sessions, callers, a proxy that signs people in, rates.

A token is shown once, when its key is made; only its SHA-256 digest is stored. A token has 256 random bits and cannot
be guessed from its digest, so a slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic_ns
from typing import Any, Final, Literal, Self, TypeAlias

from odograph.errors import BadRequest, InvalidArgument, NotAuthenticated, NotPermitted
from odograph.ledger.entries import check_key, check_name, moment, shown

__all__ = [
    "PERMISSIONS",
    "ApiKey",
    "BrowserSession",
    "Caller",
    "RateLimit",
    "Role",
    "TrustedProxy",
    "Verb",
    "check_key_request",
    "check_seconds",
    "digest_of_token",
    "equal_in_constant_time",
    "looks_like_digest",
    "looks_like_key_id",
    "looks_like_token",
    "new_key_id",
    "new_secret",
    "new_token",
]

_MAX_SECONDS: Final = 1_000_000_000  # about thirty years
_MAX_ACCOUNTS: Final = 1000  # of one key
_NANOSECONDS: Final = 1_000_000_000  # in a second
_MIN_SWEEP_SIZE: Final = 1024  # buckets of a rate limit: fewer are not searched for full ones
# 32 bytes are 43 characters of base64url; the last character has only four bits.
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
    "run-rounds",
    "see-participants",
]

_OWNER: Final = frozenset({Role.OWNER})
_SPENDERS: Final = _OWNER | {Role.ANALYST, Role.RUNNER}
_AUDITORS: Final = _OWNER | {Role.AUDITOR}
_ALL: Final = frozenset(Role)

PERMISSIONS: Final[dict[Verb, frozenset[Role]]] = {
    "open": _OWNER,
    "close": _OWNER,
    "spend": _SPENDERS,
    "reserve": _SPENDERS,
    # Not an analyst, who could run a mechanism, look at the answer and void the charge.
    "resolve": _OWNER | {Role.RUNNER},
    "decide": _ALL,  # it spends nothing
    "read": _ALL,
    "verify": _AUDITORS,
    "export": _AUDITORS,
    "metrics": _AUDITORS,
    "administer": _OWNER,
    "erase": _OWNER,
    # Not an analyst, who learns nothing of who takes part, and could therefore not run the mechanism.
    "run-rounds": _OWNER | {Role.RUNNER},
    # It depends on the data: for the program that runs the mechanism, and for no one who looks at its answers.
    "see-participants": frozenset({Role.RUNNER}),
}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key: its principal, role and accounts, and when it was made. Times are microseconds, UTC."""

    id: str
    digest: str = field(repr=False)
    principal: str
    role: Role
    accounts: tuple[str, ...]  # sorted; empty if the key is for every account
    every_account: bool
    made: int
    made_by: str
    expires: int | None = None
    revoked: int | None = None
    revoked_by: str = ""

    def valid_at(self, now: int) -> bool:
        """Return whether the key is neither revoked nor expired at this time."""
        return self.revoked is None and (self.expires is None or now < self.expires)

    def to_dict(self) -> dict[str, Any]:
        """Return the key in plain types, without its digest."""
        return {
            "id": self.id,
            "principal": self.principal,
            "role": str(self.role),
            "accounts": [*self.accounts],
            "every_account": self.every_account,
            "made": moment(self.made).isoformat(),
            "made_by": self.made_by,
            "expires": None if self.expires is None else moment(self.expires).isoformat(),
            "revoked": None if self.revoked is None else moment(self.revoked).isoformat(),
            "revoked_by": self.revoked_by,
        }


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A browser that signed in with a key. Its cookie holds a secret, of which the digest is stored."""

    digest: str = field(repr=False)
    api_key_id: str
    csrf: str = field(repr=False)
    began: int
    ends: int


@dataclass(frozen=True, slots=True)
class Caller:
    """The principal of a request and what its key allows. `accounts` is None for a key to every account."""

    principal: str
    role: Role
    api_key_id: str
    accounts: frozenset[str] | None
    expires: int | None = None

    @classmethod
    def of(cls, key: ApiKey) -> Self:
        """Return the caller of a valid key."""
        accounts = None if key.every_account else frozenset(key.accounts)
        return cls(key.principal, key.role, key.id, accounts, key.expires)

    def to_dict(self) -> dict[str, Any]:
        """Return the caller in plain types."""
        return {
            "principal": self.principal,
            "role": str(self.role),
            "key": self.api_key_id,
            "accounts": None if self.accounts is None else sorted(self.accounts),
            "expires": None if self.expires is None else moment(self.expires).isoformat(),
        }

    def may(self, verb: Verb) -> bool:
        """Return whether the role allows the verb."""
        return self.role in PERMISSIONS[verb]

    def require(self, verb: Verb) -> None:
        """Raise `NotPermitted` unless the role allows the verb."""
        if not self.may(verb):
            allowed = " or ".join(_possessive(role) for role in Role if role in PERMISSIONS[verb])
            raise NotPermitted(f"{_possessive(self.role)} key may not {verb}; {allowed} key can")

    def sees(self, name: str) -> bool:
        """Return whether the caller may know of an account with this name."""
        return self.accounts is None or name in self.accounts

    def require_every_account(self, verb: Verb) -> None:
        """Raise `NotPermitted` for a caller bound to some accounts: the verb concerns all of them."""
        if self.accounts is not None:
            raise NotPermitted(
                f"{verb} concerns the whole ledger, but this key is bound to some accounts; use a key made with"
                " every_account"
            )


_HEADER_NAME: Final = re.compile("[A-Za-z0-9-]{1,100}")
# What the service or its server reads, or a client may send for another reason.
_TAKEN_HEADERS: Final = frozenset(
    {
        *("accept", "authorization", "connection", "content-length", "content-type", "cookie", "expect", "host"),
        *("idempotency-key", "origin", "referer", "transfer-encoding", "upgrade", "user-agent", "x-request-id"),
    }
)


class TrustedProxy:
    """A proxy that authenticates people and names them in a header, which counts from the proxy's address only.

    The name is that of a principal. It grants nothing by itself: an owner has made an API key for that principal.
    """

    __slots__ = ("_network", "header")

    def __init__(self, address: str, header: str) -> None:
        try:
            self._network = ipaddress.ip_network(address)
        except ValueError:
            raise InvalidArgument(
                f"trusted_proxy must be the proxy's address, or a network such as 10.0.0.0/29 (got {address!r})"
            ) from None
        if self._network.prefixlen == 0:
            raise InvalidArgument(
                f"trusted_proxy must not be every address (got {address!r}): everybody could sign in as anybody"
            )
        self.header = header.lower()
        if not _HEADER_NAME.fullmatch(header) or self.header in _TAKEN_HEADERS:
            raise InvalidArgument(
                "proxy_header must be a header of the proxy's own, of letters, digits and -, such as"
                f" X-Forwarded-Email (got {header!r})"
            )

    def principal(self, address: str | None, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the principal that the proxy names, None without the header.

        A header that cannot be believed is refused, and not overlooked: from another address, twice, empty.
        """
        name = self.header.encode()
        values = [value for one, value in headers if one == name]
        if not values:
            return None
        if not self._trusts(address):
            raise NotPermitted(f"the header {self.header} is accepted from the trusted proxy only; do not send it")
        if len(values) > 1:
            raise BadRequest(
                f"the header {self.header} occurs more than once; the proxy must replace the client's own"
            )
        try:
            return check_key(values[0].decode("utf-8"), "principal")
        except (InvalidArgument, UnicodeDecodeError):
            raise NotAuthenticated(f"the proxy sent no name in the header {self.header}; sign in there") from None

    def _trusts(self, address: str | None) -> bool:
        try:
            found = ipaddress.ip_address(address or "")
        except ValueError:  # no address, as of a Unix socket
            return False
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return (found if mapped is None else mapped) in self._network


def check_key_request(
    principal: object, role: object, accounts: object, every_account: object, expires: object
) -> tuple[Role, tuple[str, ...], bool]:
    """Return the role, the sorted accounts and whether it is every account; raise `BadRequest` if no key can be so.

    An owner always has every account. Any other key names its accounts or asks for every account: leaving both out
    gives access to nothing.
    """
    check_key(principal, "principal")
    if not isinstance(role, str) or role not in tuple(Role):
        raise BadRequest(f"role must be one of {', '.join(Role)} (got {shown(role)})")
    if not isinstance(every_account, bool):
        raise BadRequest(f"every_account must be true or false (got {shown(every_account)})")
    if isinstance(accounts, str) or not isinstance(accounts, Iterable):
        raise BadRequest(f"accounts must be a list of names (got {shown(accounts)})")
    names = tuple(sorted({check_name(name, "accounts") for name in accounts}))
    if expires is not None:
        check_seconds(expires, "expires")
    known = Role(role)
    if known is Role.OWNER and names:
        raise BadRequest(f"accounts must be empty for an owner, who has every account (got {names[0]!r})")
    if names and every_account:
        raise BadRequest(f"pass either accounts or every_account (got both); leave out {names[0]!r}")
    if known is not Role.OWNER and not names and not every_account:
        raise BadRequest(
            f"accounts must name at least one account for {_possessive(known)} key; or pass every_account"
        )
    if len(names) > _MAX_ACCOUNTS:
        raise BadRequest(f"accounts must be at most {_MAX_ACCOUNTS} names (got {len(names)}); or pass every_account")
    return known, names, every_account or known is Role.OWNER


def check_seconds(seconds: object, field: str) -> float:
    """Return a number of seconds, or raise `BadRequest`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MAX_SECONDS:
        raise BadRequest(f"{field} must be seconds, above 0 and at most {_MAX_SECONDS:,} (got {shown(seconds)})")
    return seconds


def new_token() -> str:
    """Return a new token, which a program sends to authenticate."""
    return f"odo_{new_secret()}"


def new_secret() -> str:
    """Return 256 random bits as text that fits into a cookie or a form."""
    return secrets.token_urlsafe(32)


def new_key_id() -> str:
    """Return a new key id. It is public: logs and pages show it."""
    return secrets.token_hex(6)


def digest_of_token(token: str) -> str:
    """Return the digest under which a token, or any other secret, is stored."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def looks_like_token(text: str) -> bool:
    """Return whether a string has the form of a token, before anything is looked up."""
    return _TOKEN.fullmatch(text) is not None


def looks_like_digest(text: str) -> bool:
    """Return whether a string has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def looks_like_key_id(text: str) -> bool:
    """Return whether a string has the form of a key id."""
    return _KEY_ID.fullmatch(text) is not None


def equal_in_constant_time(one: str, other: str) -> bool:
    """Compare two strings in a time that does not depend on where they differ."""
    if one.isascii() and other.isascii():
        return hmac.compare_digest(one, other)
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))


def _possessive(role: Role) -> str:
    return f"{'a' if role is Role.RUNNER else 'an'} {role}'s"


class RateLimit:
    """A token bucket per API key: it holds at most `burst` tokens and is filled at `rate` a second; 0 is no limit.

    In any t seconds one key is admitted at most burst + rate * t times, exactly.
    """

    # A bucket is stored as the moment at which it is full again: one integer, so sums are exact.
    __slots__ = ("_capacity", "_clock", "_full_at", "_policy", "_sweep_at", "_token")

    def __init__(self, rate: float, burst: float | None = None, *, clock: Callable[[], int] = monotonic_ns) -> None:
        if not (rate == 0 or 1e-3 <= rate <= 1e9):
            raise InvalidArgument(f"rate must be 0 (no limit) or from 0.001 to 1e9 requests a second (got {rate!r})")
        burst = max(1.0, 2.0 * rate) if burst is None else burst
        if not 1 <= burst <= 1e12:
            raise InvalidArgument(f"burst must be from 1 to 1e12 requests (got {burst!r})")
        self._clock = clock
        self._token = math.ceil(_NANOSECONDS / rate) if rate else 0  # nanoseconds in which one token is added
        self._capacity = math.floor(burst) * self._token
        window = -(-self._capacity // _NANOSECONDS)  # seconds
        self._policy = (b"ratelimit-policy", b'"key";q=%d;w=%d' % (math.floor(burst), window))
        self._full_at: dict[str, int] = {}
        self._sweep_at = _MIN_SWEEP_SIZE

    def take(self, api_key_id: str, count: int = 1) -> float:
        """Take `count` tokens and return 0; or take none and return the seconds until they will be there.

        That is infinity for more tokens than the bucket holds.
        """
        now = self._clock()
        full_at = self._full_at.get(api_key_id, now)
        if full_at < now:  # noqa: PLR1730  this runs for every request, and max() takes twice as long
            full_at = now
        after = full_at + count * self._token
        early = after - now - self._capacity
        if early > 0:
            return early / _NANOSECONDS if count * self._token <= self._capacity else math.inf
        self._full_at[api_key_id] = after
        if len(self._full_at) > self._sweep_at:
            self._sweep(now)
        return 0.0

    def headers(self, api_key_id: str, *, policy: bool = True) -> tuple[tuple[bytes, bytes], ...]:
        """Return the fields of draft-ietf-httpapi-ratelimit-headers for a key; none without a limit.

        `r` requests may be made now, and `t` seconds from now as many as `q`, if none is made until then. A bucket
        that is empty is full again after `w` seconds.
        """
        if not self._token:
            return ()
        missing = max(0, self._full_at.get(api_key_id, 0) - self._clock())
        left = (self._capacity - missing) // self._token
        state = (b"ratelimit", b'"key";r=%d;t=%d' % (max(0, left), -(-missing // _NANOSECONDS)))
        return (state, self._policy) if policy else (state,)

    def __len__(self) -> int:
        return len(self._full_at)

    def _sweep(self, now: int) -> None:
        """Forget full buckets, which equal new ones; the threshold doubles, so a call takes O(1) on average."""
        self._full_at = {key: full_at for key, full_at in self._full_at.items() if full_at > now}
        self._sweep_at = max(_MIN_SWEEP_SIZE, 2 * len(self._full_at))
