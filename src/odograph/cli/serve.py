"""`odograph serve`: the service, on one SQLite file or on PostgreSQL."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from odograph.cli.options import DEFAULT_URL
from odograph.extras import load

__all__ = ["serve"]


def serve(  # noqa: PLR0913  each is one option
    *,
    url: Annotated[
        str, typer.Option(envvar="ODOGRAPH_URL", help="Where the ledger is: sqlite:///FILE or postgresql://...")
    ] = DEFAULT_URL,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8300,
    workers: Annotated[int, typer.Option(help="Processes; more than one needs PostgreSQL.")] = 1,
    rate: Annotated[float, typer.Option(help="Requests a second for one key; 0 for any number.")] = 1000.0,
    connections: Annotated[int, typer.Option(help="Connections to one worker, at most.")] = 2000,
    connections_per_address: Annotated[
        int, typer.Option(help="Of them, from one address; 0 for any number, as behind a proxy.")
    ] = 256,
    receive_timeout: Annotated[
        float, typer.Option(help="Seconds in which the head of a request, and then its body, must have arrived.")
    ] = 20.0,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds to wait at the start for a database that cannot be reached.")
    ] = 300.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error or critical.")] = "info",
    owner_key_file: Annotated[
        Path | None, typer.Option(help="Where the first owner's key is written; beside the ledger if left out.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate, to serve TLS itself.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="TLS ends in front of the service: listen on any address without it.")
    ] = False,
    accept_fsync_off: Annotated[
        bool, typer.Option("--accept-fsync-off", help="Use a PostgreSQL that may lose what it acknowledged.")
    ] = False,
) -> None:
    """Serve a ledger over HTTP, with a dashboard at its root. The first start writes an owner's API key to a file.

    odograph serve

    odograph serve --url postgresql://odograph@db/budgets --workers 4
    """
    load("starlette")
    settings = import_module("odograph.service.settings").Settings(
        url=url,
        host=host,
        port=port,
        workers=workers,
        rate=rate,
        connections=connections,
        connections_per_address=connections_per_address,
        receive_timeout=receive_timeout,
        start_timeout=start_timeout,
        log_level=log_level,
        owner_key_file=owner_key_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        plain_http=plain_http,
        accept_fsync_off=accept_fsync_off,
    )
    import_module("odograph.service.server").serve(settings, typer.echo)
