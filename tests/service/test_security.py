"""Who gets in, and who may do what: keys of every wrong kind, and every route for every role."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

import attacks
import httpx
import pytest
from service_server import ServiceThread

from odograph.errors import NotAuthenticated
from odograph.service import state
from odograph.service.auth import PERMISSIONS, ApiKey, Caller, Role, digest_of_token, new_token
from odograph.service.endpoint import Route
from odograph.service.key_store import connect_keys
from odograph.service.routes import ROUTES
from odograph.service.state import AppState

KEY_LOOKUP_TTL: Final = 1.0  # seconds for which a worker may believe a key that another process has revoked
OPEN_TO_ALL: Final = ("/healthz", "/readyz", "/v1/openapi.json")


@pytest.fixture
def owner(service: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(service) as client:
        attacks.open_account(client, "census")
        attacks.open_account(client, "quokka")
        yield client


def key_of(service: ServiceThread, token: str) -> ApiKey:
    with connect_keys(service.settings.url) as keys:
        found = keys.find(digest_of_token(token))
    assert found is not None
    return found


def revoke(service: ServiceThread, token: str) -> None:
    """Revoke a key as another process does."""
    with connect_keys(service.settings.url) as keys:
        keys.revoke(key_of(service, token).id, "test")


def bad_values(service: ServiceThread) -> tuple[list[bytes], list[bytes]]:
    """Return values of Authorization that open nothing: those without a bearer's token, and those with one."""
    good = service.token("gina").encode()
    revoked, expired = service.token("rita", "analyst"), service.token("eva", "analyst", expires=0.001)
    revoke(service, revoked)
    time.sleep(0.01)
    without = [b"", b"Bearer", b"Basic " + good, b"Token " + good, b"Digest x", b"Bearer:" + good, good, b"\xff\xfe"]
    within = [
        b"x",
        good[:-1],
        good + b"A",
        good[4:],
        good.swapcase(),
        b"odo_" + b"A" * 43,
        new_token().encode(),
        revoked.encode(),
        expired.encode(),
        digest_of_token(good.decode()).encode(),
        key_of(service, good.decode()).id.encode(),
        good + b" " + good,
        good + b", Bearer " + good,
        b'"' + good + b'"',
        good[:20] + b"\t" + good[20:],
        good[:20] + b"\xc3\xa9" + good[22:],
        b"odo_" + b"A" * 50_000,
    ]
    return without, [b"Bearer " + value for value in within] + [b"bEaReR " + value for value in within]


def check_nothing_opens(service: ServiceThread) -> None:
    """Assert that every bad key has the same answer: it tells at most whether there was something like a key."""
    without, within = bad_values(service)
    with attacks.reach(service, None) as nobody:
        answers = [
            [nobody.get("/v1/me", headers=[(b"Authorization", value)]) for value in values]
            for values in (without, within)
        ]
        answers[0].append(nobody.get("/v1/me"))
    for group in answers:
        for answer in group:
            attacks.check_problem(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["code"] == "NotAuthenticated"
            assert attacks.same_words(answer) == attacks.same_words(group[0])


def test_a_bad_key_of_any_kind_opens_nothing_and_the_answer_does_not_tell_which_kind(service: ServiceThread) -> None:
    check_nothing_opens(service)


def test_keys_that_were_believed_for_ever_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApiKey, "valid_at", lambda *_: True)
    with pytest.raises(AssertionError):
        check_nothing_opens(service)


def test_an_answer_that_told_why_a_key_is_bad_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = AppState.admit

    async def telling(self: AppState, token: str) -> Caller:
        key = self.keys.find(digest_of_token(token))
        if key is not None and key.revoked is not None:
            raise NotAuthenticated("this API key was revoked")
        return await admit(self, token)

    monkeypatch.setattr(AppState, "admit", telling)
    with pytest.raises(AssertionError):
        check_nothing_opens(service)


def test_control_characters_in_a_key_do_not_get_past_the_server(service: ServiceThread) -> None:
    token = service.token().encode()
    for odd in (b"\0", b"\r", b"\n", b"\x7f", b"\x0b"):
        for value in (token + odd, odd + token, token[:9] + odd + token[9:]):
            asked = b"GET /v1/me HTTP/1.1\r\nHost: odograph\r\nAuthorization: Bearer " + value + b"\r\n\r\n"
            answer = attacks.raw(service, asked)
            assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ")), (value, answer)
    assert attacks.raw(
        service, b"GET /v1/me HTTP/1.1\r\nHost: odograph\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
    ).startswith(b"HTTP/1.1 200 ")


def test_two_keys_in_one_request_are_refused_whichever_of_them_is_good(service: ServiceThread) -> None:
    good, other = (f"Bearer {token}".encode() for token in (service.token("gina"), new_token()))
    with attacks.reach(service, None) as nobody:
        for pair in ((good, good), (good, other), (other, good)):
            headers = [(b"Authorization", pair[0]), (b"authorization", pair[1])]
            attacks.check_problem(nobody.get("/v1/me", headers=headers), 400, 401)


def test_every_route_asks_for_a_key_before_it_looks_at_anything(service: ServiceThread, owner: httpx.Client) -> None:
    before = attacks.state(owner)
    with attacks.reach(service, None) as nobody, attacks.reach(service, new_token()) as stranger:
        for route in ROUTES:
            for name in ("census", "nothing"):
                for client in (nobody, stranger):
                    answer = client.request(
                        route.method, attacks.path_of(route, name=name) + "?odd=1", content=b"{", headers=attacks.JSON
                    )
                    attacks.check_problem(answer, 401)
        for path in OPEN_TO_ALL:
            assert nobody.get(path).status_code == 200
            assert "quokka" not in nobody.get(path).text
    assert attacks.state(owner) == before


def test_a_token_in_the_query_is_worth_nothing(service: ServiceThread) -> None:
    token = service.token()
    with attacks.reach(service, None) as nobody:
        for name in ("token", "access_token", "api_key", "key", "authorization"):
            attacks.check_problem(nobody.get("/v1/me", params={name: token}), 401)
            attacks.check_problem(nobody.get("/v1/me", params={name: f"Bearer {token}"}), 401)


def test_a_cookie_is_worth_nothing_under_v1_and_a_token_in_one_neither(service: ServiceThread) -> None:
    token = service.token()
    with connect_keys(service.settings.url) as keys:
        secret, _ = keys.begin_session(key_of(service, token).id)
    with attacks.reach(service, None) as browser:
        inside = browser.get("/", headers={"Cookie": f"odograph_session={secret}"})
        assert inside.status_code == 200, "the cookie is a good one"
        for value in (f"odograph_session={secret}", f"odograph_session={token}", f"token={token}"):
            for route in ROUTES:
                answer = browser.request(route.method, attacks.path_of(route), headers={"Cookie": value})
                attacks.check_problem(answer, 401)


def test_a_token_is_worth_nothing_on_the_pages(service: ServiceThread) -> None:
    with attacks.reach(service, service.token()) as client:
        for path in ("/", "/audit", "/open", "/accounts/census"):
            assert client.get(path).status_code in {303, 401}


def test_a_key_that_is_revoked_over_http_is_worth_nothing_from_then_on(
    service: ServiceThread, owner: httpx.Client
) -> None:
    token = service.token("rita", "analyst", "census")
    with attacks.reach(service, token) as analyst:
        assert analyst.get("/v1/me").status_code == 200
        assert owner.delete(f"/v1/keys/{key_of(service, token).id}").status_code == 200
        attacks.check_problem(analyst.get("/v1/me"), 401)


def test_a_key_is_rotated_over_http_by_an_owner_alone(service: ServiceThread, owner: httpx.Client) -> None:
    token = service.token("rita", "analyst", "census")
    path = f"/v1/keys/{key_of(service, token).id}/rotate"
    with attacks.reach(service, token) as analyst:
        attacks.check_problem(attacks.post(analyst, path, {}, key="r"), 403)
        attacks.check_problem(attacks.post(owner, path, {"overlap": -1}, key="r"), 422)
        made = attacks.post(owner, path, {"overlap": 60}, key="r")
        assert (made.status_code, made.json()["key"]["accounts"]) == (201, ["census"])
        attacks.check_problem(attacks.post(owner, path, {"overlap": 60}, key="r"), 422)
        assert analyst.get("/v1/me").json()["expires"] is not None
        again = attacks.post(owner, f"/v1/keys/{made.json()['key']['id']}/rotate", {}, key="r-2")
        assert again.status_code == 201
        assert analyst.get("/v1/me").status_code == 200
    with attacks.reach(service, made.json()["token"]) as ended, attacks.reach(service, again.json()["token"]) as new:
        attacks.check_problem(ended.get("/v1/me"), 401)
        assert new.get("/v1/me").json()["principal"] == "rita"


def check_revoked_elsewhere(service: ServiceThread) -> None:
    """Assert that a key which another process revokes opens nothing after a second, though it is used all along."""
    token = service.token("rita", "analyst")
    with attacks.reach(service, token) as analyst:
        assert analyst.get("/v1/me").status_code == 200
        revoke(service, token)
        end = time.monotonic() + KEY_LOOKUP_TTL
        while time.monotonic() < end:
            analyst.get("/v1/me")
        attacks.check_problem(analyst.get("/v1/me"), 401)


def test_a_key_that_is_revoked_elsewhere_is_worth_nothing_after_a_second(service: ServiceThread) -> None:
    check_revoked_elsewhere(service)


def test_keys_that_are_believed_for_a_minute_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "KEY_LOOKUP_TTL", 60.0)
    with pytest.raises(AssertionError):
        check_revoked_elsewhere(service)


def test_a_key_expires_on_time_though_it_was_looked_up_just_before(service: ServiceThread) -> None:
    token = service.token("eva", "analyst", expires=0.4)
    until = time.monotonic() + 0.4
    with attacks.reach(service, token) as analyst:
        assert analyst.get("/v1/me").status_code == 200
        while time.monotonic() < until:
            analyst.get("/v1/me")
        attacks.check_problem(analyst.get("/v1/me"), 401)


CALLERS: Final = [(role, bound) for role in Role for bound in ((False,) if role is Role.OWNER else (False, True))]
BODIES: Final = (b"{", b"{}", b"\xff")


def allowed(route: Route, role: Role, *, bound: bool) -> bool:
    return role in PERMISSIONS[route.verb] and not (route.needs_every_account and bound)


def check_roles(service: ServiceThread) -> None:
    """Assert that every route lets exactly the roles of the table in, whatever is sent."""
    for role, bound in CALLERS:
        token = service.token("tom", role, *(["census"] if bound else []))
        with attacks.reach(service, token) as client:
            for route in ROUTES:
                for name, body in ((name, body) for name in ("census", "nothing") for body in BODIES):
                    if route.path == "/v1/import" and allowed(route, role, bound=bound) and body:
                        continue  # what it says of a body is shown elsewhere
                    path = attacks.path_of(route, name=name)
                    if route.path.endswith("/close") and allowed(route, role, bound=bound):
                        path = attacks.path_of(route)  # not in earnest
                    answer = client.request(route.method, path, content=body, headers=attacks.JSON)
                    told = f"{role} {bound=} {route.method} {path} {body!r} -> {answer.status_code}"
                    assert (answer.status_code != 403) == allowed(route, role, bound=bound), told
                    assert answer.status_code != 401, told
                    if answer.status_code == 403:
                        attacks.check_problem(answer)
                        assert answer.json()["code"] == "NotPermitted"


def test_every_route_lets_exactly_the_roles_of_the_table_in_whatever_is_sent(
    service: ServiceThread, owner: httpx.Client
) -> None:
    before = attacks.state(owner)[0]  # type: ignore[index]
    check_roles(service)
    assert attacks.state(owner)[0] == before  # type: ignore[index]


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("check", ["require", "require_every_account"])
def test_roles_that_nobody_looks_at_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    monkeypatch.setattr(Caller, check, lambda *_: None)
    with pytest.raises(AssertionError, match="-> "):
        check_roles(service)


def test_an_analyst_cannot_commit_or_void_not_even_what_the_analyst_has_reserved(
    service: ServiceThread, owner: httpx.Client
) -> None:
    with (
        attacks.reach(service, service.token("ana", "analyst", "census")) as analyst,
        attacks.reach(service, service.token("ana", "runner", "census")) as runner,
    ):
        made = attacks.post(analyst, "/v1/accounts/census/reservations", {"cost": attacks.pure("0.1")}, key="q-1")
        assert made.status_code == 201
        held = f"/v1/reservations/{made.json()['id'].replace('#', '%23')}"
        before = attacks.state(owner)
        for verb, form in (("commit", {}), ("void", {"reason": "it was not run"})):
            attacks.check_problem(attacks.post(analyst, f"{held}/{verb}", form), 403)
        assert attacks.state(owner) == before
        assert attacks.post(runner, f"{held}/void", {"reason": "it was not run"}).status_code == 200


def test_the_last_owner_cannot_be_locked_out(service: ServiceThread, owner: httpx.Client) -> None:
    own = owner.get("/v1/me").json()["key"]
    attacks.check_problem(owner.delete(f"/v1/keys/{own}"), 403)
    service.token("olaf")
    assert owner.delete(f"/v1/keys/{own}").status_code == 200
    attacks.check_problem(owner.get("/v1/me"), 401)


def test_a_key_cannot_be_made_by_anybody_but_an_owner_nor_more_widely_than_the_rules(
    service: ServiceThread, owner: httpx.Client
) -> None:
    form = {"principal": "mia", "role": "owner"}
    for role in (Role.ANALYST, Role.RUNNER, Role.AUDITOR):
        with attacks.reach(service, service.token("tom", role)) as client:
            attacks.check_problem(attacks.post(client, "/v1/keys", form, key="k"), 403)
    for wrong in (
        {"principal": "mia", "role": "analyst"},
        {"principal": "mia", "role": "analyst", "accounts": ["census"], "every_account": True},
        {"principal": "mia", "role": "owner", "accounts": ["census"]},
        {"principal": "mia", "role": "root", "every_account": True},
        {"principal": "", "role": "owner"},
        {"principal": "mia\n", "role": "owner"},
        {"principal": "mia", "role": "analyst", "accounts": ["a b"]},
        {"principal": "mia", "role": "owner", "expires": -1},
        {"principal": "mia", "role": "owner", "expires": 1e300},
    ):
        attacks.check_problem(attacks.post(owner, "/v1/keys", wrong, key="k"), 400, 422)
    made = attacks.post(owner, "/v1/keys", form, key="k")
    assert made.status_code == 201
    again = attacks.post(owner, "/v1/keys", form, key="k")
    attacks.check_problem(again, 422)
    assert made.json()["token"] not in again.text + owner.get("/v1/keys").text, "a token is shown once"


def test_an_answer_that_holds_a_token_is_kept_by_no_cache(owner: httpx.Client) -> None:
    made = attacks.post(owner, "/v1/keys", {"principal": "ana", "role": "owner"}, key="k-1")
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    assert made.json()["token"]
    assert made.headers["x-content-type-options"] == "nosniff"
    # Control: a receipt, and nothing else, comes without.
    receipt = attacks.post(owner, "/v1/accounts/census/spends", {"cost": attacks.pure("0.1")}, key="q-1")
    assert receipt.status_code == 201
    assert "cache-control" not in receipt.headers


def work_of(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch, token: str
) -> tuple[tuple[object, ...], list[str]]:
    """Ask twice in a row with a token, and return the words of the answers and what was looked up for them."""
    looked: list[str] = []
    find = AppState._find  # noqa: SLF001  what takes the time

    def recorded(self: AppState, digest: str) -> object:
        looked.append("look")
        return find(self, digest)

    with monkeypatch.context() as patch, attacks.reach(service, token) as client:
        patch.setattr(AppState, "_find", recorded)
        words = [attacks.same_words(client.get("/v1/me")) for _ in range(4)]
    assert all(word == words[0] for word in words)
    return words[0], looked


def test_unknown_and_revoked_keys_take_the_same_path(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with attacks.owner_of(service) as owner:
        made = attacks.post(
            owner, "/v1/keys", {"principal": "ana", "role": "auditor", "every_account": True}, key="k"
        )
        revoked = made.json()["token"]
        assert owner.delete(f"/v1/keys/{made.json()['key']['id']}").status_code == 200
        expired = service.token("bo", "auditor", expires=0.001)
        found = [work_of(service, monkeypatch, token) for token in (new_token(), revoked, expired)]
    assert found[0][0][0] == 401
    assert all(one == found[0] for one in found), found
    assert len(found[0][1]) == 4  # every time: what is not valid is not remembered


def test_unknown_and_revoked_keys_take_the_same_time(service: ServiceThread) -> None:
    with attacks.owner_of(service) as owner:
        made = attacks.post(
            owner, "/v1/keys", {"principal": "ana", "role": "auditor", "every_account": True}, key="k"
        )
        owner.delete(f"/v1/keys/{made.json()['key']['id']}")
        times: dict[str, list[float]] = {new_token(): [], made.json()["token"]: []}
        for _ in range(150):
            for token, taken in times.items():  # in turn, so that what slows one slows the other
                begun = time.perf_counter()
                assert owner.get("/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 401
                taken.append(time.perf_counter() - begun)
    unknown, revoked = (statistics.median(taken) for taken in times.values())
    assert 0.6 < unknown / revoked < 1.7
