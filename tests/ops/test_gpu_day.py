"""The dry run of what a machine with a GPU is given, on the CPU."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import gpu_day
from tools.gpu_day import main

FOUND = {
    "machine": "a GPU, torch 2.13.0",
    "dry": False,
    "kernels": {"state": "green", "seconds": 61.2, "last": [], "rows": None},
    "features": {
        "state": "red: exit status 1",
        "seconds": 200,
        "last": [],
        "rows": {"rms-norm": "holds", "swiglu": "fails: MS600 x"},
    },
    "times": {
        "state": "green",
        "seconds": 100,
        "last": [],
        "rows": {"rows": [{"what": "G1", "target": 0.92, "measured": 0.951, "unit": "x", "met": True}]},
    },
}


def test_results_are_published_red_or_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "PAGE", tmp_path / "README.md")
    gpu_day.PAGE.write_text("before\n<!-- results -->\nnone\n<!-- end -->\nafter\n")
    (tmp_path / "results.json").write_text(json.dumps(FOUND))
    assert CliRunner().invoke(main, ["publish", str(tmp_path / "results.json")]).exit_code == 0
    assert gpu_day.PAGE.read_text() == (
        "before\n<!-- results -->\nSeen on a GPU, torch 2.13.0.\n\n| part | result | seconds |\n|---|---|---|\n"
        "| kernels | green | 61 |\n| features | red: exit status 1 | 200 |\n| times | green | 100 |\n\n"
        "| feature | result |\n|---|---|\n| `rms-norm` | holds |\n| `swiglu` | fails: MS600 x |\n\n"
        "| what | target | measured | |\n|---|---|---|---|\n| G1 | 0.92 | 0.951 x |  |\n<!-- end -->\nafter\n"
    )


def test_a_dry_run_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(FOUND | {"dry": True}))
    ran = CliRunner().invoke(main, ["publish", str(tmp_path / "results.json")])
    assert ran.output == "Error: these are of a dry run on the CPU, which says nothing of a GPU\n"
    assert ran.exit_code == 1


def test_a_part_that_takes_longer_than_its_limit_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_day.LIMITS, "times", 0.1)
    found = gpu_day.finished("times", ["-c", "import time; time.sleep(20)"], tmp_path, dry=True)
    assert found["state"] == "red: longer than 0.1 s"
    assert gpu_day.finished("kernels", ["-c", "raise SystemExit(3)"], tmp_path, dry=True)["state"] == "red: exit status 3"


@pytest.mark.long
def test_a_dry_run_verifies_features_on_the_cpu(tmp_path: Path) -> None:
    words = ["run", str(tmp_path / "results.json"), "--dry", "--feature", "rms-norm", "--feature", "swiglu"]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["features"]["rows"] == {"rms-norm": "holds", "swiglu": "holds"}
    assert set(found) == {"machine", "dry", *gpu_day.LIMITS}


def test_what_is_carried_is_the_checkout_and_its_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, b"torch==2.13.0+cpu\nclick==8.1.7\nmindspeed @ file:///x\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.copytree", lambda source, target, ignore: target.mkdir())
    assert CliRunner().invoke(main, ["pack", str(tmp_path / "carried")]).exit_code == 0
    assert (tmp_path / "carried/wheels/names.txt").read_text() == "torch==2.13.0\nclick==8.1.7\ntriton\n"
    assert asked[1][2:4] == ["pip", "download"]
    assert "--no-index" in (tmp_path / "carried/run.sh").read_text()
