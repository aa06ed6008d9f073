"""The cost of a durable spend over HTTP: this service compared with FastAPI answering a constant.

Both run under uvicorn with the same loop and parser, one worker each, and wrk sends requests over 64 connections from
the same machine. A spend is one request with its own idempotency key, answered when it is on disk; a batch has 100 of
them, and is also sent to an account with the filter that 0.1.0 was measured with. All alternate in one run; ratios
are of operations per second, with their spread. Latencies are wrk's.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

import odograph as odo
from timing import row

HERE = Path(__file__).parent
POLICY = odo.Policy(20, "1e-6")  # the default, with no choice made; so roomy that nothing is refused
NARROW = odo.Policy(20, "1e-6", filter="zcdp")  # with half as many meters, as 0.1.0 was measured
BATCH = 100
# Written by wrk's own interpreter at every request, so that every key is new.
SPEND = """
local n, salt = 0, os.getenv("SALT")
local headers = {["Authorization"]="Bearer "..os.getenv("TOKEN"), ["Content-Type"]="application/json"}
local body = '{"cost":{"kind":"pure","epsilon":"0.000001"}}'
request = function()
  n = n + 1
  headers["Idempotency-Key"] = salt..n
  return wrk.format("POST", "/v1/accounts/hot/spends", headers, body)
end
"""
BATCHES = """
local n, salt = 0, os.getenv("SALT")
local costs = '","costs":{"'..os.getenv("ACCOUNT")..'":{"kind":"pure","epsilon":"0.000001"}}}'
local headers = {["Authorization"]="Bearer "..os.getenv("TOKEN"), ["Content-Type"]="application/json"}
request = function()
  local items = {}
  for i = 1, 100 do
    n = n + 1
    items[i] = '{"key":"'..salt..n..costs
  end
  return wrk.format("POST", "/v1/batches", headers, '{"spends":['..table.concat(items, ",")..']}')
end
"""
CONSTANT = """
request = function()
  return wrk.format("POST", "/constant", {["Content-Type"]="application/json"}, '{"cost":{"kind":"pure"}}')
end
"""


class Load(NamedTuple):
    """Requests per second, and how long the slowest of a hundred took, in milliseconds."""

    rate: float
    p50: float
    p99: float


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], ready: str, cwd: Path, log: Path) -> Iterator[None]:
    """Run a server until the block ends."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd) as process:  # noqa: S603
        try:
            for _ in range(200):
                time.sleep(0.1)
                try:
                    httpx.get(ready, timeout=1)
                    break
                except httpx.TransportError:
                    continue
            yield
        finally:
            process.terminate()


def wrk(script: Path, url: str, seconds: int, environment: Mapping[str, str]) -> Load:
    """Ask with 64 connections for some seconds; an answer that is no success ends the run."""
    program = shutil.which("wrk")
    if program is None:
        raise SystemExit("this needs wrk, as in: apt-get install wrk")
    command = [program, "-t1", "-c64", f"-d{seconds}", "--latency", "-s", str(script), url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})  # noqa: S603
    if "Non-2xx" in done.stdout:
        raise SystemExit(f"not every answer was a success:\n{done.stdout}")
    found = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    return Load(float(found[1]) if found else 0.0, _latency(done.stdout, 50), _latency(done.stdout, 99))


def _latency(text: str, part: int) -> float:
    found = re.search(rf"{part}%\s+([\d.]+)(us|ms|s)\b", text)
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]] if found else 0.0


def report(title: str, ours: list[Load], floor: list[Load], times: int, wanted: float) -> None:
    """Print a ratio with its spread, and the latencies."""
    pairs = [(times * a.rate, b.rate) for a, b in zip(ours, floor, strict=True)]
    rate, other = statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
    p50, p99 = statistics.median(load.p50 for load in ours), statistics.median(load.p99 for load in ours)
    note = f"{rate:,.0f} a second against {other:,.0f}, p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    print(row(title, [a / b for a, b in pairs], f"at least {wanted}", note), flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--few", action="store_true", help="one round of a second, to see that it runs")
    chosen = parser.parse_args()
    if chosen.few:
        chosen.rounds = chosen.seconds = 1
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; {chosen.rounds} rounds of {chosen.seconds} s")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as name:
        folder = Path(name).absolute()
        scripts = {"spend": SPEND, "batch": BATCHES, "constant": CONSTANT}
        for script, text in scripts.items():
            (folder / f"{script}.lua").write_text(text)
        compare(folder, chosen.rounds, chosen.seconds)


def compare(folder: Path, rounds: int, seconds: int) -> None:
    """Run all of them by turns."""
    ours, other = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    url = f"sqlite:///{folder}/served.db"
    serve = [str(Path(sys.executable).with_name("odograph")), "serve", "--url", url, "--rate", "0"]
    serve += ["--port", ours.rpartition(":")[2]]
    plain = [sys.executable, "-m", "uvicorn", "constant:app", "--app-dir", str(HERE), "--no-access-log"]
    plain += ["--loop", "uvloop", "--http", "httptools", "--port", other.rpartition(":")[2]]
    scripts = {"spend": "spend", "batch": "batch", "narrow": "batch", "constant": "constant"}
    loads: dict[str, list[Load]] = {what: [] for what in scripts}
    with (
        running(serve, f"{ours}/healthz", folder, folder / "ours.log"),
        running(plain, f"{other}/constant", folder, folder / "other.log"),
    ):
        token = (folder / "served.db-owner-key").read_text().strip()
        with odo.connect(ours, token=token) as ledger:
            hot = ledger.open_account("hot", POLICY)
            ledger.open_account("narrow", NARROW)
            for turn in range(rounds):
                order = [*loads] if turn % 2 else [*loads][::-1]
                for what in order:
                    account = "narrow" if what == "narrow" else "hot"
                    environment = {"TOKEN": token, "SALT": secrets.token_hex(6), "ACCOUNT": account}
                    where = other if what == "constant" else ours
                    loads[what].append(wrk(folder / f"{scripts[what]}.lua", where, seconds, environment))
                    # wrk leaves thousands of unanswered spends behind; this one comes after them.
                    hot.spend(odo.PureDP("0.000001"))
            floor = loads["constant"]
            report("durable spends over FastAPI's constant", loads["spend"], floor, 1, 1.0)
            report("spends in batches of 100 over FastAPI's constant", loads["batch"], floor, BATCH, 4.0)
            narrow = "spends in batches of 100, filter 'zcdp', over FastAPI's constant"
            report(narrow, loads["narrow"], floor, BATCH, 4.0)
            p50, p99 = statistics.median(load.p50 for load in floor), statistics.median(load.p99 for load in floor)
            print(f"  the constant itself: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        with odo.connect(url) as ledger:
            print(f"  {ledger.verify()}")


if __name__ == "__main__":
    main()
