"""What every operator is held to, whatever it computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed.ops.errors import OperatorError

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def randn(*shape, dtype=torch.float64, seed=1, grad=True):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def strided(*shape, dtype=torch.float64, seed=1, grad=True):
    """Like randn, with another order of strides: every second element of the transpose of a wider tensor."""
    wide = randn(*reversed(shape[:-1]), 2 * shape[-1], dtype=dtype, seed=seed, grad=False)
    axes = (*reversed(range(len(shape) - 1)), len(shape) - 1)
    return wide.permute(axes)[..., ::2].requires_grad_(grad)


def tensors_of(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(t for t in result if isinstance(t, torch.Tensor))


def gradients(function, inputs, seed=7):
    """Values and gradients of the floating-point outputs against a fixed random cotangent."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]
    outputs = tensors_of(function(*inputs))
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    differentiable = [o for o in outputs if o.requires_grad]
    cotangents = [randn(*o.shape, seed=seed + i, grad=False).to(o.dtype) for i, o in enumerate(differentiable)]
    grads = torch.autograd.grad(differentiable, wanted, cotangents) if differentiable else ()
    return [o.detach() for o in outputs], list(grads)


def assert_close_to_fp64(function, formula, inputs, tolerance=None):
    """Values and gradients in the type of the inputs against the formula in fp64, relative to the largest value."""
    values, grads = gradients(function, inputs)
    exact = [
        t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in inputs
    ]
    exact_values, exact_grads = gradients(formula, exact)
    tolerance = tolerance or TOLERANCE[inputs[0].dtype]
    assert len(exact_grads) == len(grads)
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    for value, reference in zip([*values, *grads], [*exact_values, *exact_grads], strict=True):
        scale = max(1.0, float(reference.abs().max())) if reference.numel() else 1.0
        torch.testing.assert_close(value.double(), reference.double(), rtol=tolerance, atol=tolerance * scale)


def assert_same_when_compiled(function, *inputs):
    """`torch.compile` takes the function without a graph break; values and gradients are those of the eager run."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(gradients(function, inputs), gradients(compiled, inputs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def assert_same_when_recomputed(function, *inputs):
    def recomputed(*inputs):
        return checkpoint(function, *inputs, use_reentrant=False)

    for kept, again in zip(gradients(function, inputs), gradients(recomputed, inputs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def assert_same_in_inference_mode(function, *inputs):
    expected = tensors_of(function(*inputs))
    with torch.inference_mode():
        values = tensors_of(function(*inputs))
    assert all(torch.equal(a, b) for a, b in zip(expected, values, strict=True))


def assert_holds_everywhere(function, *inputs):
    """Compiled, recomputed and in inference mode alike."""
    assert_same_when_compiled(function, *inputs)
    assert_same_when_recomputed(function, *inputs)
    assert_same_in_inference_mode(function, *inputs)


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Check that an operator refuses what it is given, with this whole text: its name and what is wrong."""
    with pytest.raises(OperatorError) as caught:
        yield
    assert str(caught.value) == f"MS505 {message}\n  fix: see the docstring of {message.partition(':')[0]}"
