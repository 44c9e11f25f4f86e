"""A job file with five independent faults: five problems in one go, where neither torch nor megatron is installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.ops.variants import SOURCES, source_files

ROOT = Path(__file__).resolve().parents[2]
JOB = """
features: [swigl, recompute, async-param-gather]
without: [async-ddp]
settings:
  recompute: {granularity: full, method: uniform, num_layers: 0}
world: {world_size: 1024, tp: 3, num_attention_heads: 32, hidden_size: 96, seq_length: 4096}
"""
ARGUMENTS = ("--platform", "npu", "--megatron", "0.16.1", "--optimization-level", "0", "--json")
PROBLEMS = {
    (
        "MS302",
        "world size 1024 is not a multiple of tp x pp x cp = 3 x 1 x 1 = 3",
        "--world-size 1026, or use smaller parallel sizes",
    ),
    ("MS201", "the feature 'swigl' does not exist", "did you mean swiglu?"),
    (
        "MS301",
        "recompute.num_layers is 0: input should be greater than or equal to 1",
        (
            "--set recompute.num_layers=1 (With full granularity: number of layers per group (method uniform), or number of "
            "recomputed layers per model chunk (method block). In a HybridModel, each character of the pattern is a layer)"
        ),
    ),
    (
        "MS210",
        (
            "async-param-gather requires async-ddp, because Megatron gathers weights bucket by bucket, and creates the "
            "buckets only with overlap_grad_reduce, which async-ddp switches on, and job file removes async-ddp"
        ),
        "drop --without async-ddp, or remove async-param-gather",
    ),
    ("MS304", "tensor-parallel: 32 attention heads are not divisible by tp=3", "--tp N (a divisor of 32)"),
}
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "torch_npu", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from mindspeed.cli import main
main()
"""


@pytest.fixture
def job(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return str(file)


def five(command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 1, done.stdout + done.stderr
    problems = json.loads(done.stdout)["problems"]
    assert len(problems) == 5
    assert {(problem["code"], problem["message"], problem["fix"]) for problem in problems} == PROBLEMS


@pytest.mark.guards(21, 23, processes=True)
@pytest.mark.guards(21, 22, 23, processes=True)
def test_five_faults_are_five_problems_at_once(job):
    five([sys.executable, "-c", BLOCKED, "features", "check", "-f", job, *ARGUMENTS])


@pytest.mark.long
@pytest.mark.guards(21, 22, processes=True)
def test_five_faults_are_five_problems_where_only_the_runtime_dependencies_are_installed(job, tmp_path):
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    sources = tmp_path / "sources"  # setuptools builds inside the folder
    shutil.copytree(ROOT / "mindspeed", sources / "mindspeed", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), str(sources)], check=True)
    found = subprocess.run(
        [python, "-c", "from importlib.util import find_spec as f; print(f('torch'), f('megatron'), f('numpy'))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert found.stdout == "None None None\n"
    new = [str(folder / "bin" / "mindspeed"), "features", "new", "acme", "--package", "-o", str(tmp_path / "made")]
    subprocess.run(new, check=True, capture_output=True)  # the templates are part of the installed package
    assert (tmp_path / "made" / "acme" / "acme" / "feature.py").is_file()
    (packed,) = folder.glob("lib/python*/site-packages/mindspeed/csrc")  # so are the sources of C++ operators
    assert [file.name for file in source_files(packed)] == [file.name for file in source_files(SOURCES)]
    build = subprocess.run([str(folder / "bin" / "mindspeed"), "ops", "build"], capture_output=True, text=True, check=False)
    assert (build.returncode, build.stderr.partition("\n")[0]) == (
        3,
        "MS501 torch is not installed, but the operators are compiled against it",
    )
    five([str(folder / "bin" / "mindspeed"), "features", "check", "-f", job, *ARGUMENTS])
