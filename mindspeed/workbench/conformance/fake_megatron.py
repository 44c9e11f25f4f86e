"""A made-up Megatron with just the names that a feature patches, so that its patches can be tried without the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mindspeed.engine.patching.apply import apply
from mindspeed.engine.planning.patch_checks import check_patches, with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.job.world import World
from mindspeed.plugins.feature import Feature
from mindspeed.problems import PatchError

_TREE: Final = "megatron"
Names = dict[str, Any]


class FakeMegatron:
    """The made-up tree; `module` imports from it, `patched` applies a feature's patches to it.

    A made-up function ``f`` returns ``("f", args, kwargs)``, a made-up method ``C.f`` ``("C.f", args, kwargs)``.
    """

    def __init__(self, folder: Path, targets: tuple[str, ...], sources: Mapping[str, str]) -> None:
        """Write a module for each target (``"module:qualname"``), and the modules of ``sources`` (module name -> text)."""
        self.folder = folder
        modules: dict[str, Names] = {}
        for target in targets:
            module, _, path = target.partition(":")
            names = modules.setdefault(module, {})
            for part in path.split("."):
                names = names.setdefault(part, {})
        texts = {module: "\n".join(_definitions(names)) for module, names in modules.items()}
        for module, text in {**texts, **sources}.items():
            self._write(module, text + "\n")

    def _write(self, module: str, text: str) -> None:
        place = self.folder
        for package in module.split(".")[:-1]:
            place /= package
            place.mkdir(exist_ok=True)
            (place / "__init__.py").touch()
        (place / f"{module.rpartition('.')[2]}.py").write_text(text, encoding="utf-8")

    def module(self, name: str) -> ModuleType:
        """A module of the tree, imported."""
        return import_module(name)

    @contextmanager
    def patched(
        self, feature: type[Feature[Any]], settings: Mapping[str, Any] | None = None, world: Mapping[str, Any] | None = None
    ) -> Iterator[Feature[Any]]:
        """Apply the patches of a feature while the block runs. Raises PatchError as activation would."""
        instance: Any = feature(feature.Args(**(settings or {})), World(world or {}))
        planned = with_sites([PlannedPatch(feature.spec.name, patch, patch.target) for patch in instance.patches()])
        problems = check_patches(planned)
        if problems:
            raise PatchError(problems)
        applied = apply(planned)
        try:
            yield instance
        finally:
            applied.undo()


def _definitions(names: Names, owner: str = "") -> Iterator[str]:
    indent = "    " if owner else ""
    for name, members in names.items():
        if members or name[:1].isupper():
            yield f"{indent}class {name}:"
            yield from (f"{indent}{line}" for line in (*_definitions(members, f"{owner}{name}."), "    made_up = True"))
        else:
            yield f"{indent}def {name}({'self, ' if owner else ''}*args, **kwargs):"
            yield f"{indent}    return {f'{owner}{name}'!r}, args, kwargs"


@contextmanager
def fake_megatron(folder: Path, *targets: str, sources: Mapping[str, str] | None = None) -> Iterator[FakeMegatron]:
    """A made-up Megatron instead of the real one, in ``folder``, while the block runs."""
    tree = FakeMegatron(folder, targets, sources or {})
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _TREE}
    for name in real:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield tree
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == _TREE]:
            del sys.modules[name]
        sys.modules.update(real)
