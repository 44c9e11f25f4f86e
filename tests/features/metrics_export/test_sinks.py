"""Sinks with the packages that they call, where these are installed, and the refusal where they are not."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.metrics_export.feature import MetricsExport, MetricsExportArgs
from mindspeed.problems import MindSpeedError
from tests.workbench.training.torchrun_nodes import free_port

ROW = {"loss": 2.5, "tflops.model": 7.0}


def feature(**settings: Any) -> MetricsExport:
    return MetricsExport(MetricsExportArgs.model_validate(settings), registry.probe("cpu"))  # type: ignore[arg-type]


def test_a_job_with_a_missing_package_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("mindspeed.features.metrics_export.feature.find_spec", lambda module: None)
    with pytest.raises(MindSpeedError) as refused:
        feature(sinks=["wandb", "prometheus"]).activated()
    assert str(refused.value) == (
        "MS501 wandb, prometheus-client is not installed, but the sinks of metrics-export need it\n"
        "  fix: pip install wandb prometheus-client"
    )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("metrics-export", {"sinks": ("wandb",)}, "the metrics-export sinks need wandb, which this machine lacks"),
        ("resiliency", {"rank_monitor": True}, "resiliency.rank_monitor needs the package nvidia-resiliency-ext"),
    ],
    ids=["sink", "rank monitor"],
)
def test_check_refuses_what_the_start_would(
    name: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = name.replace("-", "_")
    monkeypatch.setattr(f"mindspeed.features.{folder}.feature.find_spec", lambda module: None)
    with pytest.raises(MindSpeedError, match=f"MS304 {name}: {message}"):
        registry.resolve([Layer("test", features=(name,), settings={name: settings}, platform="cpu")])


def test_each_row_of_a_step_reaches_each_sink_until_the_plan_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    run = SimpleNamespace(define_metric=lambda *args, **kwargs: None, log=rows.append, finish=lambda: rows.append("finish"))
    wandb = ModuleType("wandb")
    wandb.init = lambda **options: rows.append(options["project"]) or run  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    export = feature(sinks=["wandb"], wandb_project="tiny")
    for step in (1, 2):
        export.log_metrics(step, ROW)
    export.deactivated()
    assert rows == ["tiny", {"step": 1, **ROW}, {"step": 2, **ROW}, "finish"]


def test_prometheus_reads_the_numbers_of_the_last_step() -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    export = feature(sinks=["prometheus"], prometheus_port=port)
    export.log_metrics(1, ROW)
    export.log_metrics(2, {**ROW, "loss": 2.0})
    with urlopen(f"http://localhost:{port}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    export.deactivated()
    assert lines == ["mindspeed_step 2.0", "mindspeed_loss 2.0", "mindspeed_tflops_model 7.0"]


def test_a_collector_of_opentelemetry_gets_the_numbers_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        export = feature(sinks=["opentelemetry"])
        export.log_metrics(1, ROW)
        export.deactivated()
        server.shutdown()
    assert [path for path, _ in received] == ["/v1/metrics"]
    assert all(name in received[0][1] for name in (b"mindspeed.step", b"mindspeed.loss", b"mindspeed.tflops.model"))
