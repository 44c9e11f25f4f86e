"""Triton is needed by nothing but its kernels, and they are not missed where it is missing."""

import subprocess
import sys
import warnings

import pytest
import torch

from mindspeed.ops.registration import _at_first_call
from mindspeed.ops.variants import python_variants

WITHOUT = """
import sys
sys.modules["triton"] = None
import mindspeed.ops
for name in mindspeed.ops.__all__:
    getattr(mindspeed.ops, name)
print(sorted(m for m in sys.modules if m.startswith(("mindspeed.ops.cuda", "mindspeed.ops.triton"))))
"""


def test_importing_every_operator_imports_no_kernel_of_another_device():
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("op", sorted(python_variants("cuda") - {"fusion_attention"}))
def test_without_triton_the_reference_runs_and_a_warning_says_so_once(op, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [m for m in sys.modules if m.startswith(("mindspeed.ops.cuda", "mindspeed.ops.triton"))]:
        monkeypatch.delitem(sys.modules, name)
    kernel = _at_first_call(op, f"mindspeed.ops.cuda.{op}", torch.neg)
    with pytest.warns(RuntimeWarning, match=rf"^{op} uses its plain-torch reference, because triton is not installed$"):
        assert kernel(torch.ones(())).item() == -1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel(torch.ones(())).item() == -1


def test_a_module_of_ours_that_is_missing_is_an_error():
    kernel = _at_first_call("swiglu", "mindspeed.plugins.no_such_module", torch.neg)
    with pytest.raises(ModuleNotFoundError) as error:
        kernel(torch.ones(()))
    assert str(error.value) == "No module named 'mindspeed.plugins.no_such_module'"
