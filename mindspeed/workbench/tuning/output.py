"""The output of a search: JSON, a table, a picture of time against memory, and job files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import yaml

from mindspeed import registry
from mindspeed.plugins.constraints import Capability
from mindspeed.problems import Fix, Problem, RunError
from mindspeed.workbench.tuning.measure import Store
from mindspeed.workbench.tuning.search import Configuration, Found

GIB = 2**30
_SHOWN: Final = ("predicted_seconds", "predicted_bytes", "fits", "measured_seconds")
JobOf = Callable[[Configuration], Mapping[str, Any]]


def as_json(found: Found, job_of: JobOf) -> dict[str, Any]:
    """Return the result with its rows by predicted time, each with a job file as a mapping."""
    return {
        "configurations": found.configurations,
        "feasible": found.feasible,
        "fitting": found.fitting,
        "search_seconds": found.seconds,
        "not_modelled": list(found.not_modelled),
        "not_timed": list(found.not_timed),
        "rows": [{name: getattr(row, name) for name in _SHOWN} | {"job": dict(job_of(row))} for row in found.rows],
    }


def table(found: Found) -> list[tuple[str, ...]]:
    """Return the rows as words, below `HEADERS`."""
    return [
        (
            " ".join(f"{name.replace('micro_batch_size', 'mbs')}={value}" for name, value in row.sizes.items()),
            str(row.choice),
            f"{row.predicted_seconds:.4g}",
            "-" if row.measured_seconds is None else f"{row.measured_seconds:.4g}",
            f"{row.predicted_bytes / GIB:.3g}",
            "yes" if row.fits else "no",
        )
        for row in found.rows
    ]


HEADERS = ("LAYOUT", "FEATURES", "PREDICTED S", "MEASURED S", "GIB", "FITS")


def write(found: Found, job_of: JobOf, folder: Path, store: Store) -> list[Path]:
    """Write ``tune.json``, ``job.yaml`` of the best row with its ``prediction.json``, and ``pareto.png`` given matplotlib.

    Raises RunError with MS516 where the folder cannot be written.
    """
    try:
        return _write(found, job_of, folder, store)
    except OSError as error:
        text = f"the folder {folder} is not writable: {error.strerror}"
        raise RunError([Problem("MS516", text, fix=Fix.advise("name another --output"))]) from error


def _write(found: Found, job_of: JobOf, folder: Path, store: Store) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "tune.json"]
    paths[0].write_text(json.dumps(as_json(found, job_of), indent=2) + "\n", encoding="utf-8")
    if found.rows:
        best = found.rows[0]
        prediction = {"key": best.key, "work": dict(best.work), "file": str(store.file_of(best.key)), "machine": store.facts}
        paths += [folder / "prediction.json", folder / "job.yaml"]
        paths[-2].write_text(json.dumps(prediction, indent=2) + "\n", encoding="utf-8")
        job = with_report(job_of(best), best.predicted_seconds, paths[-2].resolve())
        paths[-1].write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
        if find_spec("matplotlib") is not None:
            paths.append(folder / "pareto.png")
            draw(found, paths[-1])
    return paths


def with_report(job: Mapping[str, Any], predicted_seconds: float, prediction: Path) -> dict[str, Any]:
    """Add the features that report how a run compares with its prediction."""
    settings = {"predicted_seconds": predicted_seconds, "prediction": str(prediction)}
    known = registry.catalog(frozenset())
    names = [name for name, spec in known.specs.items() if Capability.PREDICTION_REPORT in spec.provides]
    features = list(dict.fromkeys((*job.get("features", ()), *names)))
    return {**job, "features": features, "settings": {**job.get("settings", {}), **dict.fromkeys(names, settings)}}


def draw(found: Found, path: Path) -> None:
    """Draw predicted seconds against bytes, with the front of what no other row beats in both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = sorted((row.predicted_bytes / GIB, row.predicted_seconds) for row in found.rows)
    front: list[tuple[float, float]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="GiB of the fullest rank", ylabel="seconds of a step")
    axes.plot(*zip(*points, strict=True), ".", label="configurations")
    axes.step(*zip(*front, strict=True), where="post", label="front")
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))
