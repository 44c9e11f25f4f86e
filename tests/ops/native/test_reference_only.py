import json
import os
import subprocess
import sys

import pytest
import torch

from tests.ops.native.kernels import needs_library

pytestmark = needs_library

PROGRAM = """
import json, torch
from mindspeed.ops import native_library, npu_rotary_position_embedding, rms_norm, swiglu
torch.manual_seed(1)
x, gamma = torch.randn(2, 3, 5, 64, requires_grad=True), torch.randn(64, requires_grad=True)
cos, sin = torch.randn(1, 1, 5, 64), torch.randn(1, 1, 5, 64)
y = swiglu(npu_rotary_position_embedding(rms_norm(x, gamma), cos, sin))
y.square().sum().backward()
print(json.dumps([native_library.loaded() is not None, y.sum().item(), x.grad.norm().item(), gamma.grad.norm().item()]))
"""


def results(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.long
def test_references_alone_give_the_same_numbers():
    (native, *values), (reference, *expected) = results(MINDSPEED_OPS=""), results(MINDSPEED_OPS="reference")
    assert (native, reference) == (True, False)
    assert values == pytest.approx(expected, rel=1e-5)
    assert torch.tensor(values).isfinite().all()
