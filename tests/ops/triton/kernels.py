"""Running an operator on its Triton kernels, interpreted on the CPU, and on its reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from triton.runtime.interpreter import GridExecutor

from mindspeed.ops.registration import operators, with_reference
from mindspeed.ops.variants import python_variants
from tests.ops.operator_checks import TOLERANCE, gradients, randn

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def leaf(*shape, dtype=torch.float32, seed=1, grad=True):
    return randn(*shape, dtype=dtype, seed=seed, grad=grad)


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """The kernels of CUDA run for CPU tensors. With MINDSPEED_OPS=reference alone, or they compete with those of the CPU."""
    with torch.library._scoped_library("mindspeed", "IMPL") as library:
        for module in sorted(python_variants("cuda") - {"fusion_attention"}):
            for name, kernel in import_module(f"mindspeed.ops.cuda.{module}").KERNELS.items():
                library.impl(name, with_reference(kernel, operators()[name]), "CPU")
        yield


@contextmanager
def on_triton() -> Iterator[set[str]]:
    """The kernels of CUDA registered for the CPU; gives the names of the Triton kernels that ran."""
    ran: set[str] = set()
    run = GridExecutor.__call__

    def recorded(self, *args, **kwargs):
        ran.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    with kernels_on_cpu():
        GridExecutor.__call__ = recorded
        try:
            yield ran
        finally:
            GridExecutor.__call__ = run


def assert_like_reference(function, *inputs, kernels, tolerance=None):
    """Values and gradients of both, and that exactly ``kernels`` ran.

    The tolerance is relative to the largest value; of results in 16 bits at most 3 % differ at all: they were rounded once.
    """
    expected = gradients(function, inputs)
    with on_triton() as ran:
        found = gradients(function, inputs)
    assert ran == set(kernels)
    tolerance = TOLERANCE[inputs[0].dtype] if tolerance is None else tolerance
    for value, reference in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert (value.dtype, value.shape, value.stride()) == (reference.dtype, reference.shape, reference.stride())
        if not reference.is_floating_point():
            assert torch.equal(value, reference)
            continue
        finite = reference[reference.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance * scale)
        if value.dtype in (torch.bfloat16, torch.float16) and value.numel() >= 100:
            assert (value != reference).float().mean() <= 0.03
