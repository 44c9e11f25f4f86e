"""A rank plans and activates without the workbench, the old names, the command line and what only those need."""

import subprocess
import sys

import pytest

OUTSIDE = ("mindspeed.workbench", "mindspeed.compat", "mindspeed.cli", "click", "rich", "filelock")
BLOCK = f"""
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({tuple(f"{name}." for name in OUTSIDE)!r}) or name in {OUTSIDE!r}:
            raise ImportError(f"{{name}} stands outside of the core")

sys.meta_path.insert(0, Wall())
"""
PLAN = """
import mindspeed
features = ["ring-attention", "rms-norm", "swap-optimizer", "adaptive-recompute", "zero-bubble", "moe-alltoall-overlap", "coc"]
for name in features:
    try:
        plan = mindspeed.plan([name], platform="cpu")
    except mindspeed.registry.MindSpeedError as error:
        print(name, len(error.problems))
plan = mindspeed.plan(["rms-norm", "swiglu", "flash-attention"], platform="cpu", world={"tp": 1, "world_size": 1})
print(mindspeed.activate(plan).features)
mindspeed.deactivate()
"""
IMPORT_LINE = """
sys.argv[1:] = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--features", "tflops"]
import mindspeed.megatron_adaptor
print(sys.argv[1:])
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", BLOCK + code], capture_output=True, text=True, check=False)


@pytest.mark.budget(25)
@pytest.mark.parametrize(("code", "last"), [(PLAN, "rms-norm"), (IMPORT_LINE, "--num-attention-heads")])
def test_a_process_plans_and_activates_behind_the_wall(code, last):
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert last in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_wall_blocks(name):
    done = run(f"import {name}")
    assert f"{name} stands outside of the core" in done.stderr
