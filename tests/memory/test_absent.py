"""Reads of what is away: an error that names the feature, the module and the operator."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mindspeed.features.device_emulation.absent import AbsenceGuard
from mindspeed.memory.on_host import HostBuffers, OnHost
from mindspeed.memory.parked import LayerPart, Parked
from mindspeed.memory.region import Region
from mindspeed.problems import RunError

READ = (
    "MS617 acme: {} read a tensor of layer 3 norm while it was offloaded\n"
    "  fix: copy the tensor with clone() in the forward pass and read the copy, or remove acme"
)


@pytest.fixture
def refused(poison: None) -> Iterator[None]:
    """Reads of what is away are refused."""
    with AbsenceGuard():
        yield


def parked(tensor: torch.Tensor) -> Parked:
    storage = tensor.untyped_storage()
    made = Parked([storage], OnHost([storage], HostBuffers()), LayerPart("acme", "layer 3 norm"))
    made.park()
    return made


def test_an_operator_that_reads_what_is_away_is_named(refused: None) -> None:
    tensor = torch.ones(3)
    away = parked(tensor)
    for read, name in ((lambda: tensor + 1, "add"), (lambda: tensor.view(3, 1).clone(), "clone"), (tensor.sum, "sum")):
        with pytest.raises(RunError) as error:
            read()
        assert str(error.value) == READ.format(name)
    away.post()
    with pytest.raises(RunError):
        tensor.exp()
    away.wait()
    assert (tensor + 1).tolist() == [2.0, 2.0, 2.0]


def test_shapes_and_views_of_what_is_away_may_be_read(refused: None) -> None:
    tensor = torch.ones(4)
    away = parked(tensor)
    assert torch.zeros_like(tensor.view(2, 2).detach()).shape == (2, 2)
    away.wait()


def test_a_backward_pass_that_goes_around_the_wait_is_an_error() -> None:
    x = torch.randn(3, requires_grad=True)
    with Region("acme", module="layer 3 norm").entered(torch.exp, x) as pass_:
        y = torch.exp(x)
    output = y * 2
    pass_.park_after(output, y)
    with pytest.raises(RunError) as error:
        torch.autograd.grad(y, x, torch.ones(3))
    assert str(error.value) == READ.format("backward")


CRASH = """
import torch
import mindspeed
mindspeed.activate(mindspeed.plan(platform="cpu", level=0))
tensor = torch.ones(5000)
tensor.untyped_storage().resize_(0)
tensor.sum()
"""


def test_python_prints_the_line_that_reads_freed_memory(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CRASH)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert f'File "{script}", line 7 in <module>' in done.stderr
