"""Patches as data: what to change in Megatron, and why. Nothing here imports or changes anything.

A target is ``"module:qualname"``; a replacement, wrapper or mixin is the same kind of string and
is imported only when the patch is applied. The patch engine (`mindspeed.engine.patching.apply`)
turns targets into sites, checks all patches as a set, and only then applies them. `wrapper` makes what a `Wrap` names of a
function.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Literal

Phase = Literal["setup", "build", "step", "evaluate", "checkpoint", "teardown"]
Scalar = str | int | float | bool | None

_SCALARS: Final = (str, int, float, bool, type(None))
_REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def check_reference(text: str, what: str) -> None:
    """Raise ValueError unless ``text`` has the form ``package.module:Qual.name``."""
    if not isinstance(text, str) or not _REFERENCE.fullmatch(text):
        raise ValueError(f"{what} {text!r} is not of the form 'package.module:Qual.name'")


def _require_scalars(what: str, *values: object) -> None:
    """Raise TypeError for a value that a plan cannot hold."""
    if wrong := [value for value in values if not isinstance(value, _SCALARS)]:
        raise TypeError(f"{what} is {wrong[0]!r}, not a string, a number, True, False or None")


@dataclass(frozen=True, slots=True)
class When:
    """Guard of a patch, decided once per plan: all given conditions must hold.

    ``megatron`` is a version specifier (``">=0.15"``), ``platform`` a platform name. ``recorded``: the target has the code that
    is recorded of its release (``mindspeed patches record``), for a patch that would be wrong on another one. A patch that is
    left out is a row of the plan.
    """

    megatron: str | None = None
    platform: str | None = None
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """A value named by ``"module:qualname"``, imported when the patch is applied."""

    target: str

    def __post_init__(self) -> None:
        check_reference(self.target, "reference")


@dataclass(frozen=True, slots=True)
class _Patch:
    """Hold the fields of every kind of patch.

    ``phase`` is the part of a run in which the target is called; ``clears`` names ``lru_cache``s that hold its results.
    ``optional``: not every model takes this path, so that it need not be reached while another point of the feature is.
    """

    kind: ClassVar[str]

    target: str
    value: Any
    reason: str
    when: When | None = None
    phase: Phase = "step"
    clears: tuple[str, ...] = ()
    optional: bool = False

    def __post_init__(self) -> None:
        check_reference(self.target, "target")
        if not (self.reason and isinstance(self.reason, str)):
            raise ValueError(f"the {self.kind} of {self.target} has no reason")
        if not isinstance(self, Set):
            check_reference(self.value, "reference")
        elif not isinstance(self.value, Ref):
            _require_scalars(f"the value for {self.target}", self.value)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `patch_from_json` makes an equal patch."""
        value = {"ref": self.value.target} if isinstance(self.value, Ref) else self.value
        return {"kind": self.kind, **asdict(self), "value": value}


@dataclass(frozen=True, slots=True)
class Replace(_Patch):
    """Bind another function or class at the site. No cost per call. At most one per site."""

    kind: ClassVar[str] = "replace"


@dataclass(frozen=True, slots=True)
class Wrap(_Patch):
    """Bind ``wrapper(original)`` at the site; ``value`` names the function ``wrapper(original) -> callable``.

    The call costs one plain closure. Wraps of one site nest in plan order, later ones outside. ``by_name``: the wrapper hands
    its arguments on as they came and finds its own by name, so a new optional parameter of the target may stand anywhere.
    """

    kind: ClassVar[str] = "wrap"

    by_name: bool = False

    def to_json(self) -> dict[str, Any]:
        data = _Patch.to_json(self)
        return data if self.by_name else {name: value for name, value in data.items() if name != "by_name"}


@dataclass(frozen=True, slots=True)
class Mixin(_Patch):
    """Bind a subclass ``class Target(mixin, Target)`` at the site of a class; ``super()`` reaches the original."""

    kind: ClassVar[str] = "mixin"


@dataclass(frozen=True, slots=True)
class Set(_Patch):
    """Bind a plain value (a scalar, or a `Ref`) at the site. Equal values of several owners agree."""

    kind: ClassVar[str] = "set"


Patch = Replace | Wrap | Mixin | Set
_KINDS: Final[dict[str, type[Any]]] = {cls.kind: cls for cls in (Replace, Wrap, Mixin, Set)}


def patch_from_json(data: dict[str, Any]) -> Patch:
    """Inverse of ``Patch.to_json``."""
    fields = dict(data)
    cls = _KINDS[fields.pop("kind")]
    if isinstance(fields["value"], dict):
        fields["value"] = Ref(fields["value"]["ref"])
    if fields["when"] is not None:
        fields["when"] = When(**fields["when"])
    fields["clears"] = tuple(fields["clears"])
    patch: Patch = cls(**fields)
    return patch


Condition = str | tuple[tuple[str, Scalar], ...]
"""A condition on a configuration: a ``"module:function"`` reference, or pairs of field and value."""


@dataclass(frozen=True, slots=True)
class ArgOverride:
    """Set one Megatron argument, by Megatron's own name, wherever Megatron reads it.

    The name is that of a field of TransformerConfig, DistributedDataParallelConfig or
    OptimizerConfig, or of a parameter of ``initialize_model_parallel``; every one of these
    that has the name receives the value. Two features that override one argument with unequal
    values conflict when the plan is made. Megatron receives a tuple as a list.

    ``only`` limits it to the configurations that it is meant for: ``{"gated_linear_unit": True}`` to those with these values
    (a function is compared by its name, ``{"activation_func": "silu"}``), ``"module:function"`` to those for which the
    function returns True. The command line of Megatron-LM, which describes one model, always receives the value.
    """

    argument: str
    value: Scalar | tuple[Scalar, ...]
    reason: str
    only: Condition | Mapping[str, Scalar] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.value, list):  # as read back from JSON
            object.__setattr__(self, "value", tuple(self.value))
        _require_scalars(f"the value for {self.argument}", *(self.value if isinstance(self.value, tuple) else (self.value,)))
        if isinstance(self.only, str):
            check_reference(self.only, "condition")
        elif self.only is not None:
            object.__setattr__(self, "only", tuple(sorted(dict(self.only).items())))

    @property
    def condition(self) -> str:
        """The condition in words, empty without one: ``gated_linear_unit is True``."""
        if self.only is None or isinstance(self.only, str):
            return self.only or ""
        return " and ".join(f"{field} is {value}" for field, value in dict(self.only).items())

    def __str__(self) -> str:
        return f"{self.argument} = {self.value!r}" + (f" where {self.condition}" if self.only is not None else "")

    def to_json(self) -> dict[str, Any]:
        only = self.only if self.only is None or isinstance(self.only, str) else dict(self.only)
        return {"argument": self.argument, "value": self.value, "reason": self.reason, "only": only}


Function = Callable[..., Any]


def wrapper(function: Function) -> Callable[[Function], Function]:
    """Make the ``wrapper(original) -> callable`` that a `Wrap` names of ``function(original, *args, **kwargs)``.

    A call costs one frame more than a closure that is written out: not for what is called in a layer's forward.
    """

    @functools.wraps(function)
    def factory(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return factory
