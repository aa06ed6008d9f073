"""Small promises of the service that were once broken: each test fails without its repair."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attacks
import httpx
import pytest
from service_server import ServiceThread
from visiting import visitor_of

import odograph as odo
from odograph.core.odometers import odometer_from_dict
from odograph.errors import InvalidPolicy
from odograph.ledger.ledger import Ledger
from odograph.population.population import Population
from odograph.service import views
from odograph.service.access import Caller, Role, new_token
from odograph.service.answers import AccountRow
from odograph.service.metrics import Metrics
from odograph.service.server import write_first_key
from odograph.service.settings import Settings

PLAIN = odo.Policy(1, 0, rule="basic")


@pytest.fixture
def owner(service: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(service) as client:
        attacks.open_account(client, "census")
        yield client


@contextmanager
def remote(service: ServiceThread, principal: str) -> Iterator[Ledger]:
    """The ledger as a principal with a new owner's key reaches it."""
    with odo.connect(service.url, token=service.token(principal)) as ledger:
        yield ledger


# What is told to a stranger.


@pytest.mark.parametrize("where", ["privacy.db", "link/privacy.db", "../{folder}/privacy.db", "{whole}/privacy.db"])
def test_a_stranger_is_not_told_where_the_ledger_is_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "secret-folder"
    folder.mkdir()
    (folder / "link").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(folder)
    with ServiceThread(f"sqlite:///{where.format(folder=folder.name, whole=folder)}") as service:
        with attacks.owner_of(service) as owner:
            assert owner.get("/v1/me").status_code == 200
        (folder / "privacy.db-access").rename(folder / "elsewhere")
        with attacks.reach(service, new_token()) as stranger:
            answer = stranger.get("/v1/me")
    assert answer.status_code == 500
    assert "the ledger cannot be used" in answer.json()["detail"]
    assert folder.name not in answer.text
    assert "privacy.db" not in answer.text


def test_the_first_owner_s_key_is_written_beside_a_ledger_whose_path_is_encoded(tmp_path: Path) -> None:
    folder = tmp_path / "my folder"
    folder.mkdir()
    made = write_first_key(Settings(url=f"sqlite:///{tmp_path}/my%20folder/l.db"))
    assert made == folder / "l.db-owner-key"
    assert made.exists()


# Paths.


def test_a_principal_with_a_slash_in_its_name_can_be_erased_over_http(
    service: ServiceThread, owner: httpx.Client
) -> None:
    with remote(service, "team/ana") as ledger:
        ledger.account("census").spend(odo.PureDP("0.1"), key="q-1")
    shown = [entry["principal"] for entry in owner.get("/v1/accounts/census/entries").json()["entries"]]
    assert shown[-1] == "team/ana"
    assert owner.delete("/v1/principals/team%2Fana").json() == {"erased": True}
    shown = [entry["principal"] for entry in owner.get("/v1/accounts/census/entries").json()["entries"]]
    assert shown[-1] != "team/ana"
    # Control: without the encoding it is another path, where nothing is.
    attacks.check_problem(owner.delete("/v1/principals/team/ana"), 404)


def test_an_encoded_slash_does_not_part_a_path(owner: httpx.Client) -> None:
    assert owner.get("/v1/accounts").status_code == 200
    assert owner.get("/v1/%61ccounts").status_code == 404  # a path has one spelling
    for path in (
        "/v1%2Faccounts",
        "/v1/accounts%2Fcensus",
        "/v1/accounts/census%2Fbalance",
        "/v1/accounts/a%2F..%2Fb",
    ):
        attacks.check_problem(owner.get(path), 404, 422)


# One moment, one replay, one thread that counts.


def test_an_account_s_page_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        account = ledger.open_account("census", PLAIN)
        account.spend(odo.PureDP("0.25"))
        row_of = views.row_of

        def meanwhile(*args: Any) -> AccountRow:
            row = row_of(*args)
            account.spend(odo.PureDP("0.5"))
            return row

        monkeypatch.setattr(views, "row_of", meanwhile)
        form = views.account_form(ledger, Caller("ana", Role.OWNER, "k", None), "census")
        assert account.reading().loss == pytest.approx(0.75)
    assert form.account.spent == form.meters["epsilon"].spent == 0.25
    assert form.reading.loss == pytest.approx(0.25)


def test_what_was_gathered_is_counted_in_the_event_loop_alone_and_before_it_is_shown(
    service: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, threads = Metrics.fold, set[str]()

    def watched(self: Metrics) -> None:
        threads.add(threading.current_thread().name)
        fold(self)

    monkeypatch.setattr(Metrics, "fold", watched)
    with remote(service, "ana") as ledger:
        for number in range(1, 4):
            ledger.account("census").spend(odo.PureDP("0.01"), key=f"q-{number}")
            found = re.search(r'odograph_spends_total\{verb="spend"\} (\d+)', owner.get("/metrics").text)
            assert found is not None
            assert int(found[1]) == number
    assert len(threads) == 1
    assert not any(name.startswith("odograph") for name in threads), "a thread of the pool"


def test_one_replay_at_a_time_whether_by_the_page_or_by_the_api(
    service: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, verify = threading.Event(), threading.Event(), Ledger.verify

    def slowly(self: Ledger, **options: Any) -> object:
        begun.set()
        go_on.wait(5)
        return verify(self, **options)

    def ask(way: Callable[[], int], heard: list[int]) -> None:
        heard.append(way())

    visitor = visitor_of(service)
    csrf = visitor.csrf
    ways: dict[str, Callable[[], int]] = {
        "page": lambda: visitor.send("/audit", {"csrf": csrf}).status_code,
        "api": lambda: attacks.post(owner, "/v1/verify", {}).status_code,
    }
    monkeypatch.setattr(Ledger, "verify", slowly)
    for first in ways.values():
        begun.clear()
        go_on.clear()
        answers: list[int] = []
        thread = threading.Thread(target=ask, args=(first, answers))
        thread.start()
        assert begun.wait(5)
        # Over other connections than the first uses.
        with attacks.owner_of(service) as other:
            refused = attacks.post(other, "/v1/verify", {})
        assert (refused.status_code, refused.json()["code"]) == (503, "LedgerBusy")
        assert visitor_of(service).send("/audit", {"csrf": csrf}).status_code == 403, "another visit's form"
        second = visitor_of(service)
        assert second.send("/audit", {"csrf": second.csrf}).status_code == 503
        go_on.set()
        thread.join()
        assert answers == [200]
        # Control: the next one has its turn.
        assert [way() for way in ways.values()] == [200, 200]


# Headers.


def test_an_answer_that_holds_a_token_is_kept_by_no_cache(owner: httpx.Client) -> None:
    made = attacks.post(owner, "/v1/keys", {"principal": "ana", "role": "owner"}, key="k-1")
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    assert made.json()["token"]
    assert made.headers["x-content-type-options"] == "nosniff"
    # Control: a receipt, and nothing else, comes without.
    receipt = attacks.post(owner, "/v1/accounts/census/spends", {"cost": attacks.pure("0.1")}, key="q-1")
    assert receipt.status_code == 201
    assert "cache-control" not in receipt.headers


def test_a_page_that_is_asked_for_too_often_says_when_to_try_again(tmp_path: Path) -> None:
    with ServiceThread(f"sqlite:///{tmp_path}/served.db", rate=0.1, burst=3.0) as service:
        visitor = visitor_of(service)
        answers = [visitor.get("/audit") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert "retry-after" not in answers[0].headers
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 10


# What a page links to, what an import brings, what an error says.


def test_the_audit_page_links_to_every_account_that_has_a_page_and_to_no_population(
    service: ServiceThread, owner: httpx.Client, tmp_path: Path
) -> None:
    assert owner.get("/v1/me").status_code == 200
    with odo.connect(service.settings.url) as ledger:
        Population.create("people", PLAIN, ledger=ledger, location=tmp_path / "people", ids=3)
    visitor = visitor_of(service)
    page = visitor.get("/audit").text
    links = re.findall(r'href="(/accounts/[^"]+)"', page)
    assert links == ["/accounts/census"]
    assert '<th scope="row">people</th>' in page
    assert visitor.get("/accounts/census").status_code == 200
    assert visitor.get("/accounts/people").status_code == 422


def test_after_an_import_a_principal_writes_under_the_identity_that_the_copy_brought(
    service: ServiceThread, tmp_path: Path
) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/original.db", principal="ana") as original:
        original.open_account("census", PLAIN).spend(odo.PureDP("0.1"))
        with (tmp_path / "copy").open("w+", encoding="utf-8") as file:
            checkpoint = original.export(file)
    with remote(service, "ana") as ledger, remote(service, "olga") as owner:
        with pytest.raises(odo.AccountNotFound):
            ledger.spend({"census": odo.PureDP("0.1")})
        with (tmp_path / "copy").open(encoding="utf-8") as file:
            owner.import_(file, checkpoint=checkpoint)
        account = ledger.account("census")
        account.spend(odo.PureDP("0.2"))
        assert [past.principal for past in account.history()] == ["ana"] * 3


@pytest.mark.parametrize("form", [{"kind": "mixture", "gamma": -1}, {"kind": "abacus"}, {"kind": "best-of"}])
def test_an_odometer_that_is_none_is_refused_with_what_is_wrong_with_it(
    owner: httpx.Client, form: dict[str, Any]
) -> None:
    with pytest.raises(InvalidPolicy) as raised:
        odometer_from_dict(form)
    policy = attacks.POLICY | {"odometer": form}
    answer = attacks.post(owner, "/v1/accounts", {"name": "new", "policy": policy}, key="o-1")
    attacks.check_problem(answer, 422)
    assert answer.json()["detail"] == str(raised.value)
