"""Roles, callers and tokens: nothing is allowed, seen or taken for a token by leaving something out."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from odograph.errors import BadRequest, InvalidArgument, NotPermitted, OdographError
from odograph.service.auth import (
    PERMISSIONS,
    ApiKey,
    BrowserSession,
    Caller,
    Role,
    Verb,
    check_key_request,
    check_seconds,
    digest_of_token,
    equal_in_constant_time,
    looks_like_digest,
    looks_like_key_id,
    looks_like_token,
    new_key_id,
    new_secret,
    new_token,
)

EXPECTED = {
    "owner": "open close spend reserve resolve decide read verify export metrics administer erase run-rounds",
    "runner": "spend reserve resolve decide read run-rounds see-participants",
    "analyst": "spend reserve decide read",
    "auditor": "decide read verify export metrics",
}
KEY = ApiKey(
    "0123456789ab", "d" * 64, "ana", Role.ANALYST, ("feb", "jan"), every_account=False, made=10, made_by="bo"
)
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.text())
NAMES = st.sampled_from(["jan", "feb", "all:2030", "jan feb", "", "x" * 101, "../jan", "e\u0301", "\ud800", "jan\n"])


def wrong_cells(table: dict[Verb, frozenset[Role]]) -> set[tuple[str, Verb]]:
    """Where a table of roles is not what was agreed."""
    assert set(table) == {verb for verbs in EXPECTED.values() for verb in verbs.split()}
    return {
        (role, verb) for role in Role for verb in table if (role in table[verb]) != (verb in EXPECTED[role].split())
    }


def test_the_table_of_roles_is_what_was_agreed() -> None:
    assert wrong_cells(PERMISSIONS) == set()
    assert wrong_cells(PERMISSIONS | {"resolve": PERMISSIONS["spend"]}) == {
        ("analyst", "resolve")
    }  # the comparison sees a cell


@given(st.sampled_from(Role), st.sampled_from(sorted(PERMISSIONS)))
def test_a_caller_is_allowed_exactly_what_its_role_is_and_a_refusal_says_who_could(role: Role, verb: Verb) -> None:
    caller = Caller.of(replace(KEY, role=role))
    assert caller.may(verb) == (verb in EXPECTED[role].split())
    if caller.may(verb):
        caller.require(verb)
        return
    with pytest.raises(NotPermitted) as told:
        caller.require(verb)
    message = str(told.value)
    refused, _, allowed = message.partition(";")
    assert f"{role}'s" in refused
    assert verb in refused
    assert set(re.findall(r"(\w+)'s", allowed)) == {other for other in Role if verb in EXPECTED[other].split()}


def test_a_refusal_is_a_sentence() -> None:
    with pytest.raises(NotPermitted, match=r"^an analyst's key may not resolve; an owner's or a runner's key can$"):
        Caller.of(KEY).require("resolve")


def wrongly_seen(make: Callable[[ApiKey], Caller], key: ApiKey, names: Iterable[str]) -> set[str]:
    """Which accounts a caller sees that its key does not name."""
    caller = make(key)
    return {name for name in names if caller.sees(name) and not (key.every_account or name in key.accounts)}


class Sighted(Caller):
    """The broken twin: it sees everything."""

    def sees(self, name: str) -> bool:
        return bool(name) or True


@given(st.sets(NAMES), st.lists(st.text() | NAMES))
@example({"jan"}, ["jan", "feb"])
def test_a_bound_caller_sees_its_own_accounts_and_no_other(own: set[str], names: list[str]) -> None:
    key = replace(KEY, accounts=tuple(sorted(own)))
    assert wrongly_seen(Caller.of, key, names) == set()
    assert all(Caller.of(key).sees(name) for name in own)
    if set(names) - own:
        assert wrongly_seen(Sighted.of, key, names)


def test_a_caller_bound_to_nothing_sees_nothing() -> None:
    assert not Caller.of(replace(KEY, accounts=())).sees("jan")


def test_what_is_about_the_whole_ledger_is_not_for_a_bound_caller() -> None:
    with pytest.raises(NotPermitted, match="verify concerns the whole ledger") as told:
        Caller.of(KEY).require_every_account("verify")
    assert "jan" not in str(told.value)
    Caller.of(replace(KEY, accounts=(), every_account=True)).require_every_account("verify")


@given(st.integers(0, 100), st.none() | st.integers(0, 100), st.none() | st.integers(0, 100))
def test_a_key_is_valid_until_it_expires_or_is_revoked(now: int, expires: int | None, revoked: int | None) -> None:
    key = replace(KEY, expires=expires, revoked=revoked)
    assert key.valid_at(now) == (revoked is None and (expires is None or now < expires))


def test_what_is_printed_of_a_key_or_session_has_no_secret() -> None:
    assert KEY.digest not in repr(KEY)
    session = BrowserSession("e" * 64, KEY.id, new_secret(), 0, 1)
    assert session.digest not in repr(session)
    assert session.csrf not in repr(session)


def is_token(text: str) -> bool:
    """Say whether a text is odo_ and 32 bytes in base64url: written in another way than the code does it."""
    encoded = text.removeprefix("odo_").encode("utf-8", "surrogatepass")
    if not text.startswith("odo_") or len(encoded) != 43:
        return False
    try:
        return base64.urlsafe_b64encode(base64.b64decode(encoded + b"=", b"-_", validate=True)) == encoded + b"="
    except ValueError:
        return False


MUTATIONS: list[Callable[[str], str]] = [
    lambda token: token,
    lambda token: f"{token}\n",
    lambda token: f" {token}",
    lambda token: token[:-1],
    lambda token: f"{token[:-1]}B",
    lambda token: f"{token[:-1]}\u0663",  # a digit, but not one of ASCII's
    lambda token: token.upper(),
    lambda token: f"{token}=",
    lambda token: f"{token[:20]}+{token[21:]}",
    lambda token: f"{token[:20]}\0{token[21:]}",
]


@given(st.text() | st.builds(lambda change: change(new_token()), st.sampled_from(MUTATIONS)))
def test_a_token_is_known_by_its_form(text: str) -> None:
    assert looks_like_token(text) == is_token(text)


def test_the_comparison_of_forms_catches_a_loose_one() -> None:
    loose = re.compile(r"odo_[\w-]{43}$")
    caught = [change for change in MUTATIONS if bool(loose.match(text := change(new_token()))) != is_token(text)]
    assert len(caught) == 3  # a line break at the end, a last character of six bits, a digit that is not ASCII


def test_tokens_and_identities_are_new_each_time_and_of_their_form() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(map(looks_like_token, tokens))
    assert all(looks_like_digest(digest_of_token(token)) for token in tokens)
    assert len({new_key_id() for _ in range(1000)}) == 1000
    assert all(looks_like_key_id(new_key_id()) for _ in range(1000))
    assert not any(map(looks_like_digest, tokens))
    assert not looks_like_key_id("0123456789AB")
    assert not looks_like_key_id("0123456789ab\n")


@given(st.text(), st.text())
@example("\ud800", "\ud800")
@example("é", "e")
def test_any_two_texts_can_be_compared_and_digested(one: str, other: str) -> None:
    assert equal_in_constant_time(one, other) == (one == other)
    assert equal_in_constant_time(digest_of_token(one), digest_of_token(other)) == (one == other)


Check = Callable[[object, object, object, object, object], tuple[Role, tuple[str, ...], bool]]


def unsound(check: Check, request: tuple[Any, Any, Any, Any, Any]) -> str:  # noqa: PLR0911  one for each fault
    """Say what is wrong with how a request was answered; nothing if all is well."""
    principal, role, accounts, every_account, expires = request
    try:
        known, names, every = check(*request)
    except OdographError as error:
        return "" if len(str(error)) < 500 else "a message as long as what was sent"
    if not (isinstance(principal, str) and 0 < len(principal) <= 200 and principal.isprintable()):
        return "a principal that cannot be written"
    if not (isinstance(role, str) and known == role):
        return "another role than was asked for"
    if isinstance(accounts, str) or set(names) != set(accounts) or list(names) != sorted(set(names)):
        return "other accounts than were asked for"
    if any(re.search(r"\s", name) or not 0 < len(name) <= 100 for name in names):
        return "a name that no account can have"
    if every != (every_account or known is Role.OWNER) or every == bool(names):
        return "neither some accounts nor all of them"
    if expires is not None and (isinstance(expires, bool) or not 0 < float(expires) < float("inf")):
        return "a time that never comes or never ends"
    return ""


REQUESTS = st.tuples(
    ANYTHING | st.just("ana"),
    ANYTHING | st.sampled_from(Role) | st.sampled_from([*EXPECTED, "OWNER", "owner "]),
    ANYTHING | st.lists(NAMES) | st.sets(st.sampled_from(["jan", "feb"])),
    ANYTHING | st.booleans(),
    ANYTHING | st.sampled_from([60, 0.5, 10**400, -1, 0]),
)


@given(REQUESTS)
@example(("ana", "analyst", ["jan"], False, 60))
@example(("ana", "analyst", "jan", False, None))
@example(("x" * 10**6, "y" * 10**6, ["z" * 10**6], "w" * 10**6, "v" * 10**6))
@example(("ana", "analyst", ["z" * 10**6], False, None))
@example(("ana", "y" * 10**6, [], True, None))
@example(("ana", "owner", [], False, 10**400))
def test_a_key_is_made_only_as_was_clearly_asked_for(request: tuple[object, object, object, object, object]) -> None:
    assert unsound(check_key_request, request) == ""


def careless(
    _: object,
    role: object,
    accounts: Any,  # noqa: ANN401  whatever is sent
    every_account: object,
    __: object,
) -> tuple[Role, tuple[str, ...], bool]:
    """The broken twin: whoever names no account gets all of them."""
    names = tuple(accounts)
    return Role(str(role)), names, bool(every_account) or not names


def test_a_careless_check_is_caught() -> None:
    assert unsound(careless, ("ana", "analyst", (), False, None)) == "neither some accounts nor all of them"
    assert unsound(careless, ("ana", "analyst", "jan", False, None)) == "other accounts than were asked for"
    assert unsound(careless, ("", "analyst", ["jan"], False, None)) == "a principal that cannot be written"
    assert unsound(careless, ("ana", "analyst", ["a b"], False, None)) == "a name that no account can have"
    assert unsound(careless, ("ana", "analyst", ["jan"], False, -1)) == "a time that never comes or never ends"


def test_what_is_left_out_is_said_or_refused() -> None:
    assert check_key_request("bo", "owner", (), every_account=False, expires=None) == (Role.OWNER, (), True)
    assert check_key_request("bo", Role.RUNNER, ("b", "a", "b"), every_account=False, expires=1) == (
        Role.RUNNER,
        ("a", "b"),
        False,
    )
    assert check_key_request("bo", "auditor", (), every_account=True, expires=None) == (Role.AUDITOR, (), True)


@pytest.mark.parametrize(
    ("kind", "field", "request_"),
    [
        (InvalidArgument, "principal", ("a\nb", "owner", (), False, None)),
        (BadRequest, "role", ("ana", "root", (), False, None)),
        (BadRequest, "role", ("ana", None, (), False, None)),
        (InvalidArgument, "accounts", ("ana", "analyst", ("a b",), False, None)),
        (BadRequest, "accounts must be empty", ("ana", "owner", ("jan",), False, None)),
        (BadRequest, "accounts must name at least one", ("ana", "analyst", (), False, None)),
        (BadRequest, "accounts must name at least one", ("ana", "auditor", (), False, None)),
        (BadRequest, "both", ("ana", "runner", ("jan",), True, None)),
        (BadRequest, "at most 1000", ("ana", "runner", tuple(f"a{i}" for i in range(1001)), False, None)),
        (BadRequest, "every_account", ("ana", "runner", (), "no", None)),
        (BadRequest, "expires", ("ana", "owner", (), False, 0)),
        (BadRequest, "expires", ("ana", "owner", (), False, float("nan"))),
        (BadRequest, "expires", ("ana", "owner", (), False, float("inf"))),
        (BadRequest, "expires", ("ana", "owner", (), False, True)),
    ],
)
def test_a_refused_request_names_the_field(
    kind: type[OdographError], field: str, request_: tuple[object, object, object, object, object]
) -> None:
    with pytest.raises(kind, match=field):
        check_key_request(*request_)


def test_seconds_have_an_end() -> None:
    assert check_seconds(1e9, "expires") == 1e9
    with pytest.raises(BadRequest, match="1,000,000,000"):
        check_seconds(1e9 + 1, "expires")
