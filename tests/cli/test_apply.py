"""`odograph apply` opens what a file declares and changes no promise; `odograph declare` writes such a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph import filters
from odograph.cli import accounts
from odograph.cli.accounts import declared_form, read_accounts, yaml_of
from odograph.cli.app import app
from odograph.errors import LedgerBusy

FILE = """\
# The budgets of the census.
form: 1
accounts:
  census-2030:
    epsilon: 1
    delta: 1e-6
    filter: zcdp
    note: asked for by the board
  maps:
    epsilon: 0.10000000000000000001
    delta: 1/3000000
    filter: zcdp=0.9,renyi=0.1
    parent: census-2030
  "2029":
    epsilon: 1
    delta: 0
    filter: basic
    dataset: no
    closed: true
  "2030":
    epsilon: 2
    delta: 0
    filter: basic
    successor_of: "2029"
"""
NAMES = ["2029", "2030", "census-2030", "maps"]


@pytest.fixture(params=["sqlite", "postgres", "service"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every ledger that the command line reaches, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    if request.param == "service":
        service: ServiceThread = request.getfixturevalue("service")
        monkeypatch.setenv("ODOGRAPH_TOKEN", service.token())
        return service.url
    if request.param == "postgres":
        where: str = request.getfixturevalue("postgres_url")
        return where
    return f"sqlite:///{tmp_path}/ledger.db"


def run(*arguments: str, typed: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def apply(text: str, url: str, *more: str) -> tuple[int, str]:
    code, output, errors = run("apply", "-", "--url", url, *more, typed=text)
    assert errors == ""
    return code, output


def refused(text: str, *more: str) -> str:
    """Apply a file that cannot be read, and return the one line that says why."""
    code, output, errors = run("apply", "-", *more, typed=text)
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    return line


def document(*arguments: str) -> dict[str, Any]:
    code, output, errors = run(*arguments, "--json")
    assert (code, errors) == (0, "")
    form = json.loads(output)
    assert isinstance(form, dict)
    return form


def test_what_is_missing_is_opened_once_and_what_was_declared_is_there(url: str) -> None:
    code, output = apply(FILE, url, "--dry-run")
    assert code == 0
    assert "would open maps below census-2030: (0.1, 3.334e-07)-DP for each person" in output
    assert "would close 2029" in output
    assert output.endswith(": this was a dry run\n")
    code, output = apply(FILE, url)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()[:5]] == ["opened"] * 4 + ["closed"]
    rows = {row["name"]: row for row in document("accounts", "--url", url)["accounts"]}
    assert sorted(rows) == NAMES
    assert rows["maps"]["parent"] == "census-2030"
    assert rows["2030"]["successor_of"] == "2029"
    assert (rows["2029"]["closed"], rows["2029"]["dataset"]) == (True, "no")
    shown = document("show", "maps", "--url", url)
    assert shown["policy"]["epsilon"] == "10000000000000000001/100000000000000000000"  # all digits
    assert shown["lifetime"] is None
    assert document("show", "2030", "--url", url)["lifetime"]["epsilon"] == "3"
    note = document("history", "census-2030", "--url", url)["entries"][0]["note"]
    assert note == "asked for by the board"
    before = document("checkpoint", "--url", url)
    code, output = apply(FILE, url)
    assert (code, output.splitlines()[0]) == (0, "4 accounts there already: census-2030, 2029, maps, 2030")
    assert document("checkpoint", "--url", url) == before


def test_a_dry_run_makes_no_ledger(tmp_path: Path) -> None:
    assert apply(FILE, f"sqlite:///{tmp_path}/none.db", "--dry-run")[0] == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_what_is_declared_is_applied_as_a_no_op_and_makes_an_equal_ledger_elsewhere(
    url: str, tmp_path: Path, form: str
) -> None:
    apply(FILE, url)
    file, other = tmp_path / f"accounts.{form}", f"sqlite:///{tmp_path}/copy.db"
    assert run("declare", "--url", url, "--out", str(file))[0] == 0
    before = document("checkpoint", "--url", url)
    again = document("apply", str(file), "--url", url)
    assert (again["opened"], again["closed"], again["differences"]) == ([], [], [])
    assert document("checkpoint", "--url", url) == before
    assert run("apply", str(file), "--url", other)[0] == 0
    assert document("declare", "--url", other) == document("declare", "--url", url)
    for name in NAMES:
        shown = [document("show", name, "--url", where)["policy"] for where in (url, other)]
        assert shown[0] == shown[1]


def test_an_account_with_a_menu_is_compared_and_can_be_opened_only_where_it_was_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, file = f"sqlite:///{tmp_path}/ledger.db", tmp_path / "accounts.yaml"
    items = odo.mechanisms.subsampled_gaussian_menu(3, "1e-6", [("0.01", "1.0")])
    with odo.connect(url) as ledger:
        ledger.open_account("training", odo.Policy(3, "1e-6", filter=filters.Exact(takes=(), menu=items)))
    assert run("declare", "--url", url, "--out", str(file))[0] == 0
    assert run("apply", str(file), "--url", url)[0] == 0
    assert run("apply", str(file), "--url", f"sqlite:///{tmp_path}/copy.db")[0] == 0
    monkeypatch.setenv("ODOGRAPH_CACHE", str(tmp_path / "nothing solved"))
    code, _, errors = run("apply", str(file), "--url", f"sqlite:///{tmp_path}/other.db")
    assert code == 2, errors
    assert "Before that: nothing was done" in errors


@pytest.mark.parametrize(
    ("edit", "field", "has", "says"),
    [
        (("epsilon: 1\n    delta: 1e-6", "epsilon: 1.5\n    delta: 1e-6"), "epsilon", "1", "1.5"),
        (("delta: 1e-6", "delta: 2e-06"), "delta", "1e-06", "2e-06"),
        (("    filter: zcdp\n", "    filter: gdp\n"), "filter", "zcdp", "gdp"),
        (("    filter: zcdp\n", "    reserve: pure\n"), "reserve", "zcdp", "pure"),
        (("    filter: zcdp\n", "    filter: zcdp\n    delta_steps: 1e-8\n"), "delta_steps", "0", "1e-8"),
        (("    filter: zcdp\n", "    filter: zcdp\n    odometer: mixture\n"), "odometer", "best-of", "mixture"),
        (("    filter: zcdp\n", "    filter: zcdp\n    slack: 0.1\n"), "slack", "none", "0.1"),
        (("    note:", "    privacy_unit: household\n    note:"), "privacy_unit", "person", "household"),
        (("    note:", "    neighbors: replace-one\n    note:"), "neighbors", "add-remove", "replace-one"),
        (("    parent: census-2030\n", ""), "parent", "census-2030", "none"),
        (("    note:", '    parent: "2030"\n    note:'), "parent", "none", "2030"),
        (("    dataset: no\n", "    dataset: days\n"), "dataset", "no", "days"),
        (('    successor_of: "2029"\n', ""), "successor_of", "2029", "none"),
        (("    closed: true\n", ""), "closed", "true", "false"),
    ],
)
def test_a_file_that_would_change_an_account_does_nothing_and_says_what_to_do(
    tmp_path: Path, edit: tuple[str, str], field: str, has: str, says: str
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    apply(FILE, url)
    before = document("checkpoint", "--url", url)
    changed = FILE.replace(*edit)
    assert changed != FILE
    changed += "  new:\n    epsilon: 1\n    delta: 0\n    filter: basic\n"
    code, output = apply(changed, url, "--json")
    assert code == 5
    form = json.loads(output)
    (difference,) = [one for one in form["differences"] if one["field"] == field]
    assert has in difference["ledger"]
    assert difference["file"] == says
    assert form["opened"] == []
    assert document("checkpoint", "--url", url) == before
    for option in ("--dry-run", "--json"):
        assert apply(changed, url, option)[0] == 5
    text = apply(changed, url)[1]
    assert f"{difference['account']}: {field}: the ledger has {difference['ledger']}, the file says {says}. " in text
    assert f"nothing was done in {url}" in text
    # What the advice says to write is what the file had, or means the same: following it leaves no difference.
    written = difference["advice"].partition("`")[2].partition("`")[0]
    if field in {"epsilon", "delta", "filter", "closed", "dataset", "delta_steps"}:
        wrong = {"closed": "    dataset: no\n"}.get(field, f"    {field}: {says}\n")
        right = f"{wrong}    {written}\n" if field == "closed" else f"    {written}\n"
        assert apply(changed.replace(wrong, right, 1), url)[0] == 0


def test_choices_that_a_file_leaves_to_odograph_are_made_once_and_not_compared(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        ledger.open_account("a", odo.Policy(1, "1e-6", filter="zcdp", odometer="stitched", delta_steps="1e-8"))
    assert apply("accounts:\n  a:\n    epsilon: 1\n    delta: 1e-6\n", url)[0] == 0
    assert apply("accounts:\n  a:\n    epsilon: 1.0\n    delta: 0.000001\n    odometer: stitched\n", url)[0] == 0
    assert apply("accounts:\n  a:\n    epsilon: 1\n    delta: 2e-6\n", url)[0] == 5


def test_accounts_that_the_file_does_not_name_stay_and_are_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    apply(FILE, url)
    code, output = apply("accounts: {}\n", url)
    assert code == 0
    assert output == f"not in the file, and not changed: {', '.join(NAMES)}\n{url} is as the file says\n"


def test_a_population_is_not_an_account(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        people = odo.Policy(1, 0, filter="basic")
        odo.Population.create("people", people, ledger=ledger, location=tmp_path / "people", ids=2)
    assert document("declare", "--url", url)["accounts"] == {}
    code, output = apply("accounts:\n  people:\n    epsilon: 1\n    delta: 0\n    filter: basic\n", url)
    assert code == 5
    assert "people: name: the ledger has a population, the file says an account" in output


def test_a_closed_or_missing_relative_is_a_difference_before_anything_is_opened(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    basic = "    epsilon: 1\n    delta: 0\n    filter: basic\n"
    apply(f"accounts:\n  top:\n{basic}    closed: true\n", url)
    code, output = apply(f"accounts:\n  first:\n{basic}  child:\n{basic}    parent: top\n", url)
    assert code == 5
    assert "child: parent: the ledger has top as a closed account" in output
    code, output = apply(f"accounts:\n  child:\n{basic}    parent: nobody\n", url)
    assert code == 5
    assert "the ledger has no such account, the file says nobody. Declare nobody in the file too" in output
    assert document("accounts", "--url", url)["accounts"][0]["name"] == "top"


def test_a_stop_midway_says_what_was_done_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    real: Callable[..., Any] = odo.Ledger.open_account

    def failing(self: odo.Ledger, name: str, *args: object, **kwargs: object) -> object:
        if name == "maps":
            raise LedgerBusy("the disk is full; try again")
        return real(self, name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(odo.Ledger, "open_account", failing)
        code, output, errors = run("apply", "-", "--url", url, typed=FILE)
    assert code == 6
    assert output.count("opened ") == 2
    assert "Before that: opened census-2030, opened 2029. The same command goes on from there" in errors
    code, output = apply(FILE, url)
    assert code == 0
    assert "1 account there already: census-2030" in output
    assert sorted(row["name"] for row in document("accounts", "--url", url)["accounts"]) == NAMES
    assert {row["name"] for row in document("accounts", "--url", url)["accounts"] if row["closed"]} == {"2029"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accounts: [", "line 1, column 12: this is not YAML"),
        ("accounts:\n\ta: 1", "line 2, column 1: this is not YAML (found character '\\t'"),
        ("", "the file must have a field `accounts`"),
        ("accounts: 3", "the file must have a field `accounts`"),
        ("accounts: {}\nbudgets: {}", "line 2: budgets is not a field of this file"),
        ("form: 2\naccounts: {}", "line 1: form must be 1 (got '2'); upgrade Odograph"),
        ("accounts:\n  a: 1", 'line 2: accounts.a must have fields, such as epsilon and delta (got "1")'),
        ("accounts:\n  a:\n    delta: 0", "line 2: accounts.a must have one of epsilon, rho, mu (got none)"),
        ("accounts:\n  a:\n    epsilon: 1\n    epsilon: 2", "line 4: accounts.a.epsilon must be there once"),
        ("accounts:\n  a:\n    epsilonn: 1", "line 3: accounts.a.epsilonn is not a field of an account"),
        (
            "accounts:\n  a: {epsilon: 1,\n    delta: many}",
            "line 3: accounts.a.delta cannot be read: Policy.delta must",
        ),
        ("accounts:\n  a:\n    epsilon: [1]\n    delta: 0", "line 3: accounts.a.epsilon cannot be read"),
        (
            "accounts:\n  a:\n    epsilon: 1\n    delta: 0.1\n    filter: fast",
            "line 5: accounts.a.filter cannot be read",
        ),
        (
            "accounts:\n  a:\n    epsilon: 1\n    delta: 0.1\n    filter: [fast]",
            "line 5: accounts.a.filter cannot be read",
        ),
        (
            "accounts:\n  a:\n    epsilon: 1\n    delta: 0.1\n    filter: [{kind: gdp, size: 3}]",
            "line 5: accounts.a.filter",
        ),
        (
            "accounts:\n  a:\n    epsilon: 1\n    delta: 0.1\n    closed: perhaps",
            "line 5: accounts.a.closed must be true",
        ),
        ("accounts:\n  a b:\n    epsilon: 1\n    delta: 0.1", "line 2: accounts.a b cannot be read: name must be"),
        ("accounts:\n  a:\n    epsilon: 1\n    delta: 0.1\n    parent: a", "must not refer to itself"),
        ("accounts: &x\n  a: *x", "must be written out: aliases"),
        ("accounts:\n  a: &x {epsilon: 1, delta: 0.1}\n  b: *x", "line 3: accounts.b must be written out"),
        ("accounts: !!python/object/apply:os.abort []", "the file must have a field `accounts`"),
        ("accounts: !secret {}", "line 1: accounts must be plain: the tag !secret"),
        ("accounts: {? [a]: 1}", "must have a name before it"),
        ('{"accounts": {}', "line 1, column 16: this is not JSON"),
        ('{"accounts": {"a": {"epsilon": 1}}}', "accounts.a must have delta"),
        ('{"accounts": {"a": {}, "a": {}}}', "a must be there once (got it twice)"),
        ('{"accounts": {"a": {"epsilon": 1, "delta": 1, "delta": 0}}}', "delta must be there once"),
        ("[" * 100_000, "standard input"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line_and_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(text)
    assert not [*tmp_path.iterdir()]


def test_a_child_cannot_be_open_below_what_the_file_closes() -> None:
    basic = "epsilon: 1, delta: 0, filter: basic"
    text = f"accounts:\n  top: {{{basic}, closed: true}}\n  low: {{{basic}, parent: top}}\n"
    assert "line 3: accounts.low.parent must be an open account (got 'top', which the file closes" in refused(text)


def test_a_file_that_is_not_text_or_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"accounts: \xff")
    code, _, errors = run("apply", str(tmp_path / "a.yaml"))
    assert (code, "must be text in UTF-8" in errors) == (2, True)
    code, _, errors = run("apply", str(tmp_path / "b.yaml"))
    assert (code, errors) == (2, f"odograph: {tmp_path}/b.yaml: No such file or directory\n")


def test_without_pyyaml_it_says_what_to_install_and_json_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'odograph[cli]'; JSON is read without it" in refused("accounts: {}")
    text = '{"accounts": {"a": {"epsilon": 1, "delta": 0, "filter": "basic", "closed": false}}}'
    assert apply(text, f"sqlite:///{tmp_path}/l.db")[0] == 0


def numbers(most: int) -> st.SearchStrategy[str]:
    """Numbers as a person types them: decimals of any length, fractions, exponents."""
    return st.one_of(
        st.decimals("0.01", most, places=4).map(str),
        st.decimals("0.01", most, places=25).map(str),
        st.fractions("1/50", most, max_denominator=97).map(str),
    )


DELTAS = st.sampled_from(["1e-6", "0.0000010000000000000000001", "1/3000000", "2.5e-9"])
UNITS = st.sampled_from(["person", "household", "no", "2030", "user: day", "# all", "'", "Łódź", "a  b", "- x", "~"])
FILTERS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["zcdp", "gdp", "paper", "renyi", "exact", "smooth"]),
    st.sampled_from(
        [{"zcdp": "0.9", "renyi": "0.1"}, {"exact": "1/3", "gdp": "2/3"}, [("zcdp", "0.25"), ("gdp", "0.75")]]
    ),
    st.just(filters.Renyi(orders=((3, "0.25"), ("29.2681", "0.5")))),
    st.just(filters.Exact(takes=("pure",))),
    st.none(),
)


@st.composite
def policies(draw: st.DrawFn) -> odo.Policy:
    size = draw(st.sampled_from(["epsilon", "epsilon", "rho", "mu", "none"]))
    if size != "epsilon":
        delta = draw(st.sampled_from(["1e-6", "1e-9"]))
        slack = draw(st.none() | st.just("0.1"))
        if size == "none":
            return odo.Policy(None, delta, slack=slack)
        value = draw(st.sampled_from(["0.5", "1/3"]))
        rho, mu = (value, None) if size == "rho" else (None, value)
        return odo.Policy(rho=rho, mu=mu, delta=delta, slack=slack)
    epsilon, unit = draw(numbers(5)), draw(UNITS)
    if draw(st.booleans()):
        return odo.Policy(epsilon, draw(st.sampled_from(["0", "1e-9"])), filter="basic", privacy_unit=unit)
    kept = draw(FILTERS)
    return odo.Policy(
        epsilon,
        draw(DELTAS),
        filter=kept,
        reserve=draw(st.sampled_from([None, "pure", "mixed", "training"])) if kept is None else None,
        delta_steps=draw(st.sampled_from([None, "1e-10", "1/9000000000"])),
        odometer=draw(st.sampled_from([None, "lines", "filter", "mixture", "stitched", odo.odometers.Mixture(0.3)])),
        slack=draw(st.sampled_from([None, "0.1", 1e-3])),
        privacy_unit=unit,
    )


@settings(max_examples=150)
@given(policy=policies(), as_json=st.booleans())
def test_every_policy_is_written_so_that_it_is_read_back_equal(policy: odo.Policy, as_json: bool) -> None:  # noqa: FBT001
    form = {"form": 1, "accounts": {"2030": accounts._policy_form(policy)}}  # noqa: SLF001  no account: many would take minutes to solve
    text = json.dumps(form) if as_json else yaml_of(form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: text)
        (one,) = read_accounts(Path("accounts.json" if as_json else "accounts.yaml"))
    assert (one.name, one.policy) == ("2030", policy)
    assert len(yaml.safe_load(yaml_of(form))["accounts"]) == 1  # other programs read it too


def test_another_promise_is_a_difference(url: str) -> None:
    def applied(fields: str) -> tuple[int, str]:
        return apply(f"accounts:\n  a:\n    {fields}\n", url)

    assert applied("rho: 0.5")[0] == 0
    for fields in ("rho: 0.6", "mu: 0.5", "epsilon: none\n    delta: 1e-6"):
        code, text = applied(fields)
        assert code == 5
        assert "write `rho: 0.5` in the file" in text
    assert applied("rho: 0.5") == (0, applied("rho: 0.5")[1])


CHEAP = st.sampled_from(
    [("1", "0", "basic"), ("0.5", "1e-7", "zcdp"), ("3", "1e-5", "renyi"), ("1", "1e-9", "paper")]
)
TREE = st.lists(
    st.tuples(
        CHEAP,
        st.none() | st.integers(0, 20),
        st.none() | st.integers(0, 20),
        st.sampled_from(["", "days", "1e3"]),
        st.booleans(),
    ),
    max_size=7,
)


@settings(max_examples=60)
@given(tree=TREE)
def test_whatever_a_ledger_holds_its_declaration_finds_nothing_to_do_and_opens_the_same_elsewhere(
    tree: list[tuple[tuple[str, str, str], int | None, int | None, str, bool]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    url, other = f"sqlite:///{folder}/a.db", f"sqlite:///{folder}/b.db"
    with odo.connect(url) as ledger:
        ledger.open_account("first", odo.Policy(1, 0, filter="basic"))
        opened = ["first"]
        for number, ((epsilon, delta, kept), above, before, dataset, closed) in enumerate(tree):
            parent = "" if above is None else opened[above % len(opened)]
            if parent and ledger.account(parent).closed:
                parent = ""
            successor = "" if before is None else opened[before % len(opened)]
            policy = odo.Policy(epsilon, delta, filter=kept)
            name = f"{number}-x" if number % 2 else str(number)
            ledger.open_account(name, policy, parent=parent, successor_of=successor, dataset=dataset)
            opened.append(name)
            if closed:
                ledger.account(name).close()
        form = {"form": 1, "accounts": {one.name: declared_form(one) for one in ledger.accounts()}}
    code, output = apply(yaml_of(form), url, "--json")
    again = json.loads(output)
    assert (code, again["opened"], again["closed"], again["differences"]) == (0, [], [], [])
    assert apply(yaml_of(form), other)[0] == 0
    assert document("declare", "--url", other) == form
    assert apply(json.dumps(form), other, "--dry-run", "--json")[0] == 0


def test_the_property_catches_an_omitted_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A declaration without the parent is a difference: what the property above would report."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    apply(FILE, url)
    monkeypatch.setattr(accounts, "_RELATIVES", ("successor_of",))
    text = run("declare", "--url", url)[1]
    monkeypatch.undo()
    assert apply(text, url)[0] == 5
