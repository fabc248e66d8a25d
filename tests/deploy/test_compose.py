"""The compose file, without an engine: its form, its service graph, and that it fits code and images.

The form is checked against the compose specification's own schema, in which unknown keys are errors too.
"""

from __future__ import annotations

import copy
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollstream.broker.java import KAFKA
from rollstream.config import load
from rollstream.supervisor.services import SERVICES

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
# Not run in compose: ClickHouse takes the place of the embedded store.
EMBEDDED_ONLY = {"store"}

# The compose specification's own schema, as Docker Compose 2.40.3 carries it (Apache-2.0).
SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text()))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return dict(compose["services"])


def test_the_form(compose: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(compose)


def test_a_wrong_key_is_seen(compose: dict[str, Any]) -> None:
    broken = copy.deepcopy(compose)
    broken["services"]["kafka"]["healthcheck"]["every"] = "5s"
    with pytest.raises(jsonschema.ValidationError, match="every"):
        jsonschema.Draft7Validator(SCHEMA).validate(broken)


def test_every_service_of_the_pipeline_is_there_and_runs_itself(services: dict[str, Any]) -> None:
    run = {n: s["command"] for n, s in services.items() if "command" in s and "entrypoint" not in s}
    assert set(run) == set(SERVICES) - EMBEDDED_ONLY
    for name, command in run.items():
        assert command == [name, "--config", "/etc/rollstream/run.toml"]


def test_the_graph_is_complete_and_has_no_cycle(services: dict[str, Any]) -> None:
    def below(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {path}"
        for needed, how in services[name].get("depends_on", {}).items():
            assert needed in services, f"{name} depends on unknown {needed}"
            if how["condition"] == "service_healthy":
                assert "test" in services[needed]["healthcheck"]
            if how["condition"] == "service_completed_successfully":
                assert services[needed]["restart"] == "no"
            below(needed, (*path, name))

    for name in services:
        below(name, ())


def test_who_needs_kafka_waits_for_its_topics(services: dict[str, Any]) -> None:
    for name in set(SERVICES) - EMBEDDED_ONLY - {"sandboxes"}:
        assert "topics" in services[name]["depends_on"], name


def test_the_run_fits_the_code_and_the_services(services: dict[str, Any]) -> None:
    config = load([ROOT / "deploy" / "compose" / "run.toml"], environ={})
    assert (config.bus.mode, config.store.mode) == ("external", "external")
    host, port = config.bus.bootstrap_servers.split(":")
    assert host in services
    assert f":{port}" in services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert config.store.host in services
    environment = services["clickhouse"]["environment"]
    assert config.store.username == environment["CLICKHOUSE_USER"]
    assert config.store.password == environment["CLICKHOUSE_PASSWORD"]
    assert config.rollouts.sandbox_targets == (f"sandboxes:{config.sandboxes.port}",)
    limit = int(services["kafka"]["environment"]["KAFKA_MESSAGE_MAX_BYTES"])
    assert limit >= config.bus.max_message_bytes
    for name in set(SERVICES) - EMBEDDED_ONLY:
        section = getattr(config, name)
        assert (section.host, section.health_port) == ("0.0.0.0", 8080), name
        assert ":8080/readyz" in services[name]["healthcheck"]["test"][-1]


def test_kafka_and_clickhouse_are_those_of_the_embedded_run(services: dict[str, Any]) -> None:
    assert services["kafka"]["image"] == f"apache/kafka:{KAFKA[0].rpartition(':')[2]}"
    image, _, tag = services["clickhouse"]["image"].partition(":")
    assert image == "clickhouse/clickhouse-server"
    assert version("chdb-core").startswith(f"{tag}.")


def test_volumes_are_declared(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
            else:
                assert source in compose["volumes"], source


def test_image_targets_and_copied_files_exist(services: dict[str, Any]) -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    parents = re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.MULTILINE)
    assert all(parent in stages or ":" in parent for parent in parents)
    for service in services.values():
        if "build" in service:
            assert service["build"]["target"] in stages
            assert (
                COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]
            ).exists()
    for source in re.findall(r"^COPY (\S+) ", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists(), source
