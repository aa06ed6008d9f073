"""Sign-in by a proxy: its header names a principal, from its address only, and only if the operator says so."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_client import csrf_of, words_of
from postgres_server import free_port
from server_programs import program
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.app import app
from odograph.errors import InvalidArgument, OdographError
from odograph.service.auth import TrustedProxy
from odograph.service.key_store import connect_keys
from odograph.service.settings import Settings

HEADER = "X-Forwarded-Email"
ANA, BEN = "ana@example.org", "ben@example.org"
COOKIE = "__Host-odograph_session"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ServiceThread]:
    """A service that trusts a proxy on this machine."""
    with serving(tmp_path, trusted_proxy="127.0.0.1", proxy_header=HEADER) as service:
        yield service


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[ServiceThread]:
    with ServiceThread(f"sqlite:///{folder}/ledger.db", plain_http=True, **settings) as service:
        yield service


class Browser:
    """A browser behind a proxy that sends these headers: it keeps cookies, also those for TLS only."""

    def __init__(self, url: str, *headers: tuple[str, str], cookies: dict[str, str] | None = None) -> None:
        self.url = url
        self.headers = [*headers]
        self.cookies = {} if cookies is None else cookies

    def ask(self, method: str, path: str, data: dict[str, str] | None = None) -> httpx.Response:
        crumbs = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers = [*self.headers, *([("Cookie", crumbs)] if crumbs else [])]
        answer = httpx.request(method, self.url + path, data=data, headers=headers)
        for line in answer.headers.get_list("set-cookie"):
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer

    def go_on(self, **fields: str) -> httpx.Response:
        """Send the form of the sign-in page."""
        csrf = csrf_of(self.ask("GET", "/sign-in").text)
        return self.ask("POST", "/sign-in", {"csrf": csrf, "then": "/", **fields})

    def who(self) -> str | None:
        """Return the principal whose pages this browser is shown."""
        answer = self.ask("GET", "/")
        if answer.status_code != 200:
            return None
        return next((name for name in (ANA, BEN, "owner") if name in words_of(answer.text)), "?")


def test_the_principal_that_the_proxy_names_continues_without_a_key_and_has_the_rights_of_its_own_key(
    serve: ServiceThread,
) -> None:
    serve.token(ANA, "auditor")
    browser = Browser(serve.url, (HEADER, ANA))
    assert browser.ask("GET", "/").headers["location"] == "/sign-in?then=%2F"
    page = browser.ask("GET", "/sign-in").text
    assert f"You are signed in at the proxy as {ANA}" in words_of(page)
    assert 'name="token"' not in page
    answer = browser.go_on()
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert browser.who() == ANA
    assert browser.ask("GET", "/open").status_code == 403  # an auditor opens nothing


def test_a_name_without_a_valid_key_gets_nothing(serve: ServiceThread) -> None:
    serve.token(ANA, "auditor")
    browser = Browser(serve.url, (HEADER, BEN))
    answer = browser.go_on()
    assert answer.status_code == 401
    assert "ask an owner to make an API key for this name" in words_of(answer.text)
    assert COOKIE not in browser.cookies
    serve.token(BEN, "auditor", expires=0.001)
    time.sleep(0.01)
    assert browser.go_on().status_code == 401
    # No API key of somebody else helps: the proxy says who this is.
    assert browser.go_on(token=serve.token("owner")).status_code == 401
    assert browser.who() is None


def test_the_newest_valid_key_counts_and_revoking_it_ends_the_session(serve: ServiceThread) -> None:
    serve.token("root")
    serve.token(ANA, "auditor")
    serve.token(ANA, "owner")
    browser = Browser(serve.url, (HEADER, ANA))
    browser.go_on()
    assert browser.ask("GET", "/open").status_code == 200
    with connect_keys(serve.settings.url) as keys:
        newest, *_ = keys.keys()
        assert newest.role == "owner"
        keys.revoke(newest.id, "test")
    assert browser.who() is None
    browser.go_on()
    assert browser.who() == ANA
    assert browser.ask("GET", "/open").status_code == 403


def test_a_session_ends_when_the_proxy_names_somebody_else(serve: ServiceThread) -> None:
    for name in (ANA, BEN):
        serve.token(name, "auditor")
    browser = Browser(serve.url, (HEADER, ANA))
    browser.go_on()
    other = Browser(serve.url, (HEADER, BEN), cookies=dict(browser.cookies))
    assert other.who() is None
    assert browser.who() == ANA
    other.go_on()
    assert other.who() == BEN


# Negative controls: whatever is not the header of the trusted proxy, once, with a name in it.


@pytest.mark.parametrize("path", ["/", "/sign-in", "/audit", "/docs"])
def test_the_header_from_another_address_is_refused_and_not_overlooked(tmp_path: Path, path: str) -> None:
    with serving(tmp_path, trusted_proxy="192.0.2.7", proxy_header=HEADER) as service:
        service.token(ANA, "auditor")
        browser = Browser(service.url, (HEADER, ANA))
        answer = browser.ask("GET", path)
        assert answer.status_code == 403
        assert "accepted from the trusted proxy only" in words_of(answer.text)
        assert not browser.cookies
        # Without the header the service is what it was: an API key signs in.
        plain = Browser(service.url)
        assert plain.go_on(token=service.token("owner")).status_code == 303
        # Its cookie helps no forger either.
        forger = Browser(service.url, (HEADER, ANA), cookies=plain.cookies)
        assert forger.ask("GET", path).status_code == 403


def test_the_header_without_the_setting_is_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        service.token(ANA, "auditor")
        browser = Browser(service.url, (HEADER, ANA))
        assert 'name="token"' in browser.ask("GET", "/sign-in").text
        assert browser.go_on().status_code == 401
        assert browser.who() is None
        assert browser.go_on(token=service.token("owner")).status_code == 303


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(HEADER, ANA), (HEADER, ANA)], 400),
        ([(HEADER, ANA), (HEADER, BEN)], 400),
        ([(HEADER.lower(), ANA), (HEADER.upper(), ANA)], 400),
        ([(HEADER, "")], 401),
        ([(HEADER, "   ")], 401),
        ([(HEADER, ""), (HEADER, ANA)], 400),
        ([(HEADER, "x" * 201)], 401),
        ([(HEADER, "ana\N{NO-BREAK SPACE}".encode().decode("latin-1"))], 401),
        ([(HEADER, b"\xff\xfe".decode("latin-1"))], 401),
    ],
)
def test_two_headers_an_empty_one_or_no_name_are_refused(
    serve: ServiceThread, headers: list[tuple[str, str]], status: int
) -> None:
    serve.token(ANA, "auditor")
    good = Browser(serve.url, (HEADER, ANA))
    good.go_on()
    assert good.who() == ANA
    for path in ("/", "/sign-in"):
        answer = raw(serve, "GET", path, headers, good.cookies)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
        assert b"set-cookie" not in answer.lower()


@pytest.mark.parametrize("name", ["X_Forwarded_Email", "X-Forwarded-Email-", "X-Forwarded-User", "Forwarded"])
def test_other_spellings_of_the_header_are_other_headers(serve: ServiceThread, name: str) -> None:
    serve.token(ANA, "auditor")
    assert Browser(serve.url, (name, ANA)).go_on().status_code == 401


def raw(
    service: ServiceThread, method: str, path: str, headers: list[tuple[str, str]], cookies: dict[str, str]
) -> bytes:
    """Send headers as they are, which no client library would."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Accept: text/html"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append("Cookie: " + "; ".join(f"{name}={value}" for name, value in cookies.items()))
    with socket.create_connection(("127.0.0.1", service.settings.port), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_the_api_never_reads_the_header(serve: ServiceThread) -> None:
    token = serve.token(ANA, "owner")
    with odo.connect(serve.url, token=token) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    browser = Browser(serve.url, (HEADER, ANA))
    browser.go_on()
    cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    body = {"cost": {"kind": "pure", "epsilon": "0.1"}}
    headers = {HEADER: ANA, "Cookie": cookies, "Idempotency-Key": "k"}
    answer = httpx.post(f"{serve.url}/v1/accounts/census/spends", json=body, headers=headers)
    assert answer.status_code == 401
    answer = httpx.post(
        f"{serve.url}/v1/accounts/census/spends", json=body, headers=headers | {"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 201  # Control: with the key it is charged


def test_a_form_without_the_page_s_token_begins_no_session(serve: ServiceThread) -> None:
    serve.token(ANA, "auditor")
    browser = Browser(serve.url, (HEADER, ANA))
    assert browser.ask("POST", "/sign-in", {"then": "/"}).status_code == 403
    browser.ask("GET", "/sign-in")
    assert browser.ask("POST", "/sign-in", {"then": "/", "csrf": "x"}).status_code == 403
    assert COOKIE not in browser.cookies


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"trusted_proxy": "10.0.0.5"}, "pass --trusted-proxy and --proxy-header, or neither"),
        ({"proxy_header": HEADER}, "pass --trusted-proxy and --proxy-header, or neither"),
        ({"trusted_proxy": "proxy.example.org", "proxy_header": HEADER}, "must be the proxy's address"),
        ({"trusted_proxy": "10.0.0.5/24", "proxy_header": HEADER}, "must be the proxy's address"),
        ({"trusted_proxy": "0.0.0.0/0", "proxy_header": HEADER}, "must not be every address"),
        ({"trusted_proxy": "::/0", "proxy_header": HEADER}, "must not be every address"),
        ({"trusted_proxy": "10.0.0.5", "proxy_header": "Authorization"}, "must be a header of the proxy's own"),
        ({"trusted_proxy": "10.0.0.5", "proxy_header": "X User"}, "must be a header of the proxy's own"),
        ({"trusted_proxy": "10.0.0.5", "proxy_header": "X_User"}, "must be a header of the proxy's own"),
        ({"trusted_proxy": "10.0.0.5", "proxy_header": ""}, "must be a header of the proxy's own"),
        ({"trusted_proxy": "10.0.0.5", "proxy_header": HEADER, "plain_http": False}, "pass --plain-http too"),
    ],
)
def test_settings_that_would_not_be_safe_are_refused(given: dict[str, object], says: str) -> None:
    chosen: dict[str, object] = {"plain_http": True} | given
    with pytest.raises(InvalidArgument, match=says):
        Settings(url="sqlite:///x.db", **chosen).check()  # type: ignore[arg-type]


def test_the_command_line_has_the_settings_and_workers_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["serve", "--trusted-proxy", "10.0.0.5"])
    assert result.exit_code == 2
    assert "--proxy-header" in result.stderr
    settings = Settings(url="sqlite:///x.db", trusted_proxy="10.0.0.5", proxy_header=HEADER, plain_http=True)
    settings.check()
    for name, value in settings.environment.items():
        monkeypatch.setenv(name, value)
    assert Settings.from_environment() == settings
    assert Settings(url="sqlite:///x.db").proxy is None


ADDRESSES = st.ip_addresses().map(str) | st.sampled_from(["", "unix", "10.0.0.5 ", "10.0.0.05", "::ffff:10.0.0.5"])


@given(address=ADDRESSES | st.none(), value=st.binary(max_size=30), count=st.integers(0, 3))
def test_only_one_readable_header_from_the_proxy_s_address_names_a_principal(
    address: str | None, value: bytes, count: int
) -> None:
    proxy = TrustedProxy("10.0.0.5", HEADER)
    headers = [(b"accept", b"*/*"), *[(HEADER.lower().encode(), value)] * count]
    trusted = address in {"10.0.0.5", "::ffff:10.0.0.5"}
    try:
        found = proxy.principal(address, headers)
    except OdographError:
        assert count > 0
        assert not trusted or count > 1 or not value or not value.isascii() or not value.decode().isprintable()
    else:
        assert (found is None) == (count == 0)
        assert found is None or (trusted and count == 1 and found.encode() == value)


def test_networks_of_both_families_are_trusted_whole_and_no_more() -> None:
    header = [(HEADER.lower().encode(), ANA.encode())]
    for network, inside, outside in (
        ("10.0.0.0/29", "10.0.0.7", "10.0.0.8"),
        ("fd00::/120", "fd00::ff", "fd00::100"),
        ("127.0.0.1", "::ffff:127.0.0.1", "127.0.0.2"),
    ):
        proxy = TrustedProxy(network, HEADER)
        assert proxy.principal(inside, header) == ANA
        with pytest.raises(OdographError):
            proxy.principal(outside, header)


# The example of the documentation, with a real nginx: it replaces what a client sends under that name.


def test_the_example_for_nginx_signs_in_who_was_authenticated_and_replaces_forged_headers(
    tmp_path: Path,
) -> None:
    nginx, folder = program("nginx", "nginx"), tmp_path
    example = (ROOT / "deploy" / "nginx-oidc.conf").read_text()
    with ExitStack() as stack:
        service = stack.enter_context(serving(folder, trusted_proxy="127.0.0.1", proxy_header=HEADER))
        service.token(ANA, "auditor")
        identity = free_port()
        port = free_port()
        # Stands for oauth2-proxy: it knows the person by the proxy's cookie, and says so as oauth2-proxy does.
        fake = f"""
        server {{
            listen 127.0.0.1:{identity};
            location = /oauth2/auth {{
                if ($cookie_sso != "ana") {{ return 401; }}
                add_header X-Auth-Request-Email {ANA} always;
                return 202;
            }}
        }}"""
        own = (
            example.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
            .replace("127.0.0.1:4180", f"127.0.0.1:{identity}")
            .replace("127.0.0.1:8300", f"127.0.0.1:{service.settings.port}")
        )
        own = "\n".join(line for line in own.splitlines() if "ssl_" not in line)
        temporary = "".join(
            f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"pid {folder}/pid; daemon off; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary}\n{fake}\n{own}\n}}"
        )
        log = stack.enter_context((folder / "log").open("wb"))
        command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        process = subprocess.Popen(command, stderr=log)  # noqa: S603  our own
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 20
        while True:
            try:
                httpx.get(f"{url}/healthz")
                break
            except httpx.TransportError:
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.05)
        stranger = Browser(url, (HEADER, ANA))  # who says so, without having signed in
        assert stranger.ask("GET", "/").headers["location"].startswith("/oauth2/start?rd=")
        ana = Browser(url, (HEADER, "owner"), (HEADER, "root"), cookies={"sso": "ana"})
        ana.go_on()
        assert ana.who() == ANA
        # Programs go on with their keys, past the sign-in.
        token = service.token("bot", "owner")
        answer = httpx.get(f"{url}/v1/accounts", headers={"Authorization": f"Bearer {token}", HEADER: ANA})
        assert answer.status_code == 200
