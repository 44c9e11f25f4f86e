"""``python -m benchmarks.gpu``: the operators of CUDA checked and then timed on this machine's GPU; exit 3 without one.

Rows G1 to G9 and G14. Each is checked against plain torch at the size it is timed at; a row that is wrong is not timed.
The file is written after every row; ``--resume`` leaves out what it holds. ``--interpret`` checks every row at a small size on
the CPU, the kernels in Triton's interpreter: no times, but the script itself is tried.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.table import Row, report

if TYPE_CHECKING:
    from benchmarks.accelerator.measuring import Race, Work
    from benchmarks.accelerator.operation import Case

NO_GPU = 3
COMMAND = "python -m benchmarks.gpu"


@click.command()
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False), default=Path("runs/gpu.json"))
@click.option("--only", multiple=True, metavar="ROW", help="Rows to run, such as G1; all without it.")
@click.option("--resume", is_flag=True, help="Leave out rows that OUTPUT holds.")
@click.option("--interpret", is_flag=True, help="Check small sizes on the CPU in Triton's interpreter; time nothing.")
def main(output: Path, only: tuple[str, ...], resume: bool, interpret: bool) -> None:
    """Check and time the operators of CUDA; rows go to OUTPUT."""
    if interpret:  # before triton and the operators are imported
        os.environ.update(TRITON_INTERPRET="1", MINDSPEED_OPS="reference")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if not interpret and not torch.cuda.is_available():
        click.echo("torch sees no GPU here, so nothing is timed; --interpret checks every row, small, on the CPU", err=True)
        sys.exit(NO_GPU)
    from benchmarks.accelerator import products, ring, streaming

    chosen = [case for case in (*streaming.CASES, *products.CASES, *ring.CASES) if not only or case.row in only]
    sys.exit(_checked(chosen) if interpret else _timed(chosen, output, resume))


def _checked(chosen: list[Case]) -> int:
    """Check all at a small size; the number of rows that are wrong, at most 1."""
    from benchmarks.accelerator.measuring import mismatch
    from tests.ops.triton.kernels import kernels_on_cpu

    wrong = 0
    with kernels_on_cpu():
        for case in chosen:
            difference = mismatch(case.prepare(True))
            click.echo(f"{case.row} {case.what}: {difference or 'right'}")
            wrong += bool(difference)
    return min(wrong, 1)


def _timed(chosen: list[Case], output: Path, resume: bool) -> int:
    import torch

    rows, broken = _known(output) if resume else [], 0
    torch.manual_seed(0)
    for case in chosen:
        if any(row.what.startswith(f"{case.row} {case.what}: ") for row in rows):
            continue
        start = time.monotonic()
        found, wrong = _measured(case)
        broken += bool(wrong)
        click.echo(f"{case.row} {case.what}: {wrong or f'{time.monotonic() - start:.1f} s'}")
        rows += found
        torch.cuda.empty_cache()
        torch.compiler.reset()
        _write(output, rows)
    if rows:
        report(rows)
    return min(broken, 1)


def _measured(case: Case) -> tuple[list[Row], str]:
    """The rows of one case, or what is wrong with it."""
    from benchmarks.accelerator.measuring import mismatch, race

    try:
        work = case.prepare(False)
        if wrong := mismatch(work):
            return [], wrong
        return rows_of(f"{case.row} {case.what}", work, race(work)), ""
    except Exception as error:  # whatever a driver or a compiler raises: the other rows are still wanted
        return [], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def rows_of(what: str, work: Work, result: Race) -> list[Row]:
    """The share of the copy's bandwidth, our speed against each peer with a target, and against the best of the others."""
    from benchmarks.accelerator.measuring import DRIFT

    seconds, made = result.seconds, []
    ours = seconds["ours"]
    note = f"{ours * 1e3:.3f} ms" + (f", {work.flops / ours / 1e12:.0f} TFLOP/s" if work.flops else "")
    if lacking := sorted(set(work.peers) - set(seconds)):
        note += f"; not run: {', '.join(lacking)}"
    if result.drift > DRIFT:
        note += f"; rejected: the control drifted by {result.drift:.0%} in each of three runs"
    reached = 0.0 if result.drift > DRIFT else 1.0
    if work.moved:
        share = reached * work.moved / ours / result.copy_rate
        made.append(Row(f"{what}: share of copy bandwidth", work.share, share, "x", COMMAND, note, least=True))
    ratios = {name: reached * spent / ours for name, spent in seconds.items() if name != "ours"}
    for name, target in work.targets.items():
        if name in ratios:
            made.append(Row(f"{what}: {name} / ours", target, ratios[name], "x", COMMAND, note, least=True))
    others = {name: ratio for name, ratio in ratios.items() if name not in work.targets}
    if others:
        best = min(others, key=lambda name: others[name])
        made.append(Row(f"{what}: best other peer ({best}) / ours", 1.0, others[best], "x", COMMAND, note, least=True))
    return made


def _known(output: Path) -> list[Row]:
    if not output.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return [Row(**{key: value for key, value in row.items() if key != "met"}) for row in rows]


def _machine() -> str:
    """The GPU and the versions of what makes its code."""
    import torch
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def _write(output: Path, rows: list[Row]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": _machine(), "rows": [asdict(row) | {"met": row.met} for row in rows]}
    output.write_text(json.dumps(data, indent=2))


if __name__ == "__main__":
    main()
