"""The sources that a case can reach: its key changes when one of them does, and no other. Light."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import mindspeed
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.inspection.source import find_module
from mindspeed.plugins.discovery import Catalog

_FROM: Final = re.compile(r"^[ \t]*from ([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_WORD: Final = re.compile(r"\w+")
_JUDGES: Final = ("mindspeed.verification.training", "mindspeed.verification.harness", "mindspeed.verification.matrix.verdicts")
"""The modules that run a case and compare: what they import, every case can reach."""
_PACKAGES: Final = ("torch", "numpy")


class Sources:
    """The modules of mindspeed and of the distributions of a catalog's features, and what each of them names."""

    def __init__(self, catalog: Catalog) -> None:
        self._modules = {name: row.reference.partition(":")[0] for name, row in catalog.usable.items()}

    def key(self, features: Iterable[str], *more: str) -> str:
        """A digest of ``more``, the installed versions, and every source that a case with these features can reach."""
        roots = [*_JUDGES, *(module for name in features for module in self._of_feature(name))]
        digest = hashlib.blake2b(repr((self._versions, more)).encode(), digest_size=16)
        for name in sorted(self._reached(roots)):
            digest.update(self._digests[name])
        return digest.hexdigest()

    @cached_property
    def _versions(self) -> tuple[str | None, ...]:
        return (platform.python_version(), megatron_version(), *map(_installed, _PACKAGES))

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Every module by name; those of third parties lie beside the modules of their features."""
        roots = {"mindspeed": Path(mindspeed.__file__).parent}
        for module in self._modules.values():
            top = module.partition(".")[0]
            if top not in roots and (found := find_module(top)) is not None and found.file is not None:
                file = Path(found.file)
                roots[top] = file.parent if file.name == "__init__.py" else file
        return {name: file for top, root in roots.items() for name, file in _modules_of(top, root)}

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {name: file.read_text(encoding="utf-8") for name, file in self._files.items()}

    @cached_property
    def _digests(self) -> dict[str, bytes]:
        return {name: hashlib.blake2b(text.encode(), digest_size=16).digest() for name, text in self._texts.items()}

    @cached_property
    def _named(self) -> dict[str, set[str]]:
        """The modules that each module imports, anywhere, or has in a text such as ``"mindspeed.x.y:function"``."""
        tops = "|".join(sorted({name.partition(".")[0] for name in self._files}))
        dotted = re.compile(rf"\b(?:{tops})(?:\.\w+)+")
        return {name: self._names_in(text, dotted) - {name} for name, text in self._texts.items()}

    def _names_in(self, text: str, dotted: re.Pattern[str]) -> set[str]:
        found = {f"{package}.{word}" for package, words in _FROM.findall(text) for word in _WORD.findall(words)}
        found.update(dotted.findall(text))
        return {module for name in found if (module := self._module_of(name))}

    def _module_of(self, name: str) -> str:
        """The module of a dotted name, which may go on with names inside the module; '' for none of these."""
        while name and name not in self._files:
            name = name.rpartition(".")[0]
        return name

    def _of_feature(self, name: str) -> list[str]:
        """The modules of a feature's package; of one that is a module, that module."""
        module = self._modules.get(name, "")
        package = module.rpartition(".")[0]
        return [found for found in self._files if found == module or (package and found.startswith(f"{package}."))]

    def _reached(self, roots: Iterable[str]) -> set[str]:
        found: set[str] = set()
        todo = [root for root in roots if root in self._files]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._named[name]
        return found


def _modules_of(top: str, root: Path) -> Iterable[tuple[str, Path]]:
    if root.is_file():
        return [(top, root)]
    return ((_name(top, file.relative_to(root)), file) for file in sorted(root.rglob("*.py")))


def _name(top: str, file: Path) -> str:
    return ".".join((top, *file.with_suffix("").parts)).removesuffix(".__init__")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
