"""Imports of the child: Megatron's modules with rules from source; everything else that is not Python's own is a stand-in."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mindspeed.workbench.lint.upstream.stand_ins import ImportStandIn

_REAL: Final = frozenset({"mindspeed", "packaging", "yaml", "_yaml"})
HAS_RULES: Final = re.compile(
    r"megatron\.(training\.(arguments|argument_utils|yaml_arguments|determinism)|core\.transformer\.pipeline_parallel_layer_layout)"
)
_CONFIGURATION: Final = re.compile(r"^class \w*Config\b", re.MULTILINE)
"""Modules whose validating functions are collected from: these, and every one with a configuration that another imports."""
_EXECUTED: Final = re.compile(
    r"megatron\.(training\.(utils|dist_signal_handler|global_vars)|core\.(utils|activations|package_info|msc_utils|fp8_utils"
    r"|[\w.]*enums|transformer\.cuda_graph_config|models\.hybrid\.hybrid_layer_allocation|models\.gpt\.experimental_attention\w*|fusions\.fused_bias_geglu|utils\.\w+|dist_checkpointing\.validation|rerun_state_machine"
    r"|num_microbatches_calculator|optimizer_param_scheduler))"
    r"|megatron\.training\.utils\.\w+"
)
"""Other modules that those need."""
_VERSIONS: Final = re.compile(r"is_\w+_min_version|get_\w+_version")
"""Functions that ask which packages are installed."""


class Imports(MetaPathFinder, Loader):
    """Find the modules of a checkout; ``rewrite`` turns the source of one with rules into its code.

    ``overrides`` are put into every configuration that is made, as `mindspeed.megatron.argument_overrides` does.
    """

    def __init__(self, checkout: Path, rewrite: Callable[[str, str], Any]) -> None:
        self.checkout, self.rewrite = checkout, rewrite
        self.failed: dict[str, str] = {}
        self.overrides: Mapping[str, Any] = {}

    def failures(self) -> list[str]:
        """Return each module that could not be run, with the reason."""
        return [f"{name}: {reason}" for name, reason in self.failed.items()]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in sys.stdlib_module_names or top in _REAL:
            return None
        file = self.checkout.joinpath(*fullname.split(".")).with_suffix(".py")
        return ModuleSpec(fullname, self, is_package=not file.is_file())

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        file = self.checkout.joinpath(*name.split("."))
        if not name.startswith("megatron"):
            return
        if (init := file / "__init__.py").is_file():
            module.__dict__["_sources"] = dict(_imported_names(init, name))
        elif (source := file.with_suffix(".py")).is_file():
            text = source.read_text(encoding="utf-8", errors="replace")
            has_rules = bool(HAS_RULES.fullmatch(name) or _CONFIGURATION.search(text))
            if not has_rules and not _EXECUTED.fullmatch(name):
                return
            module.__file__ = str(source)
            try:
                code = self.rewrite(text, str(source)) if has_rules else compile(text, str(source), "exec", dont_inherit=True)
                exec(code, module.__dict__)
                forget = [one for one in vars(module) if _VERSIONS.fullmatch(one)] if name == "megatron.core.utils" else []
                vars(module).update({one: ImportStandIn(f"{name}.{one}") for one in forget})
                for made in vars(module).values() if has_rules else ():
                    if isinstance(made, type) and "__post_init__" in vars(made) and made.__module__ == name:
                        self._put_overrides_into(made)
            except (Exception, SystemExit) as error:
                self.failed[name] = f"{type(error).__name__}: {error} (line {_line_in(str(source), error)})"

    def _put_overrides_into(self, configuration: Any) -> None:
        original = configuration.__post_init__

        def post_init(made: Any, *arguments: Any) -> None:
            defaults = {field.name: field.default for field in dataclasses.fields(made)}
            for name in self.overrides.keys() & defaults.keys():
                if getattr(made, name) == defaults[name]:
                    setattr(made, name, self.overrides[name])
            original(made, *arguments)

        configuration.__post_init__ = post_init


def _line_in(file: str, error: BaseException) -> int:
    """Return the last line of a file that an error went through."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return (lines[-1] or 1) if lines else 1


class _StandInModule(ModuleType):
    """Give for each missing name what the source of the package imports under it, else a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        source = self.__dict__.get("_sources", {}).get(name)
        if source is not None:
            module, attribute = source
            return getattr(import_module(module), attribute)
        dotted = f"{self.__name__}.{name}"
        return ImportStandIn.facts[dotted] if dotted in ImportStandIn.facts else ImportStandIn(dotted, known=not name.isupper())


def _imported_names(init: Path, package: str) -> list[tuple[str, tuple[str, str]]]:
    """List what the ``__init__`` of a package imports from its own modules: name, module and attribute."""
    found = []
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8", errors="replace"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron" if not node.level else ""):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(alias.asname or alias.name, (module, alias.name)) for alias in node.names if module != package]
    return found
