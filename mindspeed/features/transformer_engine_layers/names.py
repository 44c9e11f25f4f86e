"""The modules of megatron.core that use the roles, and how their names for Transformer Engine come to hold them.

A module of Megatron tries to import Transformer Engine and remembers in ``HAVE_TE`` whether that worked. Where ``HAVE_TE``
means the roles, these statements run once more when the roles exist. Where it means kernels, it stays False.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import unwrap
from types import FunctionType, ModuleType
from typing import Any, Final

from mindspeed.features.transformer_engine_layers.stand_in import ROOT, EngineStandIn

EXTENSION: Final = "megatron.core.extensions.transformer_engine"
ROLE_MODULES: Final = tuple(
    f"megatron.core.{name}"
    for name in (
        "tensor_parallel.random",
        "transformer.heterogeneous.linear_replacements",
        "transformer.moe.moe_utils",
        "transformer.moe.experts",
        "transformer.moe.moe_layer",
        "transformer.multi_latent_attention",
        "transformer.experimental_attention_variant.absorbed_mla",
        "transformer.multi_token_prediction",
        "transformer.transformer_block",
        "models.common.language_module.language_module",
        "models.gpt.gpt_layer_specs",
        "models.gpt.experimental_attention_variant_module_specs",
        "models.gpt.heterogeneous.heterogeneous_layer_specs",
        "models.bert.bert_layer_specs",
        "models.T5.t5_spec",
        "models.multimodal.llava_model",
        "post_training.modelopt.layers",
        "models.vision.clip_vit_model",
    )
)
"""Modules in which ``HAVE_TE`` means that layers or functions of Transformer Engine which exist here can be used.

A module comes after those from which it imports names that depend on ``HAVE_TE``.
"""
_ABSENT: Final = object()


class RoleNames:
    """The names of Transformer Engine in the modules that use the roles, and the way back."""

    def __init__(self, stand_in: EngineStandIn) -> None:
        self._stand_in = stand_in
        self._before: dict[str, dict[str, Any]] = {}
        self._defaults: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self._waiting: list[str] = []
        self._finder = _RoleFinder(stand_in, self._executed, self._finished)

    def bind(self) -> None:
        """Bind the names in loaded modules now, and in others right after they have run."""
        sys.meta_path.insert(0, self._finder)
        self._waiting = [name for name in ROLE_MODULES if name in sys.modules]
        self._finished()

    def release(self) -> None:
        """Restore the original names of every module."""
        sys.meta_path.remove(self._finder)
        for module, names in self._before.items():
            entries = vars(sys.modules[module]) if module in sys.modules else {}
            for name, value in names.items():
                if value is _ABSENT:
                    entries.pop(name, None)
                else:
                    entries[name] = value
        self._before.clear()
        for function, values in self._defaults:
            function.__defaults__ = values
        self._defaults.clear()

    def _executed(self, module: ModuleType) -> None:
        if module.__name__ in ROLE_MODULES:
            self._waiting.append(module.__name__)
            if self._roles_exist():
                self._bind_waiting()

    def _finished(self) -> None:
        if self._waiting:
            self._bind_waiting()

    def _roles_exist(self) -> bool:
        """Return whether the module with the roles is imported and patched."""
        return getattr(getattr(sys.modules.get(EXTENSION), "TENorm", None), "__module__", "").startswith(__package__)

    def _bind_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        with self._stand_in.visible():
            for name in waiting:
                self._run_again(sys.modules[name])

    def _run_again(self, module: ModuleType) -> None:
        """Run the statements of a module that import Transformer Engine, and those that ask whether it is there."""
        entries = vars(module)
        before = dict(entries)
        entries["HAVE_TE"] = True  # since Megatron 0.17 modules import it from the one with the roles
        for statement in engine_statements(str(module.__file__)):
            code = compile(ast.Module([statement], []), str(module.__file__), "exec")
            exec(code, entries)  # the module's own statement, in the module
        changed = {name for name, value in entries.items() if before.get(name, _ABSENT) is not value}
        kept = self._before.setdefault(module.__name__, {})
        for name in changed - {"__builtins__"}:
            kept.setdefault(name, before.get(name, _ABSENT))
        self._renew_defaults(module, {before[name]: entries[name] for name in changed if isinstance(before.get(name), type)})

    def _renew_defaults(self, module: ModuleType, classes: Mapping[type, Any]) -> None:
        """Let functions of a module that have one of these classes as a default value have its successor."""
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
        members = [
            member for value in own for member in ([value, *vars(value).values()] if isinstance(value, type) else [value])
        ]
        for function in map(unwrap, members):
            values = function.__defaults__ if isinstance(function, FunctionType) else None
            if values and any(isinstance(value, type) and value in classes for value in values):
                self._defaults.append((function, values))
                renewed = (classes.get(value, value) if isinstance(value, type) else value for value in values)
                function.__defaults__ = tuple(renewed)


class _RoleFinder(MetaPathFinder):
    """Watches imports of Megatron and of what is built on it below the same name.

    Modules of megatron.core do not see the stand-in while they run, and ``executed`` is called after each. ``finished`` is
    called when none runs, and so after the patches of the plan are applied to all.
    """

    def __init__(self, stand_in: EngineStandIn, executed: Callable[[ModuleType], None], finished: Callable[[], None]) -> None:
        self._stand_in, self._executed, self._finished = stand_in, executed, finished
        self._searching: set[str] = set()
        self._depth = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that runs the module here."""
        if not name.startswith("megatron.") or name in self._searching:
            return None
        self._searching.add(name)
        try:
            others = (finder for finder in list(sys.meta_path) if finder is not self)
            spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        finally:
            self._searching.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _WatchedLoader(spec.loader, self)
        return spec

    def run(self, loader: Any, module: ModuleType) -> None:
        """Execute a module with its loader."""
        self._depth += 1
        try:
            if module.__name__.startswith("megatron.core"):
                with self._stand_in.hidden():
                    loader.exec_module(module)
                    self._executed(module)
            else:
                loader.exec_module(module)
        finally:
            self._depth -= 1
        if not self._depth:
            self._finished()


class _WatchedLoader(Loader):
    """Stands in for a loader until the module runs."""

    def __init__(self, loader: Any, finder: _RoleFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.run(self._loader, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def engine_statements(path: str) -> Iterator[ast.stmt]:
    """Yield the top-level statements of a source file that try to import Transformer Engine or read ``HAVE_TE``."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for statement in tree.body:
        tries = isinstance(statement, ast.Try) and any(map(_imports_engine, statement.body))
        asks = isinstance(statement, ast.If) and any(
            isinstance(node, ast.Name) and node.id == "HAVE_TE" for node in ast.walk(statement.test)
        )
        if tries or asks:
            yield statement


def _imports_engine(statement: ast.stmt) -> bool:
    """Return whether a statement imports Transformer Engine or Megatron's module for it."""
    if isinstance(statement, ast.Import):
        return any(name.name.partition(".")[0] == ROOT for name in statement.names)
    module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else ""
    return module.startswith((ROOT, EXTENSION))
