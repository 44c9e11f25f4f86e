"""The day a GPU is at hand: all that only a GPU can show, in ten minutes on a bare machine without network.

    python -m tools.gpu_day pack FOLDER               with network: this checkout, wheels, run.sh
    sh FOLDER/run.sh                                  on the machine: environment, all parts, results.json
    python -m tools.gpu_day publish FOLDER/results.json   the results as a page, red or green

``python -m tools.gpu_day run OUTPUT`` runs the parts in this environment; with ``--dry`` on the CPU, where nothing is timed.
Each part has a limit, and one that fails or takes longer is a red row and not the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "benchmarks" / "accelerator" / "README.md"
BEGIN, END = "<!-- results -->", "<!-- end -->"
LIMITS: Final = {"kernels": 150, "features": 240, "times": 180}
"""Seconds of each part."""
TRITON: Final = "triton"
"""In the version that torch asks for."""
RUN: Final = """#!/bin/sh
# Needs a Python {version} and the driver of the GPU, and no network.
set -eu
cd "$(dirname "$0")"
python{version} -m venv environment
environment/bin/python -m pip install --quiet --no-index --find-links wheels -r wheels/names.txt
environment/bin/python -m pip install --quiet --no-index --no-build-isolation --no-deps -e checkout
cd checkout
../environment/bin/python -m tools.gpu_day run ../results.json
"""


@click.group()
def main() -> None:
    """Carry a checkout to a machine with a GPU, run what only a GPU can show, and publish it."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def pack(folder: Path) -> None:
    """Put this checkout, its wheels for CUDA and run.sh into FOLDER."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    frozen = subprocess.run([sys.executable, "-m", "pip", "freeze", "--exclude-editable"], stdout=subprocess.PIPE, check=True)
    names = [*(line.partition("+")[0] for line in frozen.stdout.decode().splitlines() if "@" not in line), TRITON]
    (wheels / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "-d", str(wheels), "setuptools", "wheel"]
    subprocess.run([*download, "-r", str(wheels / "names.txt")], check=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", "dist", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, folder / "checkout", ignore=ignored)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "run.sh").write_text(RUN.format(version=version), encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    click.echo(f"{folder}: {size / 2**30:.1f} GiB; on the machine: sh run.sh")


@main.command()
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dry", is_flag=True, help="Run on the CPU at small sizes; time nothing.")
@click.option("--feature", "names", multiple=True, metavar="NAME", help="Features to verify; all without it.")
def run(output: Path, dry: bool, names: Sequence[str]) -> None:
    """Run every part and write OUTPUT after each."""
    results: dict[str, Any] = {"machine": machine(dry), "dry": dry}
    here = output.parent.resolve()
    for part, command in commands(here, dry, names).items():
        results[part] = finished(part, command, here, dry)
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        click.echo(f"{part}: {results[part]['state']}, {results[part]['seconds']:.0f} s")


def commands(folder: Path, dry: bool, names: Sequence[str]) -> dict[str, list[str]]:
    """The command of each part; the files that it writes lie in a folder."""
    return {
        "kernels": ["-m", "pytest", "-q", "--confcutdir=tests/ops", "tests/ops/triton"],
        "features": ["-m", "tools.gpu_day", "features", str(folder / "features.json"), *["--dry"] * dry, *names],
        "times": ["-m", "benchmarks.gpu", str(folder / "times.json"), *["--interpret"] * dry],
    }


def finished(part: str, command: Sequence[str], folder: Path, dry: bool) -> dict[str, Any]:
    """Run a part to its end or limit; its state, seconds, last lines, and what it wrote."""
    start, written = time.monotonic(), folder / f"{part}.json"
    written.unlink(missing_ok=True)
    environ = {**os.environ, "MINDSPEED_OPS": "reference", **({"TRITON_INTERPRET": "1"} if dry else {})}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=ROOT,
            env=environ if part == "kernels" else os.environ,
            timeout=LIMITS[part],
        )
        state, text = ("green" if done.returncode == 0 else f"red: exit status {done.returncode}"), done.stdout
    except subprocess.TimeoutExpired as late:
        state, text = f"red: longer than {LIMITS[part]} s", (late.stdout or b"").decode(errors="replace")
    rows = json.loads(written.read_text(encoding="utf-8")) if written.exists() else None
    return {"state": state, "seconds": time.monotonic() - start, "last": text.splitlines()[-3:], "rows": rows}


@main.command()
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("names", nargs=-1)
@click.option("--dry", is_flag=True, help="On the CPU.")
def features(output: Path, names: Sequence[str], dry: bool) -> None:
    """Verify features on this machine; OUTPUT has a result for each, after every one of them."""
    from mindspeed.registry import catalog

    found: dict[str, str] = {}
    for name, result in verified(names or sorted(catalog().usable), dry):
        found[name] = result
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(result.startswith("fails") for result in found.values()))


def verified(names: Sequence[str], dry: bool) -> Iterator[tuple[str, str]]:
    """Each feature with ``holds``, ``fails: ...``, ``refused: ...`` or ``needs N GPUs``."""
    import torch

    from mindspeed.engine.resolution.request import Layer
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.verification.case import build_case
    from mindspeed.workbench.verification.harness import verify
    from mindspeed.workbench.verification.pool import WorkerPool

    layer = Layer("gpu_day", platform="cpu" if dry else "cuda")
    with WorkerPool() as pool:
        for name in names:
            try:
                case = build_case([name], [layer])
            except MindSpeedError as error:
                yield name, f"refused: {error.problems[0].message}"
                continue
            ranks = int(case.plan.world.world_size)
            if not dry and ranks > torch.cuda.device_count():
                yield name, f"needs {ranks} GPUs"
                continue
            try:
                problems = verify(case, pool).problems
                yield name, f"fails: {problems[0]}" if problems else "holds"
            except Exception as error:  # whatever a driver raises: the other features are still wanted
                yield name, f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def machine(dry: bool) -> str:
    """The GPU and the version of torch."""
    import torch

    return f"{'CPU, dry run' if dry else torch.cuda.get_device_name()}, torch {torch.__version__}"


@main.command()
@click.argument("results", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def publish(results: Path) -> None:
    """Put RESULTS into the page of the accelerator, red or green."""
    data = json.loads(results.read_text(encoding="utf-8"))
    if data["dry"]:
        raise click.ClickException("these are of a dry run on the CPU, which says nothing of a GPU")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(data)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    click.echo("change the row of the GPU in mindspeed/workbench/diagnostics/support_matrix.yaml")


def table(data: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"Seen on {data['machine']}.", "", "| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {part} | {data[part]['state']} | {data[part]['seconds']:.0f} |" for part in LIMITS if part in data]
    if verdicts := (data.get("features") or {}).get("rows"):
        lines += ["", "| feature | result |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in verdicts.items())]
    if times := (data.get("times") or {}).get("rows"):
        lines += ["", "| what | target | measured | |", "|---|---|---|---|"]
        lines += [
            f"| {row['what']} | {row['target']:g} | {row['measured']:.3g} {row['unit']} | {'' if row['met'] else 'missed'} |"
            for row in times["rows"]
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
