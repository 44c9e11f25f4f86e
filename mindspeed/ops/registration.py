"""Registration of operators in the ``mindspeed`` namespace of PyTorch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch

from mindspeed.ops import native_library
from mindspeed.ops.errors import require
from mindspeed.ops.kernel import Kernel, with_reference
from mindspeed.ops.variants import python_variants, reference_only

_LIBRARY: Final = torch.library.Library("mindspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_KEYS: Final = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
"""Dispatch keys of the platforms."""
_REFERENCES: Final[dict[str, Callable[..., Any]]] = {}
native_library.load()


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
    from schema name to `Kernel`. It is imported at the first call on that platform; calls that the kernel does not support
    run the reference.
    """
    operator = schema.partition("(")[0]
    name = f"mindspeed::{operator}"
    _REFERENCES[operator] = reference
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    module = reference.__module__.rpartition(".")[2]
    for platform, key in _KEYS.items():
        if module in python_variants(platform) and not reference_only():
            _LIBRARY.impl(name, _at_first_call(operator, f"mindspeed.ops.{platform}.{module}", reference), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, shapes, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(name, gradient, setup_context=save, lib=_LIBRARY)


def reference_of(operator: str) -> Callable[..., Any]:
    """Return the plain-torch function of an operator by its schema name."""
    return _REFERENCES[operator]


def _at_first_call(operator: str, module: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel that looks into the table ``KERNELS`` of ``module`` when it is first called."""
    bound: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal bound
        if bound is None:
            kernel = _kernels(module).get(operator)
            bound = reference if kernel is None else with_reference(kernel, reference)
        return bound(*args, **kwargs)

    return call


def _kernels(module: str) -> dict[str, Kernel]:
    """Import the table ``KERNELS`` of ``module``; it is empty, with a warning, where a package that it needs is missing."""
    try:
        kernels: dict[str, Kernel] = import_module(module).KERNELS
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
