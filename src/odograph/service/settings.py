"""Settings of the service. Worker processes read them from their environment."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from odograph.errors import InvalidArgument
from odograph.service.auth import RateLimit, TrustedProxy
from odograph.service.monitoring import is_loopback, rules_of

__all__ = ["LEVELS", "VARIABLE", "Settings", "tune_garbage_collector"]

VARIABLE: Final = "ODOGRAPH_SERVICE"
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_YOUNG_OBJECTS: Final = 20_000  # allocations between two collections
_PATHS: Final = ("owner_key_file", "population_root", "tls_cert", "tls_key")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `odograph serve`. `plain_http` states that a proxy in front of the service terminates TLS.

    `rate` is requests a second for one key (0: no limit), and `burst` how many may come at once (default: twice the
    rate). Sizes are bytes. `timeout` is seconds to wait for the ledger, `receive_timeout` seconds in which a request
    must have arrived. `connections` is the most that a worker accepts, `connections_per_address` the most from one
    address (0: no limit). `start_timeout` is seconds to wait for an unreachable ledger when the service starts.
    `alerts` is a document with rules for alerts, of which none is sent without one.
    `trusted_proxy` is the address of a proxy that signs people in, and `proxy_header` where it names them.
    `population_root` is the folder in which the service keeps the files of populations.
    """

    url: str = field(repr=False)  # it may hold a password
    host: str = "127.0.0.1"
    port: int = 8300
    workers: int = 1
    rate: float = 1000.0
    burst: float | None = None
    largest_body: int = 1 << 20
    largest_import: int = 1 << 30
    timeout: float = 10.0
    start_timeout: float = 300.0
    receive_timeout: float = 20.0
    connections: int = 2000
    connections_per_address: int = 256
    log_level: str = "info"
    owner_key_file: Path | None = None
    accept_fsync_off: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plain_http: bool = False
    trusted_proxy: str | None = None
    proxy_header: str | None = None
    population_root: Path | None = None
    alerts: dict[str, Any] | None = field(default=None, repr=False)  # the address may hold a token

    @property
    def proxy(self) -> TrustedProxy | None:
        """The proxy whose header signs people in; None by default."""
        if self.trusted_proxy is None or self.proxy_header is None:
            return None
        return TrustedProxy(self.trusted_proxy, self.proxy_header)

    @property
    def secure_cookies(self) -> bool:
        """Whether browsers must send cookies over TLS only: TLS ends here, or at a proxy in front."""
        return self.tls_cert is not None or self.plain_http

    def check(self) -> None:
        """Raise unless the service can run with these settings, and safely."""
        self._check_url()
        self._check_numbers()
        if self.alerts is not None:
            rules_of(self.alerts)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument(
                "TLS needs both a certificate and its key: pass --tls-cert and --tls-key, or neither"
            )
        if (self.trusted_proxy is None) != (self.proxy_header is None):
            raise InvalidArgument(
                "sign-in by a proxy needs its address and its header: pass --trusted-proxy and --proxy-header, or"
                " neither"
            )
        if self.population_root is not None and self.population_root.exists() and not self.population_root.is_dir():
            raise InvalidArgument(f"population_root must be a folder (got {self.population_root}, which is a file)")
        if self.proxy is not None and not self.plain_http:
            raise InvalidArgument(
                "sign-in by a proxy needs a proxy in front that terminates TLS: pass --plain-http too"
            )
        if not is_loopback(self.host) and not self.secure_cookies:
            raise InvalidArgument(
                f"host {self.host!r} is reachable from other machines, and keys would be sent unencrypted: put a TLS"
                " proxy in front and pass --plain-http, or pass --tls-cert and --tls-key"
            )

    @property
    def environment(self) -> dict[str, str]:
        """The settings as environment variables, for `from_environment`."""
        form = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {VARIABLE: json.dumps(form)}

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the settings from this process's environment variables."""
        try:
            form = json.loads(os.environ[VARIABLE])
            values = {one.name: form[one.name] for one in fields(cls)}
        except (KeyError, TypeError, ValueError) as problem:
            raise InvalidArgument(
                f"{VARIABLE} does not hold the service's settings; start it by `odograph serve`"
            ) from problem
        return cls(**values | {name: Path(values[name]) for name in _PATHS if values[name] is not None})

    def _check_url(self) -> None:
        scheme = self.url.partition("://")[0]
        if scheme == "memory":
            raise InvalidArgument(
                "url must be a durable ledger (got memory://): use sqlite:///privacy.db or postgresql://..."
            )
        if scheme in ("http", "https"):
            raise InvalidArgument(
                "url must be a ledger (got another service): use sqlite:///privacy.db or postgresql://..."
            )
        if scheme not in ("sqlite", "postgresql", "postgres"):
            raise InvalidArgument("url must be a ledger: use sqlite:///privacy.db or postgresql://user@host/database")
        if scheme == "sqlite" and self.workers > 1:
            raise InvalidArgument(
                f"workers must be 1 for a SQLite ledger (got {self.workers}); a PostgreSQL ledger can have several"
            )

    def _check_numbers(self) -> None:
        for name, least, most in (
            ("port", 0, 65_535),
            ("workers", 1, 1000),
            ("largest_body", 1024, 1 << 40),
            ("largest_import", 1024, 1 << 50),
            ("timeout", 0.001, 3600),
            ("start_timeout", 0, 1e9),
            ("receive_timeout", 0.1, 3600),
            ("connections", 1, 1_000_000),
            ("connections_per_address", 0, 1_000_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most:  # also refuses NaN
                raise InvalidArgument(f"{name} must be from {least} to {most} (got {value!r})")
        RateLimit(self.rate, self.burst)
        if self.log_level not in LEVELS:
            raise InvalidArgument(f"log_level must be one of {', '.join(LEVELS)} (got {self.log_level!r})")


def tune_garbage_collector() -> None:
    """Tune the garbage collector for a long-running server: collect less often, and never what is loaded now.

    Otherwise collections would take a fifth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 50)
