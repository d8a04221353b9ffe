"""The rules and the dashboard of examples/monitoring name metrics and labels that servers have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.generate.metrics import families
from tests.support.snippets import ROOT

FOLDER = ROOT / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool") or ""
SCRAPED = {"instance", "job"}
METRICS = {
    metric.name + ("_total" if metric.type == "counter" else ""): set(metric._labelnames)
    for metrics in families().values()
    for metric in metrics
}
_SELECTOR = re.compile(r"\b(databus_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for panel in panels():
        targets = panel.get("targets", [])
        assert isinstance(targets, list)
        yield from (target["expr"] for target in targets)


def unknown(expression: str) -> list[str]:
    """The metrics and labels of an expression that no server has."""
    found = []
    for name, selector in _SELECTOR.findall(expression):
        labels = set(_LABEL.findall(selector)) - SCRAPED
        if name not in METRICS:
            found.append(name)
        elif labels - METRICS[name]:
            found.append(f"{name}: {sorted(labels - METRICS[name])}")
    return found


def test_every_expression_names_metrics_and_labels_that_a_server_has() -> None:
    names = {name for text in expressions() for name, _ in _SELECTOR.findall(text)}
    assert len(names) > 25
    assert [one for text in expressions() for one in unknown(text)] == []


def test_a_metric_or_label_that_no_server_has_is_found() -> None:
    assert unknown("databus_relay_lag > 1") == ["databus_relay_lag"]
    assert unknown('databus_relay_readers{source="t"}') == ["databus_relay_readers: ['source']"]


def test_the_texts_of_alerts_use_labels_of_their_metrics() -> None:
    for rule in rules():
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))) - SCRAPED
        for name, _ in _SELECTOR.findall(rule["expr"]):
            assert labels <= METRICS[name], rule["alert"]


def test_each_panel_has_a_title_a_unit_and_a_description() -> None:
    shown = [panel for panel in panels() if panel["type"] != "row"]
    assert len(shown) > 15
    assert len({str(panel["id"]) for panel in panels()}) == len(panels())
    for panel in shown:
        assert panel["title"] and panel["description"]
        assert '"unit"' in json.dumps(panel["fieldConfig"])


@pytest.mark.skipif(not PROMTOOL, reason="there is no promtool on this machine")
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")]
)
def test_prometheus_takes_the_rules_and_they_fire(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_the_manual_names_every_alert() -> None:
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text()
    assert [rule["alert"] for rule in rules() if rule["alert"] not in page] == []
    assert Path(FOLDER / "grafana.json").stat().st_size < 1 << 20
