"""Numbers of each step in Weights & Biases, Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

from mindspeed import plugins as ms
from mindspeed.problems import RunError

if TYPE_CHECKING:
    from mindspeed.features.metrics_export.sinks import Sink

_PACKAGES: Final = {
    "wandb": ("wandb", "wandb"),
    "prometheus": ("prometheus_client", "prometheus-client"),
    "opentelemetry": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http"),
}
"""The module that each sink imports, and the package that has it."""


class MetricsExportArgs(ms.FeatureArgs):
    sinks: tuple[Literal["wandb", "prometheus", "opentelemetry"], ...] = ms.Field(
        (), description="Services that get the numbers of each step, in addition to log.jsonl and TensorBoard"
    )
    wandb_project: str = ms.Field("mindspeed", description="Project of Weights & Biases; its key is in WANDB_API_KEY")
    prometheus_port: int = ms.Field(9464, ge=1, le=65535, description="Port at which rank 0 serves metrics to Prometheus")

    def missing(self) -> list[str]:
        """Return the packages of the chosen sinks that are not installed."""
        return [package for module, package in (_PACKAGES[sink] for sink in self.sinks) if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False


def _missing(args: MetricsExportArgs, world: ms.World) -> Mapping[str, Any]:
    return {"missing": " ".join(args.missing())}


@ms.condition(
    "the metrics-export sinks need {missing}, which this machine lacks",
    fix=(ms.Fix.run_command("pip install {missing}"), ms.Fix.drop_setting("sinks")),
    values=_missing,
)
def sinks_are_installed(args: MetricsExportArgs, world: ms.World) -> bool:
    """Check that the packages of the chosen sinks are installed."""
    return not args.missing()


class MetricsExport(ms.Feature[MetricsExportArgs]):
    """Send metrics of steps to dashboards.

    Rank 0 sends the row that is in log.jsonl to wandb, Prometheus or OpenTelemetry. Keys and addresses are read from the
    variables of each service, so that a plan contains none.
    """

    spec = ms.FeatureSpec(
        name="metrics-export",
        category=ms.Category.TOOL,
        level=0,
        constraints=(sinks_are_installed,),
        numerics=ms.Numerics.exact(),
    )
    sinks: list[Sink] | None = None

    @ms.hookimpl
    def activated(self) -> None:
        if missing := self.args.missing():
            text = f"{', '.join(missing)} is not installed, but the sinks of metrics-export need it"
            fix = ms.Fix.run_command(f"pip install {' '.join(missing)}")
            raise RunError([ms.Problem("MS501", text, ("metrics-export",), fix=fix)])

    @ms.hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.sinks is None:
            from mindspeed.features.metrics_export.sinks import open_sinks

            self.sinks = open_sinks(self.args)
        for sink in self.sinks:
            sink.log(step, metrics)

    @ms.hookimpl
    def deactivated(self) -> None:
        for sink in self.sinks or ():
            sink.close()
        self.sinks = None
