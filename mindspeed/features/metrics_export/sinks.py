"""Services that get the numbers of each step. Each class calls one package alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed.process.run import run_folder

if TYPE_CHECKING:
    from mindspeed.features.metrics_export.feature import MetricsExportArgs


class Sink(Protocol):
    """A service that gets rows until it is closed."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Wandb:
    """A run of Weights & Biases, by the name of the run folder. Steps that are repeated after a rollback are logged again."""

    def __init__(self, args: MetricsExportArgs) -> None:
        import wandb

        folder = run_folder()
        self._run: Any = wandb.init(project=args.wandb_project, name=folder.name if folder else None, dir=folder)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """An endpoint that Prometheus reads: gauges with the numbers of the last step."""

    def __init__(self, args: MetricsExportArgs) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = start_http_server(args.prometheus_port, registry=self._registry)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": step, **metrics}.items():
            self._gauge(name).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from prometheus_client import Gauge

            label = f"mindspeed_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            self._gauges[name] = Gauge(label, f"{name} of the last step", registry=self._registry)
        return self._gauges[name]


class OpenTelemetry:
    """Gauges that are sent by OTLP over HTTP, to the address in OTEL_EXPORTER_OTLP_ENDPOINT, once a minute and at the end."""

    def __init__(self, args: MetricsExportArgs) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._provider = MeterProvider(metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())])
        self._meter = self._provider.get_meter("mindspeed")
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": step, **metrics}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"mindspeed.{name}")
            self._gauges[name].set(value)

    def close(self) -> None:
        self._provider.shutdown()


def open_sinks(args: MetricsExportArgs) -> list[Sink]:
    """Open the chosen sinks, on the rank that logs."""
    classes: dict[str, Callable[[MetricsExportArgs], Sink]] = {
        "wandb": Wandb,
        "prometheus": Prometheus,
        "opentelemetry": OpenTelemetry,
    }
    return [classes[name](args) for name in args.sinks]
