"""The distributions whose features this process has begun to load, by their modules."""

from __future__ import annotations

from typing import Any, Final

from mindspeed._version import __version__

_PROVIDERS: Final = {"mindspeed": f"mindspeed {__version__}"}


def note_provider(module: str, distribution: str, version: str) -> None:
    """Note the distribution that a module of features belongs to."""
    _PROVIDERS[module.partition(".")[0]] = f"{distribution} {version}"


def provider_of(code: Any) -> str:
    """Return the distribution and version of a class, a function, an instance or a module's name; '' where it is not known."""
    module = code if isinstance(code, str) else str(getattr(code, "__module__", ""))
    return _PROVIDERS.get(module.partition(".")[0], "")
