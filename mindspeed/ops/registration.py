"""Registration of operators in the ``mindspeed`` namespace of PyTorch's dispatcher, with their kernels for each platform."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from mindspeed.ops import native_library
from mindspeed.ops.errors import require
from mindspeed.ops.variants import python_variants, reference_only


class Kernel(NamedTuple):
    """``run`` has the arguments of the operator's schema; ``supports``, with the same arguments, refuses calls beforehand.

    Without ``supports`` the kernel runs every call. A refused call runs the reference.
    """

    run: Callable[..., Any]
    supports: Callable[..., bool] | None = None


def with_reference(kernel: Kernel, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs ``kernel`` where it supports the call, else ``reference``."""
    run, supports = kernel
    if supports is None:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if supports(*args, **kwargs) else reference(*args, **kwargs)

    return call


_LIBRARY: Final = torch.library.Library("mindspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_KEYS: Final = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
"""Dispatch keys of the platforms."""
_NO_GRADIENT: Final = "the operator has no gradient; call it on tensors that need none, or under torch.no_grad()"
_REFERENCES: Final[dict[str, Callable[..., Any]]] = {}
native_library.load()


def define(
    schema: str,
    reference: Callable[..., Any],
    shapes: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    gradient: Callable[..., Any] | None = None,
    operations: Callable[..., int] | None = None,
    draws: bool = False,
) -> None:
    """Make ``torch.ops.mindspeed.<name>`` from a schema such as ``"swiglu(Tensor x, int dim) -> Tensor"``.

    ``reference`` runs on every device without a kernel of its own; ``shapes`` gives empty outputs for tracing;
    ``save(ctx, inputs, output)`` and ``gradient(ctx, *grads)`` make it differentiable. ``operations`` counts from the arguments
    of a call the floating-point operations of its matrix products, for torch's counter; an operator without products has none.
    ``draws`` says that it draws random numbers.

    A file ``mindspeed/ops/<platform>/<module of the reference>.py`` holds kernels for a platform: a table ``KERNELS``
    from schema name to `Kernel`. It is imported at the first call on that platform; calls that the kernel does not support
    run the reference.
    """
    operator = schema.partition("(")[0]
    name = f"mindspeed::{operator}"
    _REFERENCES[operator] = reference
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if draws else ())  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    module = reference.__module__.rpartition(".")[2]
    for platform, key in _KEYS.items():
        if module in python_variants(platform) and not reference_only():
            _LIBRARY.impl(name, _at_first_call(operator, f"mindspeed.ops.{platform}.{module}", reference), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, shapes, lib=_LIBRARY)
    if operations is not None:
        register_flop_formula(getattr(torch.ops.mindspeed, operator), get_raw=True)(_without_output(operations))
    if gradient is not None:
        torch.library.register_autograd(name, gradient, setup_context=save, lib=_LIBRARY)


def like(*positions: int) -> Callable[..., Any]:
    """Make the shape kernel of an operator whose results are like the arguments at these positions; without any it has none."""

    def shapes(*args: Any) -> Any:
        results = tuple(args[position].new_empty(args[position].shape) for position in positions)
        return results if len(results) > 1 else results[0] if results else None

    return shapes


def product_operations(x: torch.Tensor, y: torch.Tensor, *rest: object) -> int:
    """Count the product of the rows of ``x`` with matrices that have the last dimension of ``y``."""
    return 2 * x.numel() * y.shape[-1]


def _without_output(operations: Callable[..., int]) -> Callable[..., int]:
    """Adapt a formula to torch's counter, which also hands it the result of the call."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return operations(*args, **kwargs)

    return count


def operators() -> dict[str, Callable[..., Any]]:
    """Return the reference of every operator that is defined so far, by schema name."""
    return dict(_REFERENCES)


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
        warnings.warn(f"{op} uses its plain-torch reference, because {package} is not installed", RuntimeWarning, stacklevel=3)
        return {}
    return kernels


def no_gradient(op: str) -> Callable[..., Any]:
    """The gradient of an operator that has none: backward through it raises OperatorError instead of giving zeros."""

    def gradient(ctx: Any, *grads: Any) -> None:
        require(False, op, _NO_GRADIENT)

    return gradient


def require_no_gradient(op: str, *operands: torch.Tensor | None) -> None:
    """Raise OperatorError where an operand needs a gradient, which an operator that writes in place would lose."""
    learned = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    require(not learned, op, _NO_GRADIENT)
