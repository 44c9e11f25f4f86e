"""Registration of operators in the ``mindspeed`` namespace of PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from mindspeed.ops.errors import require

_LIBRARY: Final = torch.library.Library("mindspeed", "FRAGMENT")  # type: ignore[no-untyped-call]


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
    """
    name = f"mindspeed::{schema.partition('(')[0]}"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, shapes, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(name, gradient, setup_context=save, lib=_LIBRARY)


def no_gradient(op: str) -> Callable[..., Any]:
    """The gradient of an operator that has none: backward through it raises OperatorError instead of giving zeros."""

    def gradient(ctx: Any, *grads: Any) -> None:
        require(False, op, "it has no gradient; call it on tensors that need none, or under torch.no_grad()")

    return gradient
