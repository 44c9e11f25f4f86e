"""Registration of operators in the ``mindspeed`` namespace of PyTorch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch

from mindspeed.ops import native
from mindspeed.ops.errors import require
from mindspeed.ops.variants import python_variants, reference_only

_LIBRARY: Final = torch.library.Library("mindspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_KEYS: Final = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
"""Dispatch keys of the platforms."""
native.load()


def define(
    schema: str,
    reference: Callable[..., Any],
    shapes: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    gradient: Callable[..., Any] | None = None,
) -> None:
    """Make ``torch.ops.mindspeed.<name>`` from a schema such as ``"swiglu(Tensor x, int dim) -> Tensor"``.

    ``reference`` runs on every device without a kernel of its own; ``shapes`` gives empty outputs for tracing;
    ``save(ctx, inputs, output)`` and ``gradient(ctx, *grads)`` make it differentiable.

    A file ``mindspeed/ops/<platform>/<module of the reference>.py`` holds kernels for a platform: a table ``KERNELS``
    from schema name to function. It is imported at the first call on that platform.
    """
    operator = schema.partition("(")[0]
    name = f"mindspeed::{operator}"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    module = reference.__module__.rpartition(".")[2]
    for platform, key in _KEYS.items():
        if module in python_variants(platform) and not reference_only():
            _LIBRARY.impl(name, _at_first_call(operator, f"mindspeed.ops.{platform}.{module}", reference), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, shapes, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(name, gradient, setup_context=save, lib=_LIBRARY)


def _at_first_call(operator: str, module: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that looks into the table ``KERNELS`` of ``module`` when it is first called."""
    found: Callable[..., Any] | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = _kernels(module).get(operator, reference)
        return found(*args, **kwargs)

    return kernel


def _kernels(module: str) -> dict[str, Callable[..., Any]]:
    """The table ``KERNELS`` of ``module``; an empty one, and a warning, where the package that it needs is not installed."""
    try:
        kernels: dict[str, Callable[..., Any]] = import_module(module).KERNELS
    except ModuleNotFoundError as error:
        package = (error.name or "mindspeed").partition(".")[0]
        if package == "mindspeed":
            raise
        op = module.rpartition(".")[2]
        warnings.warn(f"{op} runs its reference: {package} is not installed", RuntimeWarning, stacklevel=3)
        return {}
    return kernels


def no_gradient(op: str) -> Callable[..., Any]:
    """The gradient of an operator that has none: backward through it raises OperatorError instead of giving zeros."""

    def gradient(ctx: Any, *grads: Any) -> None:
        require(False, op, "it has no gradient; call it on tensors that need none, or under torch.no_grad()")

    return gradient
