"""Optimizers and other readers that weights with two split dimensions do not fit. Light, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NoReturn

from mindspeed import plugins as ms
from mindspeed.features.tensor_parallel_2d.conditions import MUON, NAME, NOT_MUON


def muon_optimizers(feature: ms.Feature[Any], optimizer: Any) -> Iterator[str]:
    """Say that a built optimizer is, or contains, one that orthogonalizes weights."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    if any("muon" in str(getattr(getattr(member, "config", None), "optimizer", "")) for member in members):
        yield MUON


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a Muon optimizer, which a script may call itself. Raises MS304."""

    @wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ms.MindSpeedError([ms.Problem("MS304", f"{NAME}: {MUON}", (NAME,), fix=NOT_MUON)])

    return refuse


def grid_is_unknown(fields: Iterable[str]) -> ms.Problem:
    """Return the problem of a grid to choose where values of the model are not known."""
    unknown = ", ".join(fields)
    text = f"{NAME}: x=auto and y=auto choose the grid by {unknown}, which the plan does not know"
    fix = (
        ms.Fix.advise(f"give {unknown} as an option or in the job file"),
        ms.Fix.give_setting(f"{NAME}.y", 2, note="for a fixed grid"),
    )
    return ms.Problem("MS304", text, (NAME,), fix=fix)


class SplitAlongBothDimensions:
    """The ``partition_dim`` of a weight that is split along both dimensions: who reads it as a number is refused.

    Whatever joins the weights of all ranks along one dimension would get a wrong whole weight. Raises MS304.
    """

    def __index__(self) -> int:
        self._refuse()

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return self._refuse() if isinstance(other, int) else self is other

    def __hash__(self) -> int:
        return id(self)

    def _refuse(self) -> NoReturn:
        text = (
            f"{NAME}: code outside this feature reads partition_dim, the dimension along which a weight is split, but this "
            "weight is split along two dimensions"
        )
        fix = (
            "find the calling code with MINDSPEED_TRACE=1. If it joins the weights of all ranks, save a distributed checkpoint "
            "and let it load the whole weight from there. Or split weights along one dimension, where x=auto means all "
            f"tensor-parallel ranks: --set {NAME}.x=auto --set {NAME}.y=1"
        )
        raise ms.MindSpeedError([ms.Problem("MS304", text, (NAME,), fix=ms.Fix.advise(fix))])
