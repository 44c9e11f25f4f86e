"""Built-in features use nothing that a feature of another distribution cannot use."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mindspeed.features

PUBLIC = (
    "mindspeed.ops",
    "mindspeed.job.arithmetic",
    "mindspeed.job.config",
    "mindspeed.job.hybrid_pattern",
    "mindspeed.job.world",
    "mindspeed.megatron.module_specs",
    "mindspeed.problems",
    "mindspeed.files.cache_folder",
    "mindspeed.files.step_log",
    "mindspeed.files.step_record",
    "mindspeed.files.text_files",
    "mindspeed.platforms.host_copy",
    "mindspeed.plugins.active",
    "mindspeed.plugins.conditions",
    "mindspeed.plugins.constraints",
    "mindspeed.plugins.saved_tensors",
    "mindspeed.plugins.shared_conditions",
    "mindspeed.process.error_file",
    "mindspeed.process.run",
    "mindspeed.process.variables",
    "packaging",
    "mindspeed.context_parallel",
    "mindspeed.moe",
    "mindspeed.tensor_parallel",
    "mindspeed.memory",
    "mindspeed.pipeline",
    "mindspeed.plugins.patches",
    "pydantic",
    "torch",
    "torch_npu",
    "megatron",
    "nvidia_resiliency_ext",
    "opentelemetry",
    "prometheus_client",
    "wandb",
)
"""Packages whose modules a feature imports, beside names of `mindspeed.plugins`, its own folder and the standard library."""
FILES = sorted(Path(next(iter(mindspeed.features.__path__))).rglob("*.py"))

BASE = {file.parent.name for file in FILES if file.name == "base.py"}
"""Folders of features that every plan of their platforms has, which may import the platforms as well."""


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from [f"mindspeed.{name.name}" for name in node.names] if node.module == "mindspeed" else [node.module or ""]


def allowed(module: str, folder: str) -> bool:
    parts = module.split(".")
    if parts[0] in sys.stdlib_module_names or module == "mindspeed.plugins":
        return True
    packages = (*PUBLIC, f"mindspeed.features.{folder}", *(("mindspeed.platforms",) if folder in BASE else ()))
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", sorted({file.parent.name for file in FILES} - {"features"}))
def test_a_feature_imports_public_names_alone(folder: str) -> None:
    found = {module for file in FILES if file.parent.name == folder for module in imported(file)}
    assert sorted(module for module in found if not allowed(module, folder)) == []
