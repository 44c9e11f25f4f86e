"""Replacements for Megatron's imports: torch and every other package, and its modules that hold no rules. Child only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NoReturn


class UndecidedError(Exception):
    """A rule reads a value that is unknown without a device, a package or a file."""


class ImportStandIn:
    """Stand in for something imported, by its dotted name.

    What is imported is a symbol: symbols are equal when their names are. What a call returns is unknown: to ask whether it is
    true raises UndecidedError, but gives false while ``absent`` is set, where the parser asks for optional packages. ``facts``
    has the results of calls that are known.
    """

    facts: Mapping[str, Any] = {}
    absent = False

    def __init__(self, name: str, known: bool = True) -> None:
        self.__dict__.update(_name=name, _known=known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        dotted = f"{self._name}.{name}"
        return self.facts[dotted] if dotted in self.facts else ImportStandIn(dotted, self._known and not name.isupper())

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget what is set: a stand-in keeps nothing."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options and isinstance(arguments[0], (FunctionType, type)):
            return arguments[0]  # a decorator
        called = f"{self._name}()"
        return self.facts[called] if called in self.facts else ImportStandIn(called, known=False)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: Any) -> bool:
        return False

    def __bool__(self) -> bool:
        return True if self._known else False if ImportStandIn.absent else self._undecided()

    def __eq__(self, other: object) -> Any:
        if self._known and (not isinstance(other, ImportStandIn) or other._known):
            return isinstance(other, ImportStandIn) and other._name == self._name
        return ImportStandIn(f"{self._name} == ...", known=False)

    def __ne__(self, other: object) -> Any:
        equal = self == other
        return equal if isinstance(equal, ImportStandIn) else not equal

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return str(self._name)

    def __getitem__(self, key: Any) -> Any:
        return self if self._known else ImportStandIn(f"{self._name}[...]", known=False)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        """Let errors pass."""

    def __iter__(self) -> Iterator[Any]:
        self._undecided()

    @property
    def __signature__(self) -> Any:
        self._undecided()

    def _undecided(self, *operands: Any) -> NoReturn:
        raise UndecidedError(f"{self._name} is unknown")

    __len__ = __int__ = __float__ = __index__ = __contains__ = _undecided
    __lt__ = __le__ = __gt__ = __ge__ = _undecided
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _undecided
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = _undecided
