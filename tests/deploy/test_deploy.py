"""What deploy/ and its pages say is run: the unit, the image's steps and commands, proxy, rules, drills, restarts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
import yaml
from postgres_server import free_port, programs
from prometheus_client.parser import text_string_to_metric_families
from server_programs import program
from service_process import PROGRAM, Service, wait_until
from service_server import ServiceThread
from tls_proxy import TlsProxy

import odograph as odo
from odograph.errors import OdographError
from odograph.service import server, writer
from odograph.service.monitoring import rules_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HOW_TO = ROOT / "docs" / "how-to"
FULL = os.environ.get("ODOGRAPH_FULL") == "1"


# The unit of systemd.


def unit(file: str = "odograph.service") -> dict[str, list[str]]:
    """Return the settings of a unit; comments and continued lines are read as systemd reads them."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / file).read_text().replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_systemd_accepts_the_unit_and_finds_it_little_exposed(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("there is no systemd-analyze here, which checks the unit")
    text = (DEPLOY / "odograph.service").read_text()
    own = tmp_path / "odograph.service"
    own.write_text(
        text.replace("/opt/odograph/bin/odograph", str(PROGRAM)).replace("User=odograph", "DynamicUser=yes")
    )
    done = subprocess.run([systemd, "verify", own], capture_output=True, text=True, check=False)  # noqa: S603  as above
    assert (done.returncode, done.stderr) == (0, "")
    command = [systemd, "security", "--offline=true", "--threshold=20", str(own)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603  an exposure of 2.0 of 10
    own.write_text(
        "\n".join(line for line in own.read_text().splitlines() if not line.startswith(("Protect", "Sys")))
    )
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0  # noqa: S603  Control
    own.write_text(text.replace("Restart=always", "Restart=sometimes"))
    done = subprocess.run([systemd, "verify", own], capture_output=True, text=True, check=False)  # noqa: S603  Control
    assert "Failed to parse service restart specifier" in done.stderr


def test_the_unit_s_command_serves_and_has_time_to_finish(tmp_path: Path) -> None:
    (command,) = unit()["ExecStart"]
    _, verb, *options = shlex.split(command.replace("/var/lib/odograph", str(tmp_path)))
    assert verb == "serve"
    with Service(f"sqlite:///{tmp_path}/privacy.db", tmp_path, *options) as service:
        assert service.is_ready()
        assert service.end(signal.SIGTERM) == 0
    needed = server._SHUTDOWN_TIMEOUT + writer._SHUTDOWN_TIMEOUT  # noqa: SLF001  not to be set otherwise
    assert int(unit()["TimeoutStopSec"][0]) > needed
    assert unit()["Environment"][0] == "ODOGRAPH_URL=sqlite:////var/lib/odograph/privacy.db"


def test_systemd_accepts_the_units_that_renew_and_runs_them_after_midnight(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("there is no systemd-analyze here, which checks the units")
    service, timer = (tmp_path / f"odograph-renew.{kind}" for kind in ("service", "timer"))
    text = (DEPLOY / service.name).read_text()
    service.write_text(text.replace("/opt/odograph/bin/odograph", str(PROGRAM)).replace("User=odograph", "User=root"))
    timer.write_text((DEPLOY / timer.name).read_text())
    verify = [systemd, "verify", str(service), str(timer)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)  # noqa: S603  the units of this folder
    assert (done.returncode, done.stderr) == (0, "")
    (when,) = unit(timer.name)["OnCalendar"]
    shown = subprocess.run(  # noqa: S603  as above
        [systemd, "calendar", "--base-time=2026-11-30 23:30 UTC", when], capture_output=True, text=True, check=True
    )
    assert "2026-12-01 00:00:05 UTC" in shown.stdout
    timer.write_text(timer.read_text().replace("OnCalendar=", "OnCalendar=some "))
    done = subprocess.run(verify, capture_output=True, text=True, check=False)  # noqa: S603  Control
    assert "Failed to parse calendar specification" in done.stderr


def test_the_unit_that_renews_is_as_confined_as_the_service_and_its_command_runs(tmp_path: Path) -> None:
    served, renews = unit(), unit("odograph-renew.service")
    of_a_server = {"Type", "ExecStart", "Restart", "RestartSec", "KillMode", "TimeoutStopSec", "LimitNOFILE"}
    for name in served.keys() - of_a_server - {"Description", "WantedBy"}:
        assert renews[name] == served[name], name
    (command,) = renews["ExecStart"]
    _, verb, file = shlex.split(command)
    assert verb == "renew"
    assert file.startswith("/etc/")
    declared = tmp_path / "accounts.yaml"
    policy = "epsilon: 1, delta: 0, filter: basic, renew: daily, from: 2026-11-01"
    declared.write_text(f"accounts:\n  census: {{{policy}}}\n")
    url = f"sqlite:///{tmp_path}/privacy.db"
    done = subprocess.run(  # noqa: S603  the program itself
        [PROGRAM, verb, declared], env=os.environ | {"ODOGRAPH_URL": url}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    with odo.connect(url) as ledger:
        assert ledger.current("census").name in done.stdout


# The image.


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    return [(name, rest) for name, rest in pairs]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_the_image_copies_what_is_there_and_runs_as_a_user_without_privileges() -> None:
    sources = [part for rest in of("COPY") if "--from" not in rest for part in rest.split()[:-1]]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in let_in if line.startswith("!")} == set(sources)
    names = [name for name, _ in instructions()]
    assert names.index("USER") > len(names) - 1 - names[::-1].index("FROM")  # in the image that is kept
    assert of("USER") == ["odograph"]
    assert json.loads(of("ENTRYPOINT")[0]) == ["odograph"]  # as a list: it is process 1, which gets the signal
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_the_image_s_command_serves_its_health_check_tells_and_a_signal_ends_it(tmp_path: Path) -> None:
    verb, *options = json.loads(of("CMD")[0])
    assert verb == "serve"
    options[options.index("--owner-key-file") + 1] = str(tmp_path / "owner-key")
    (check,) = of("HEALTHCHECK")
    _, *command = json.loads(check[check.index("[") :])
    with Service(f"sqlite:///{tmp_path}/privacy.db", tmp_path, *options) as service:
        command = [part.replace("127.0.0.1:8300", f"127.0.0.1:{service.port}") for part in command]

        def healthy() -> bool:
            return subprocess.run([sys.executable, *command], capture_output=True, check=False).returncode == 0  # noqa: S603

        assert healthy()
        assert (tmp_path / "owner-key").exists()
        assert service.end(signal.SIGTERM) == 0
        assert not healthy()


@pytest.mark.skipif(
    not FULL, reason="installs the service into an empty environment: ODOGRAPH_FULL=1 (make test-all)"
)
def test_the_image_s_build_steps_install_a_service_that_runs(tmp_path: Path) -> None:
    folder, installed = tmp_path / "src", tmp_path / "opt"
    folder.mkdir()
    second = next(i for i, (name, _) in enumerate(instructions()) if name == "FROM" and i)
    build = instructions()[:second]
    ours = ("PYTHON", "PYTEST", "COV_", "COVERAGE", "VIRTUAL_ENV", "ODOGRAPH")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    for name, rest in build:
        if name == "COPY":
            for source in rest.split()[:-1]:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, folder)
        elif name == "RUN":
            command = rest.replace("/opt/odograph", str(installed))
            done = subprocess.run(  # noqa: S602  the Dockerfile's own
                command, shell=True, cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=900
            )
            assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(folder)  # nothing of the source is needed
    port = free_port()
    verb, *options = json.loads(of("CMD")[0])
    options[options.index("--owner-key-file") + 1] = str(tmp_path / "owner-key")
    command_line = [installed / "bin" / "odograph", verb, "--port", str(port), *options]
    url = {"ODOGRAPH_URL": f"sqlite:///{tmp_path}/privacy.db", "ODOGRAPH_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command_line, env=clean | url, cwd=tmp_path) as process:  # noqa: S603  as built

        def ready() -> bool:
            assert process.poll() is None
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


# The composition.


def composition() -> dict[str, Any]:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_only_the_proxy_can_be_reached_and_only_the_service_reaches_the_database() -> None:
    services = composition()["services"]
    assert [name for name, one in services.items() if "ports" in one] == ["proxy"]
    assert [name for name, one in services.items() if "storage" in one["networks"]] == ["db", "odograph"]
    assert composition()["networks"]["storage"] == {"internal": True}
    assert "/var/lib/odograph" in services["odograph"]["volumes"][0]  # what the image keeps outlives it
    named = {volume.split(":")[0] for one in services.values() for volume in one["volumes"] if volume[0] != "."}
    assert named == composition()["volumes"].keys()
    text = (DEPLOY / "compose.yaml").read_text()
    variables = set(re.findall(r"\$\{(\w+):\?", text))
    (printed,) = re.findall(r"printf '(.*)' ", text)
    assert {line.split("=")[0] for line in printed.split(r"\n") if line} == variables
    assert "$" not in re.sub(r"\$\{\w+:\?[^}]*\}|\$\(openssl rand -hex 24\)", "", text)  # no secret has a default


def test_the_composition_s_command_serves_postgresql(postgres_url: str, tmp_path: Path) -> None:
    service = composition()["services"]["odograph"]
    verb, *options = service["command"]
    assert verb == "serve"
    assert service["environment"]["ODOGRAPH_URL"].startswith("postgresql://")
    options = [f"--owner-key-file={tmp_path}/owner-key" if "owner-key" in one else one for one in options]
    with Service(postgres_url, tmp_path, *options) as running:
        with odo.connect(running.url, token=running.token()) as ledger:
            ledger.open_account("census", odo.Policy(1, 0, filter="basic")).spend(odo.PureDP("0.1"))
        assert running.end(signal.SIGTERM) == 0
    assert int(service["stop_grace_period"].removesuffix("m")) * 60 > server._SHUTDOWN_TIMEOUT  # noqa: SLF001  as above


def test_caddy_serves_the_dashboard_and_the_api_over_tls(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with (
        ServiceThread(url, plain_http=True, connections_per_address=0) as service,
        TlsProxy(tmp_path, service.settings.port) as proxy,
    ):
        trust = proxy.trust()
        page = httpx.get(f"{proxy.url}/sign-in", verify=trust)
        assert page.headers["set-cookie"].startswith("__Host-")
        token = {"Authorization": f"Bearer {service.token()}"}
        assert httpx.get(f"{proxy.url}/v1/accounts", verify=trust, headers=token).status_code == 200
        answer = httpx.get(f"http://localhost:{proxy.plain_port}/v1/accounts", headers=token)
        assert answer.status_code == 308  # Control: without TLS nothing is passed on


# Metrics.


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all samples in a scrape of a service that was used."""
    folder = tmp_path_factory.mktemp("scrape")
    with ServiceThread(f"sqlite:///{folder}/ledger.db") as service:
        token = service.token()
        with odo.connect(service.url, token=token) as ledger:
            account = ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
            account.spend(odo.PureDP("0.1"))
            account.reserve(odo.PureDP("0.1"))
            with pytest.raises(odo.BudgetExceeded):
                account.spend(odo.PureDP(2))
        text = httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def expressions() -> Iterator[str]:
    """Yield every expression of the rules and of the dashboard."""
    for group in yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def unknown(found: Iterator[str], exported: set[str]) -> set[str]:
    """Return the metrics that the service does not have."""
    return {name for text in found for name in re.findall(r"\bodograph_\w+", text)} - exported


def test_every_metric_of_the_rules_and_the_dashboard_is_exported(exported: set[str]) -> None:
    assert unknown(expressions(), exported) == set()
    assert len({name for text in expressions() for name in re.findall(r"\bodograph_\w+", text)}) > 10
    # Control: a metric that was renamed is found.
    assert unknown(iter(["rate(odograph_spend_total[5m])"]), exported) == {"odograph_spend_total"}


def test_every_metric_is_documented_and_no_other(exported: set[str]) -> None:
    page = (HOW_TO / "operate.md").read_text()
    documented = set(re.findall(r"`(odograph_\w+)`", page))
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported}
    created = {name for name in families if f"{name}_total" in families}  # the time at which a counter began
    assert documented == families - created


def test_prometheus_accepts_the_rules_the_scraping_and_the_dashboard_s_queries_and_the_alerts_fire(
    tmp_path: Path,
) -> None:
    promtool = program("promtool", "prometheus")
    for file in (*DEPLOY.glob("prometheus*.yml"), ROOT / "tests" / "deploy" / "promtool-tests.yml"):
        shutil.copy(file, tmp_path)
    (tmp_path / "odograph.key").touch()
    queries = [text.replace("$__rate_interval", "5m") for text in expressions()]
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    def check(*arguments: str) -> int:
        done = subprocess.run([promtool, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
        return done.returncode

    assert check("check", "config", "prometheus.yml") == 0
    assert check("check", "rules", "prometheus-rules.yml", "queries.yml") == 0
    assert check("test", "rules", "promtool-tests.yml") == 0
    rules_file = tmp_path / "prometheus-rules.yml"
    rules_file.write_text(rules_file.read_text().replace("odograph_budget_spent_ratio", "odograph_budget_spent"))
    assert check("test", "rules", "promtool-tests.yml") != 0  # Control


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    cells = [
        (x, y)
        for one in (panel["gridPos"] for panel in panels)
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in panels}) == len(panels) > 8


# The pages: their commands, in order, in an empty folder.


def commands(page: str, *, after: str = "", before: str = "\0") -> str:
    """Return the shell commands of a page, or of a part of it between two headings."""
    text = (HOW_TO / page).read_text().partition(before)[0]
    text = text[text.index(after) :] if after else text
    return "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))


def shell(script: str, folder: Path, **variables: str) -> str:
    path = f"{PROGRAM.parent}:{programs()}:{os.environ['PATH']}"
    done = subprocess.run(  # noqa: S603  the page's own commands
        ["bash", "-euo", "pipefail", "-c", script],  # noqa: S607  as above
        cwd=folder,
        env=os.environ | variables | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(params=["sqlite", "postgres"] if FULL else ["sqlite"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"sqlite:///{tmp_path}/privacy.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    )


def test_the_operator_s_page_runs(ledger_url: str, tmp_path: Path) -> None:
    example, rules = re.findall(r"```yaml\n(.*?)```", (HOW_TO / "operate.md").read_text(), re.DOTALL)
    (tmp_path / "webhook-secret").write_text("0" * 64, encoding="ascii")
    form = yaml.safe_load(rules)
    form["webhook"]["secret_file"] = str(tmp_path / "webhook-secret")
    assert rules_of(form).thresholds_of("census-2030") == (80, 95)
    (tmp_path / "accounts.yaml").write_text(example)
    said = shell(commands("operate.md"), tmp_path, ODOGRAPH_URL=ledger_url)
    assert "would open census-2030-maps below census-2030" in said
    assert "opened visits-2030-01 as a block of visits" in said
    assert "3 accounts there already" in said
    assert "writing: a write was synced" in said
    (tmp_path / "accounts.yaml").write_text(example.replace("epsilon: 1", "epsilon: 2"))
    done = shell("odograph apply accounts.yaml || test $? -eq 5", tmp_path, ODOGRAPH_URL=ledger_url)
    shown = re.findall(r"```text\n(census-2030: .*?)\n", (HOW_TO / "operate.md").read_text())
    assert done.splitlines()[0] == shown[0]


def another_database(url: str) -> str:
    name = f"drill_{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def test_the_backup_page_runs(ledger_url: str, tmp_path: Path) -> None:
    with odo.connect(ledger_url) as ledger:
        ledger.open_account("census-2030", odo.Policy(1, 0, filter="basic")).spend(odo.PureDP("0.25"), key="q-1")
    own = "PostgreSQL's own tools"
    on_postgres = ledger_url.startswith("postgresql")
    drill = another_database(ledger_url) if on_postgres else "sqlite:///drill.db"
    variables = {"ODOGRAPH_URL": ledger_url, "DRILL_URL": drill}
    said = shell(commands("backup-and-restore.md", before=f"## {own}"), tmp_path, **variables)
    assert "so its accounts are open as before" in said
    assert "every account is closed" in said
    assert not (tmp_path / "refused.db").exists()
    with odo.connect(f"sqlite:///{tmp_path}/closed.db") as copy:
        assert copy.account("census-2030").closed
        assert str(copy.account("census-2030-b").lifetime).startswith("(1.5, 1e-07)-DP")
    if on_postgres:
        script = commands("backup-and-restore.md", after=f"## {own}")
        said = shell(script, tmp_path, **variables, SECOND_URL=another_database(ledger_url))
        assert "nothing was removed or rewritten since the checkpoint" in said
        # Control: a dump that is behind the checkpoint is found.
        behind = "odograph spend census-2030 --pure 0.1; odograph checkpoint --out newest.json"
        script = script.replace("newer.json", "newest.json").strip() + " || test $? -eq 5 && touch behind"
        second = another_database(ledger_url)
        shell(script.replace("pg_restore", f"{behind}\npg_restore", 1), tmp_path, **variables, SECOND_URL=second)
        assert (tmp_path / "behind").exists()


# Restarting, as in an upgrade, while programs spend.


class Restarted(NamedTuple):
    """What became of clients that spent while the service was restarted."""

    paid: set[str]  # the keys that they believe charged
    charged: list[str]  # those that are
    errors: list[OdographError]


def spend_through_a_restart(folder: Path, timeout: float) -> Restarted:
    """Restart the service, as an upgrade does, while clients with this timeout spend."""
    url = f"sqlite:///{folder}/ledger.db"
    paid: set[str] = set()
    errors: list[OdographError] = []
    done = threading.Event()
    with Service(url, folder) as service:
        with odo.connect(url) as ledger:
            ledger.open_account("a", odo.Policy(1000, 0, filter="basic"))

        def client(name: str) -> None:
            with odo.connect(service.url, token=service.token(name), timeout=timeout) as remote:
                number = 0
                while not done.is_set():
                    try:
                        remote.account("a").spend(odo.PureDP("0.001"), key=f"{name}-{number}")
                        paid.add(f"{name}-{number}")
                    except OdographError as error:
                        errors.append(error)
                        continue  # the same key again
                    number += 1

        threads = [threading.Thread(target=client, args=(f"c{number}",), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(paid) > 30)
        assert service.end(signal.SIGTERM) == 0
        time.sleep(1)  # while the new release is installed
        before = len(paid)
        service.start()
        wait_until(lambda: len(paid) > before + 30)
        done.set()
        for thread in threads:
            thread.join(60)
    with odo.connect(url) as ledger:
        ledger.verify()
        charged = [entry.key for entry in ledger.account("a").history() if entry.verb == "spend"]
    return Restarted(paid, charged, errors)


def test_programs_do_not_notice_a_restart_and_are_charged_once(tmp_path: Path) -> None:
    found = spend_through_a_restart(tmp_path, 60)
    assert found.errors == []
    assert sorted(found.charged) == sorted(found.paid)


def test_programs_that_wait_for_less_than_a_restart_notice_it_and_are_charged_once(tmp_path: Path) -> None:
    found = spend_through_a_restart(tmp_path, 0.3)
    assert found.errors  # Control: there was something to be noticed
    assert sorted(found.charged) == sorted(found.paid)
