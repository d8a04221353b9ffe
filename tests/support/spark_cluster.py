"""A standalone Spark cluster of two worker processes, from the PySpark package alone.

The workers are like strangers' machines: each has a folder of its own to run in, sees nothing
of the driver's, and cannot import this project.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from pathlib import Path

from databus.cli.demo.private_servers import free_port
from tests.support.waiting import PATIENCE, eventually_sync

_STRANGER = """
import importlib.util, os, sys

def has_databus(folder):
    return os.path.isdir(os.path.join(folder or ".", "databus"))

sys.path[:] = [folder for folder in sys.path if not has_databus(folder)]
found = importlib.util.find_spec("databus")
with open(os.path.join(os.environ["STRANGER_HOME"], f"python-{os.getpid()}"), "w") as file:
    file.write(repr(found))
"""


class SparkCluster:
    """Master and two workers on the loopback interface.

    Owner: the test that made it; ``close`` ends all of it.
    """

    def __init__(self, folder: Path, *, memory: str = "640m") -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers = [folder / f"worker-{number}" for number in (1, 2)]
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        try:
            master = ["master.Master", "--host", "127.0.0.1", "--port", str(port)]
            self._start(folder / "master", *master)
            for home in self.workers:
                options = ["--host", "127.0.0.1", "--cores", "1", "--memory", memory]
                self._start(home, "worker.Worker", self.url, *options, "-d", str(home / "work"))
            eventually_sync(self._is_whole, 90.0, "both workers are registered", poll_s=0.2)
        except BaseException:
            self.close()
            raise

    def _start(self, home: Path, name: str, *arguments: str) -> None:
        strange = home / "python"
        strange.mkdir(parents=True)
        (strange / "sitecustomize.py").write_text(_STRANGER)
        spec = importlib.util.find_spec("pyspark")
        assert spec is not None and spec.origin is not None
        program = Path(spec.origin).parent / "bin" / "spark-class"
        keep = ("PATH", "JAVA_HOME", "LANG", "TMPDIR")
        environment = {key: os.environ[key] for key in keep if key in os.environ}
        environment |= {
            "PYTHONPATH": str(strange),
            "STRANGER_HOME": str(home),
            "HOME": str(home),
            "SPARK_LOCAL_DIRS": str(home / "local"),
            # Executors are killed, and take nothing with them.
            "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={home}",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        command = [str(program), f"org.apache.spark.deploy.{name}", "--webui-port", "0"]
        with (home / "log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*command, *arguments],
                    cwd=home,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _is_whole(self) -> bool:
        for process in self._processes:
            assert process.poll() is None or self._said(), "a process of the cluster ended"
        return all("Successfully registered" in (w / "log").read_text() for w in self.workers)

    def _said(self) -> bool:
        said = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*/log"))
        raise RuntimeError(f"a process of the Spark cluster ended: {said}")

    def executors(self) -> list[int]:
        """How many executors each worker has started."""
        return [len(list((home / "work").glob("app-*/*"))) for home in self.workers]

    def pythons(self) -> list[str]:
        """Of each Python that ran on a worker, what it found under the name ``databus``."""
        return [path.read_text() for home in self.workers for path in home.glob("python-*")]

    def close(self) -> None:
        """End all processes, executors too."""
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(20 * PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20 * PATIENCE)
