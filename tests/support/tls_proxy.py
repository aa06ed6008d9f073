"""Caddy with deploy/'s configuration in front of a service: TLS on a loopback port, with a certificate of its own."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from postgres_server import free_port
from server_programs import program
from service_process import wait_until

CADDYFILE = Path(__file__).parents[2] / "deploy" / "Caddyfile"


class TlsProxy:
    """A running Caddy. `authority` is the file of the certificate that clients have to trust.

    It can be killed and started again on the same ports.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.secure_port, self.plain_port = free_port(), free_port()
        self.url = f"https://localhost:{self.secure_port}"
        self.authority = folder / "caddy" / "pki" / "authorities" / "local" / "root.crt"
        self._caddy = program("caddy", "caddy")
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        ports = f"http_port {self.plain_port}\nhttps_port {self.secure_port}\n"
        text = CADDYFILE.read_text().replace("odograph:8300", f"127.0.0.1:{port}")
        (folder / "Caddyfile").write_text("{\nadmin off\nskip_install_trust\n" + ports + "}\n" + text)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start Caddy and wait until the service answers through it."""
        homes = {name: str(self._folder) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
        with (self._folder / "caddy.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own
                [self._caddy, "run", "--config", str(self._folder / "Caddyfile"), "--adapter", "caddyfile"],
                env=os.environ | homes | {"ODOGRAPH_HOST": "localhost"},
                stderr=log,
            )
        wait_until(self._answers)

    def kill(self) -> None:
        """End it at once, with all its connections. Does nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def trust(self) -> ssl.SSLContext:
        """Return a context that trusts its certificate."""
        return ssl.create_default_context(cafile=str(self.authority))

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", verify=self.trust()).status_code == 200
        except (FileNotFoundError, ssl.SSLError, httpx.TransportError):
            return False
