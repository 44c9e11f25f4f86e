"""The declaration of one field of the job: meaning, unit, allowed values, and its names in Megatron. Light, data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any, Final, get_origin

Values = Mapping[str, Any]
"""Values by the name that Megatron has for them; what is not known is missing or None."""

Names = tuple[str, ...]
Derivation = Callable[[Values, Names], Any]
"""Compute a field from Megatron's values, the names of its own at hand; None where they do not tell."""
_UNKNOWN: Final = object()
"""The default of a field that is unknown until somebody gives it."""
_METAVARS: Final[dict[type, str]] = {bool: "", int: "N", float: "X", str: "WORD", tuple: "WORD,..."}
MOST: Final = 2**63 - 1
"""The largest whole number of a field and of a setting: sizes of tensors have 64 bits."""


@dataclass(slots=True, eq=False)
class Field:
    """Declare a field of the job.

    ``arguments`` are the dests of Megatron-LM's arguments that it is read from, the deciding one first. ``attributes`` are
    those of a configuration of megatron-core where they have other names, empty where no configuration has it. ``derive``
    computes the field; without it the first value counts as it stands. ``derive_built`` computes it from a configuration
    that says it in another form. ``unit`` is what a number counts, ``words`` are the allowed words, ``least`` is the
    smallest number (None for what is no number), ``since`` the first Megatron that has it, ``default`` Megatron's where it has
    one for every job. `declared` fills in ``name`` and ``kind``, the type of its values.
    """

    meaning: str
    arguments: Names = ()
    attributes: Names | None = None
    derive: Derivation | None = None
    derive_built: Derivation | None = None
    unit: str = ""
    words: Names = ()
    least: int | None = 1
    since: str = ""
    default: Any = _UNKNOWN
    name: str = ""
    kind: type[Any] = object

    @property
    def has_default(self) -> bool:
        """Return whether Megatron has one default for every job."""
        return self.default is not _UNKNOWN

    @property
    def metavar(self) -> str:
        """Return the placeholder of a value in the help of the field's option; a switch has none."""
        return _METAVARS[self.kind]

    @property
    def as_it_stands(self) -> bool:
        """Return whether the field is the value of one argument."""
        return len(self.arguments) == 1 and self.derive is None

    @property
    def built_names(self) -> Names:
        """Names of the attributes of a configuration that the field is read from."""
        return self.arguments if self.attributes is None else self.attributes

    def of_arguments(self, values: Values) -> Any:
        """Read the field from Megatron-LM's arguments; None where they do not tell."""
        return self._read(values, self.arguments, self.derive)

    def of_attributes(self, values: Values) -> Any:
        """Read the field from the attributes of a configuration; None where they do not tell, or it is older than they are."""
        names = self.built_names
        there = any(name in values for name in names)
        return self._read(values, names, self.derive_built or self.derive) if there else None

    def _read(self, values: Values, names: Names, derive: Derivation | None) -> Any:
        if not names:
            return None
        value = values.get(names[0]) if derive is None else derive(values, names)
        return self.default if value is None and self.has_default and names[0] in values else value

    def typed(self, value: Any) -> Any:
        """Return a value in the field's type, a whole number as one with a fraction and a list as a tuple; None for others."""
        if self.kind is tuple:
            words = tuple(value) if isinstance(value, list | tuple) else ()
            return words if words and all(isinstance(word, str) for word in words) else None
        if self.kind is float and type(value) is int:
            return float(value)
        return value if type(value) is self.kind else None


def fact(meaning: str, *arguments: str, **more: Any) -> Any:
    """Declare a field as the value of a class attribute: ``tp: int = fact("tensor-parallel size", "tensor_parallel_size")``."""
    return Field(meaning, arguments, **more)


def flag(meaning: str, *arguments: str, **more: Any) -> Any:
    """Declare a field that is false in every job that does not set it."""
    return Field(meaning, arguments, default=False, **more)


def declared(owner: type) -> dict[str, Field]:
    """Return the fields that a class declares by `fact`, those of its bases first, and leave it with their defaults alone."""
    fields: dict[str, Field] = {}
    for base in reversed(owner.__mro__):
        for name, annotation in get_annotations(base).items():
            field = fields[name] = vars(base)[name]
            field.name, field.kind = name, get_origin(annotation) or annotation
            if field.kind not in (int, float):
                field.least = None
            if field.has_default:
                setattr(base, name, field.default)
            else:
                delattr(base, name)
    return fields
