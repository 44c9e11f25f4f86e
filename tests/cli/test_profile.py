"""``mindspeed profile`` prints where the time of traced steps went, by rank."""

import gzip
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from mindspeed.cli import main


def event(name: str, start: float, duration: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}


def write(folder: Path, rank: int) -> None:
    events = [
        event("ProfilerStep#11", 0, 1000, "user_annotation"),
        event("rms-norm", 100, 250, "user_annotation"),
        event("aten::mm", 400, 500),
        event("gloo:all_reduce", 920, 50 + rank),
    ]
    (folder / f"trace.rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_time_is_told_by_rank_feature_operator_and_collective(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank)
    done = CliRunner().invoke(main, ["profile", str(tmp_path)])
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:5] == [
        "rank 0: steps 11, 0.0010 s",
        "KIND NAME SECONDS OF STEPS CALLS",
        "feature rms-norm 0.0003 25.0 % 1",
        "operator aten::mm 0.0005 50.0 % 1",
        "collective gloo:all_reduce 0.0001 5.0 % 1",
    ]
    assert "rank 1: steps 11, 0.0010 s" in lines
    data = json.loads(CliRunner().invoke(main, ["profile", str(tmp_path), "--json"]).stdout)
    assert [rank["collective"]["gloo:all_reduce"]["seconds"] for rank in data["ranks"]] == [50e-6, 51e-6]


def test_a_folder_without_traces_is_a_problem(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["profile", str(tmp_path), "--json"])
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.exit_code != 0, problem["code"]) == (True, "MS601")
    assert problem["message"] == f"the folder {tmp_path} contains no trace, a file whose name ends in rank<N>.json.gz"
