"""``report.html`` in the folder of a run: loss, throughput, gradient norm and the effects of features."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed.workbench.html_page import chart, page, section, table


def report_page(run: Path, result: Mapping[str, Any], tokens: int) -> str:
    """The page of a run, from its log, its effects (if any were written) and its result; ``tokens`` are those of a step."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    effects = run / "report.json"
    features = json.loads(effects.read_text(encoding="utf-8"))["features"] if effects.is_file() else []
    numbers = [(name, str(value)) for name, value in result.items() if name != "sample"]
    charts = {
        "Loss (nats per token)": points(rows, "loss"),
        "Throughput (tokens per second)": [(step, tokens / time) for step, time in points(rows, "seconds") if time > 0],
        "Gradient norm": points(rows, "gradient_norm"),
    }
    reached = [(feature["name"], feature["summary"].removeprefix(f"{feature['name']}: ")) for feature in features]
    return page(
        f"Run {run.name}",
        section("Result", table(("", ""), numbers)),
        *(section(title, chart(found, title)) for title, found in charts.items() if found),
        section("Effects of features", table(("feature", "sites, and whether they were reached"), reached)),
    )


def points(rows: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """The finite values of a key by step; of a step that was logged twice the last counts. A skipped step has no norm."""
    logged = ((row["step"], row.get(key)) for row in rows if "step" in row)
    return sorted({step: value for step, value in logged if value is not None and math.isfinite(value)}.items())
