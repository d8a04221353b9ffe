"""docker-compose.yml and deploy/: each command of ours is started as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from databus.cli.demo.private_servers import free_port
from databus.common.config import load
from tests.support.fixtures import FreshDatabase
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_broker import kafka_broker as kafka_broker  # a fixture
from tests.support.processes import DatabusProcess
from tests.support.waiting import eventually_sync
from tests.support.zookeeper_server import ZooKeeperServer

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
KUBERNETES = ROOT / "deploy" / "kubernetes"
PROGRAM = "/opt/databus/bin/databus"


class Service(NamedTuple):
    """One of our services: its arguments, and the file that it finds under their last word."""

    name: str
    arguments: tuple[str, ...]
    config: Path


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


def compose_services() -> list[Service]:
    """Those that run ``databus``."""
    found = []
    for name, service in compose().items():
        if service["image"] == "databus:local" and "entrypoint" not in service:
            mounts = dict(one.split(":")[1::-1] for one in service["volumes"] if one[0] == ".")
            arguments = tuple(service["command"])
            found.append(Service(name, arguments, ROOT / mounts[arguments[-1]]))
    return found


def kubernetes_documents() -> list[dict[str, Any]]:
    paths = [path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml"]
    return [one for path in sorted(paths) for one in yaml.safe_load_all(path.read_text())]


def kubernetes_services() -> list[Service]:
    """A service for each replica."""
    found = []
    for document in kubernetes_documents():
        if document["kind"] == "StatefulSet":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            assert container["image"] == "databus"
            arguments = tuple(container["args"])
            config = KUBERNETES / Path(arguments[-1]).name
            for number in range(document["spec"]["replicas"]):
                name = f"{document['metadata']['name']}-{number}"
                found.append(Service(name, arguments, config))
    return found


class Started:
    """Services of one file, with local addresses in place of those of the containers.

    Owner: one test; ``close`` ends them.
    """

    def __init__(self, folder: Path, services: list[Service], addresses: Mapping[str, str]) -> None:
        self._folder = folder
        self._ports = {service.name: free_port() for service in services}
        self._addresses = {**addresses, '"spark://spark-master:7077"': '"local[1]"'}
        self._running: dict[str, DatabusProcess] = {}
        for service in services:
            self._start(service)

    def _start(self, service: Service) -> None:
        path = self._folder / f"{service.name}.toml"
        text = service.config.read_text().replace("RELAY", service.name)
        for name, port in self._ports.items():
            text = re.sub(rf"http://{name}(\.relay-pods)?:\d+", f"http://127.0.0.1:{port}", text)
        # A bootstrap server has no number in its own name.
        text = re.sub(
            r"http://bootstrap:\d+", f"http://127.0.0.1:{self._ports.get('bootstrap', 1)}", text
        )
        text = re.sub(r'"0\.0\.0\.0:\d+"', f'"127.0.0.1:{self._ports[service.name]}"', text)
        for there, here in self._addresses.items():
            text = text.replace(there, here)
        text = text.replace("/var/lib/databus", str(self._folder / service.name))
        path.write_text(text)
        *arguments, config = service.arguments
        assert config.startswith("/etc/databus/")
        process = DatabusProcess([*arguments, path], self._folder / f"{service.name}.log")
        self._running[service.name] = process.start()

    def get(self, name: str, path: str) -> str:
        """What a service answers; empty if it does not."""
        process = self._running[name]
        assert process.running, process.log[-3000:]
        try:
            url = f"http://127.0.0.1:{self._ports[name]}{path}"
            with urllib.request.urlopen(url, timeout=20) as answer:
                content: bytes = answer.read()
                return content.decode() or "ready"
        except OSError:
            return ""

    def roles(self, name: str) -> dict[str, list[str]]:
        """For each database the roles of the relays that stream it."""
        found = self.get(name, "/v1/cluster")
        databases = yaml.safe_load(found)["databases"] if found else []
        return {
            one["name"]: sorted(
                relay["role"] for relay in one["relays"] if relay.get("state") == "streaming"
            )
            for one in databases
        }

    def close(self) -> None:
        for process in self._running.values():
            process.kill9()


@pytest.fixture
def start(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[[list[Service], Mapping[str, str]], Started]:
    def started(services: list[Service], addresses: Mapping[str, str]) -> Started:
        made = Started(tmp_path, services, addresses)
        request.addfinalizer(made.close)
        return made

    return started


LED = ["follower", "leader"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_services_of_the_compose_file_run_together(
    start: Callable[..., Started],
    mariadb_database: FreshDatabase,
    postgres_database: FreshDatabase,
    kafka_broker: KafkaBroker,
    tmp_path: Path,
) -> None:
    mariadb_database.execute("CREATE TABLE items (id int PRIMARY KEY, v int)")
    with ZooKeeperServer(tmp_path / "zookeeper") as zookeeper:
        zookeeper.wait_until_serving()
        addresses = {
            "mariadb://databus:databus@mariadb:3306/shop": mariadb_database.url,
            "postgresql://databus:databus@postgres:5432/crm": postgres_database.url,
            "shop.*": f"{mariadb_database.name}.*",
            "zookeeper:2181": zookeeper.hosts,
            "kafka:9092": kafka_broker.servers,
        }
        services = compose_services()
        assert [one.name for one in services] == ["relay-a", "relay-b", "bootstrap", "sink"]
        started = start(services, addresses)
        both = {"shop": LED, "crm": LED}
        eventually_sync(lambda: started.roles("relay-a") == both, 90, "leaders and followers")
        eventually_sync(lambda: started.roles("relay-b") == both, 60, "the other table, too")
        for name in ("relay-a", "relay-b", "bootstrap"):
            eventually_sync(lambda name=name: started.get(name, "/readyz"), 60, f"{name} is ready")
        mariadb_database.execute("INSERT INTO items VALUES (1, 2)")
        topic = f"cdc.{mariadb_database.name}.items"
        (record,) = eventually_sync(lambda: records(kafka_broker, topic), 60, "a record")
        assert b'"v":2' in record.value().replace(b" ", b"")


def records(broker: KafkaBroker, topic: str) -> list[Any]:
    try:
        return broker.committed(topic)
    except KeyError:
        return []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_services_of_kubernetes_run_together(
    start: Callable[..., Started], postgres_database: FreshDatabase
) -> None:
    services = kubernetes_services()
    assert sorted(one.name for one in services) == ["bootstrap-0", "relay-0", "relay-1"]
    crm = "postgresql://databus:databus@postgres:5432/crm"
    started = start(services, {crm: postgres_database.url})
    eventually_sync(lambda: started.roles("relay-0") == {"crm": LED}, 90, "a leader and a follower")
    for name in ("relay-0", "relay-1", "bootstrap-0"):
        eventually_sync(lambda name=name: started.get(name, "/readyz"), 60, f"{name} is ready")


def test_the_name_of_a_pod_is_put_into_its_configuration(tmp_path: Path) -> None:
    (relay,) = [
        one
        for one in kubernetes_documents()
        if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "relay"
    ]
    (naming,) = relay["spec"]["template"]["spec"]["initContainers"]
    shell, flag, script = naming["command"]
    script = script.replace("/config", str(KUBERNETES)).replace("/etc/databus", str(tmp_path))
    subprocess.run([shell, flag, script], check=True, env={**os.environ, "HOSTNAME": "relay-7"})
    cluster = load(tmp_path / "relay.toml").cluster
    assert cluster is not None
    assert (cluster.relay, cluster.address) == ("relay-7", "http://relay-7.relay-pods:8700")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_is_valid_and_has_a_command_that_a_test_starts(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    command = re.search("^ExecStart=(.*)$", text, re.MULTILINE)
    assert command is not None
    program, *arguments = shlex.split(command[1])
    assert program == PROGRAM
    tested = {one.arguments for one in [*compose_services(), *kubernetes_services()]}
    assert tuple(arguments) in {
        tuple(word.replace("/sink.toml", "/sink-%i.toml") for word in one) for one in tested
    }
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: apt-get install systemd")
    (tmp_path / unit.name).write_text(text.replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_kustomize_builds_the_manifests() -> None:
    tool = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    if shutil.which(tool[0]) is None:
        pytest.skip("neither kubectl nor kustomize is on this machine")
    done = subprocess.run([*tool, str(KUBERNETES)], capture_output=True, text=True, check=True)
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    kinds = sorted(one["kind"] for one in built)
    assert kinds == [
        "Namespace", "PodDisruptionBudget", "Secret", "Secret", "Service", "Service", "Service",
        "StatefulSet", "StatefulSet",
    ]  # fmt: skip
    secrets = {one["metadata"]["name"] for one in built if one["kind"] == "Secret"}
    for one in built:
        if one["kind"] == "StatefulSet":
            spec = one["spec"]["template"]["spec"]
            named = {v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
            assert named <= secrets, "the secret with its generated name"
            assert {c["image"] for c in spec["containers"]} == {"databus:local"}


def test_the_client_of_docker_accepts_the_compose_file() -> None:
    for client in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(client[0]) is None:
            continue
        version = subprocess.run([*client, "version"], capture_output=True, check=False)
        if version.returncode == 0:
            subprocess.run([*client, "config", "--quiet"], cwd=ROOT, check=True)
            return
    pytest.skip("docker compose is not on this machine")


def test_the_compose_file_names_only_files_and_services_that_are_there() -> None:
    services = compose()
    volumes = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    used = set()
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= services.keys(), name
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).is_file(), mount
            else:
                used.add(source)
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "for this machine only"
    assert used == set(volumes)
    for wanted in ("zookeeper", "spark-master", "spark-worker", "kafka", "prometheus", "grafana"):
        assert wanted in services
