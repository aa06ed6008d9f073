"""A server of S3 on a free port of this machine, for tests: Moto's, in a thread of the process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import fsspec
from moto.server import ThreadedMotoServer

BUCKET = "data"
KEY, SECRET = "AKIAHUNTER2", "hunter2-is-secret"  # whatever they are, the server accepts them


@contextmanager
def object_server() -> Iterator[str]:
    """Run a server with one bucket, and configure fsspec for it here and in programs that are started."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = {"endpoint_url": f"http://{host}:{port}", "key": KEY, "secret": SECRET}
        variables = {f"FSSPEC_S3_{name.upper()}": value for name, value in settings.items()}
        with mock.patch.dict(os.environ, variables), mock.patch.dict(fsspec.config.conf, {"s3": settings}):
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield settings["endpoint_url"]
    finally:
        server.stop()
