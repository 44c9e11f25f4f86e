"""Where kernels come from: a platform's file is found, imported at the first call, and left out on request."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
import mindspeed.ops
from mindspeed.ops import variants
mindspeed.ops.__path__.insert(0, {folder!r})
variants._OPS = Path({folder!r})
import torch
from mindspeed.ops import swiglu
before = "mindspeed.ops.cpu.swiglu" in sys.modules
x = torch.ones(1, 2, requires_grad=True)
y = swiglu(x)
y.sum().backward()
print(before, "%.4f" % y.item(), "%.4f %.4f" % tuple(x.grad[0].tolist()))
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with a variant of swiglu's forward for cpu that gives sevens."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "__init__.py").touch()
    kernel = (
        "from mindspeed.ops.registration import Kernel\n"
        "KERNELS = {'swiglu': Kernel(lambda x, dim: x.new_full((1, 1), 7.0), lambda x, dim: x.numel() < 9)}\n"
    )
    (tmp_path / "cpu" / "swiglu.py").write_text(kernel)
    return tmp_path


def run(folder: Path, choice: str) -> str:
    program = PROGRAM.format(folder=str(folder))
    environment = {
        "PATH": "",
        "MINDSPEED_OPS": choice,
        "MINDSPEED_CACHE": str(folder / "nothing built"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True).stdout


def test_a_platforms_kernel_is_imported_at_the_first_call_and_the_reference_does_the_rest(planted: Path) -> None:
    assert run(planted, "") == "False 7.0000 0.9277 0.7311\n"


def test_the_reference_runs_everywhere_on_request(planted: Path) -> None:
    assert run(planted, "reference") == "False 0.7311 0.9277 0.7311\n"
