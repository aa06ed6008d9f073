"""How the service starts and ends: the first key, what is refused, and signals while requests are under way."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from postgres_server import status
from service_process import Service, held
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.app import app
from odograph.errors import ServiceUnavailable
from odograph.service.key_store import connect_keys
from odograph.service.server import write_first_key
from odograph.service.settings import Settings

COST = {"cost": {"form": 1, "kind": "pure", "epsilon": "0.001"}}
POLICY = odo.Policy(1, 1e-6, filter="basic")
CLIENTS = 4
SHUTDOWN_TIMEOUT = 20.0  # seconds in which a service that has little to do must have ended
LOST = "no answer"


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder}/ledger.db"


class Client:
    """Spends under keys of its own, and never asks twice: what it was answered is what the service said."""

    def __init__(self, service: Service, name: str, count: int) -> None:
        self.answers: dict[str, int | str] = {}
        self._service = service
        self._token = service.token(name)
        self._keys = [f"{name}-{number}" for number in range(count)]
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def join(self) -> dict[str, int | str]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.answers

    def _work(self) -> None:
        with httpx.Client(base_url=self._service.url, timeout=60) as client:
            for key in self._keys:
                headers = {"Authorization": f"Bearer {self._token}", "Idempotency-Key": key}
                try:
                    answer = client.post("/v1/accounts/a/spends", json=COST, headers=headers)
                except httpx.ConnectError:
                    return  # it listens no more
                except httpx.TransportError:
                    self.answers[key] = LOST
                else:
                    self.answers[key] = answer.status_code


def charged(url: str) -> set[str]:
    """Return the keys that were charged; the ledger is in order."""
    with odo.connect(url) as ledger:
        ledger.verify()
        pasts = ledger.account("a").history(0, 10**6)
    keys = [past.entry.key for past in pasts if past.entry.verb == "spend"]
    assert len(set(keys)) == len(keys)
    return set(keys)


def judge(url: str, answers: dict[str, int | str], *, nobody_lost: bool) -> None:
    """Whatever was carried out was answered, and what was answered is there."""
    made = {key for key, answer in answers.items() if answer == 201}
    assert made
    assert charged(url) == made
    assert set(answers.values()) <= {201, LOST}
    if nobody_lost:
        assert set(answers.values()) == {201}


def ended(service: Service, number: signal.Signals) -> float:
    """Send a signal, see that the process ends in good order, and return how long that took."""
    begun = time.monotonic()
    assert service.end(number, SHUTDOWN_TIMEOUT) == 0, service.said[-2000:]
    return time.monotonic() - begun


def in_flight(folder: Path, number: signal.Signals) -> dict[str, int | str]:
    """Send a signal while a request of everybody waits for the ledger, and give what they were answered."""
    with Service(url_in(folder), folder) as service:
        with odo.connect(service.ledger_url) as ledger:
            ledger.open_account("a", POLICY)
        with held(url_in(folder)):
            clients = [Client(service, f"c{client}", 1) for client in range(CLIENTS)]
            time.sleep(1)
            sender = threading.Thread(target=service.end, args=(number, 60))
            sender.start()
            time.sleep(0.5)
        answers = {key: answer for client in clients for key, answer in client.join().items()}
        sender.join()
    return answers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_that_were_accepted_when_the_signal_came_are_carried_out_and_answered(
    tmp_path: Path, number: signal.Signals
) -> None:
    judge(url_in(tmp_path), in_flight(tmp_path, number), nobody_lost=True)


def test_an_end_without_answers_is_caught(tmp_path: Path) -> None:
    answers = in_flight(tmp_path, signal.SIGKILL)
    assert len(answers) == CLIENTS
    with pytest.raises(AssertionError):
        judge(url_in(tmp_path), answers, nobody_lost=True)


def end_under_load(service: Service) -> None:
    """Send a signal while everybody spends: nothing was charged without an answer, and no process is left."""
    processes = [*service.workers, *service.writers]
    with odo.connect(service.ledger_url) as ledger:
        ledger.open_account("a", POLICY)
    clients = [Client(service, f"c{client}", 200) for client in range(CLIENTS)]
    while not all(len(client.answers) > 10 for client in clients):
        time.sleep(0.01)
    assert ended(service, signal.SIGTERM) < SHUTDOWN_TIMEOUT
    assert not any(status(pid) for pid in processes)
    answers = {key: answer for client in clients for key, answer in client.join().items()}
    judge(service.ledger_url, answers, nobody_lost=False)


def test_under_load_a_signal_loses_nothing_and_the_next_start_finds_everything_in_order(tmp_path: Path) -> None:
    with Service(url_in(tmp_path), tmp_path) as service:
        assert len(service.writers) == 1
        end_under_load(service)
        service.start()
        with odo.connect(service.url, token=service.token()) as owner:
            owner.verify()
            assert owner.account("a").totals.steps == len(charged(service.ledger_url))


def test_under_load_a_signal_ends_all_workers_and_loses_nothing(postgres_url: str, tmp_path: Path) -> None:
    with Service(postgres_url, tmp_path, "--workers", "2") as service:
        while len(service.writers) < 2:  # one of the workers is ready, or both
            time.sleep(0.01)
        end_under_load(service)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_connections_that_are_idle_do_not_delay_the_end_and_it_ends_with_code_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Service(url_in(tmp_path), tmp_path) as service, httpx.Client(base_url=service.url) as idle:
        assert idle.get("/healthz").status_code == 200
        with socket.create_connection(("127.0.0.1", service.port)) as half:
            half.sendall(b"POST /v1/accounts/a/spends HTTP/1.1\r\nHost: x\r\n")  # and never the rest
            time.sleep(0.2)
            assert ended(service, number) < 5


def test_a_policy_that_is_being_solved_when_the_signal_comes_is_opened(tmp_path: Path) -> None:
    answers: list[int] = []
    with Service(url_in(tmp_path), tmp_path, ODOGRAPH_CACHE=str(tmp_path / "budgets")) as service:
        headers = {"Authorization": f"Bearer {service.token()}", "Idempotency-Key": "open"}
        form = {"name": "a", "policy": odo.Policy(0.9173, 1e-6).to_dict()}

        def open_account() -> None:
            answer = httpx.post(f"{service.url}/v1/accounts", json=form, headers=headers, timeout=60)
            answers.append(answer.status_code)

        opener = threading.Thread(target=open_account, daemon=True)
        opener.start()
        time.sleep(0.5)
        assert not answers  # it is being solved
        ended(service, signal.SIGTERM)
        opener.join(60)
    assert answers == [201]
    with odo.connect(url_in(tmp_path)) as ledger:
        assert ledger.account("a").policy.epsilon == pytest.approx(0.9173)


def test_the_first_start_writes_a_key_that_only_its_user_can_read_and_later_ones_write_none(tmp_path: Path) -> None:
    with Service(url_in(tmp_path), tmp_path) as service:
        assert service.owner_key_file.stat().st_mode & 0o777 == 0o600
        assert service.said.count(f"the first owner's API key to {service.owner_key_file}") == 1
        token = service.token()
        assert token not in service.said
        ended(service, signal.SIGINT)
        service.owner_key_file.unlink()
        service.start()
        assert service.said.count("owner's API key") == 1
        assert not service.owner_key_file.exists()
        with odo.connect(service.url, token=token) as ledger:
            assert ledger.principal == "owner"


def test_services_that_start_first_at_once_make_one_key_and_all_of_them_serve(tmp_path: Path) -> None:
    services = [Service(url_in(tmp_path), tmp_path) for _ in range(2)]
    try:
        processes = [service.launch() for service in services]
        while not all(service.is_ready() for service in services):
            assert not any(process.poll() for process in processes), services[0].said
            time.sleep(0.1)
        for service in services:
            with odo.connect(service.url, token=service.token()) as ledger:
                assert ledger.principal == "owner"
    finally:
        for service in services:
            service.kill()
    assert services[0].said.count("owner's API key") == 1
    with connect_keys(url_in(tmp_path)) as keys:
        assert len(keys.keys()) == 1


CUT_OFF = """
import os, sys
from pathlib import Path
from odograph.service.key_store import KeyStore
from odograph.service.server import write_first_key
from odograph.service.settings import Settings
first = KeyStore.first_owner
def cut(self, *args):
    first(self, *args)
    os._exit(9)  # as a crash right after the commit
KeyStore.first_owner = cut
write_first_key(Settings(url=sys.argv[1], owner_key_file=Path(sys.argv[2])))
"""


def test_a_first_start_that_crashes_leaves_no_key_that_nobody_can_read(tmp_path: Path) -> None:
    service = Service(url_in(tmp_path), tmp_path)
    command = [sys.executable, "-c", CUT_OFF, service.ledger_url, str(service.owner_key_file)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9  # noqa: S603  our own code
    with service, odo.connect(service.url, token=service.token()) as ledger:
        assert ledger.principal == "owner"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workers", "2"], "workers must be 1 for a SQLite ledger"),
        (["--host", "0.0.0.0"], "--plain-http"),  # noqa: S104  that is what is refused
        (["--url", "memory://"], "sqlite:///privacy.db"),
        (["--tls-cert", "cert.pem"], "--tls-key"),
        (["--owner-key-file", "taken"], "--owner-key-file"),
    ],
)
def test_what_would_not_be_safe_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("somebody's own")
    with socket.create_server(("127.0.0.1", 0)) as other:  # so that nothing is ever served here
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", "--url", url_in(tmp_path), "--port", port, *arguments])
    assert done.exit_code not in (0, 1)
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert (tmp_path / "taken").read_text() == "somebody's own"


def test_a_port_that_is_taken_ends_the_start_and_says_so(tmp_path: Path) -> None:
    service = Service(url_in(tmp_path), tmp_path)
    with socket.create_server(("127.0.0.1", service.port)):
        assert service.launch().wait(60) != 0
    assert "address already in use" in service.said
    assert "Traceback" not in service.said


def test_every_address_without_tls_is_served_if_tls_ends_in_front(tmp_path: Path) -> None:
    with Service(url_in(tmp_path), tmp_path, "--host", "0.0.0.0", "--plain-http") as service:  # noqa: S104  as it says
        assert service.is_ready()


def test_a_service_with_tls_is_reached_by_clients_that_trust_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the program openssl makes the certificate, and it is not here")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=odograph", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run([*command, *files, *subject, "-days", "1"], check=True, capture_output=True)  # noqa: S603  as above
    service = Service(url_in(tmp_path), tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key))
    service.url = service.url.replace("http:", "https:")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with service:
        with odo.connect(service.url, token=service.token()) as ledger:
            ledger.open_account("a", POLICY).spend(odo.PureDP(0.1), key="k")
        monkeypatch.delenv("SSL_CERT_FILE")
        with (
            odo.connect(service.url, token=service.token(), timeout=1) as stranger,
            pytest.raises(ServiceUnavailable, match=r"(?s)certificate.*nothing was sent"),
        ):
            stranger.spend({"a": odo.PureDP(0.1)})
    assert charged(service.ledger_url) == {"k"}


def test_the_first_charge_of_a_service_is_answered_also_when_it_comes_while_another_verb_writes(
    tmp_path: Path,
) -> None:
    with odo.connect(url_in(tmp_path)) as ledger:
        reservation = ledger.open_account("a", POLICY).reserve(odo.PureDP(0.1))
    answered: list[str] = []
    with ServiceThread(url_in(tmp_path)) as service:

        def ask(verb: str) -> None:
            with odo.connect(service.url, token=service.token("ana"), timeout=5) as ledger:
                if verb == "spend":
                    ledger.spend({"a": odo.PureDP(0.1)}, key="k")
                else:
                    ledger.commit(reservation.id)
            answered.append(verb)

        threads = [threading.Thread(target=ask, args=(verb,), daemon=True) for verb in ("commit", "spend")]
        with held(url_in(tmp_path)):
            for thread in threads:
                thread.start()
                time.sleep(0.5)  # it waits for the ledger
        for thread in threads:
            thread.join(60)
    assert sorted(answered) == ["commit", "spend"]


def test_the_first_owner_s_key_is_written_beside_a_ledger_whose_path_is_encoded(tmp_path: Path) -> None:
    folder = tmp_path / "my folder"
    folder.mkdir()
    made = write_first_key(Settings(url=f"sqlite:///{tmp_path}/my%20folder/l.db"))
    assert made == folder / "l.db-owner-key"
    assert made.exists()
