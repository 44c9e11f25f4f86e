"""Read the argument names of Megatron's configuration classes from source; nothing is imported.

For a Megatron that is not at hand the names are those recorded (`mindspeed.inspection.releases`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from mindspeed.inspection.megatron_copies import megatron_version, package_root
from mindspeed.inspection.releases import recorded_section
from mindspeed.inspection.source_cache import source_cache_of


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """A configuration class or function that takes arguments by name.

    ``target`` is the function to wrap so that a value is in place before Megatron reads it; ``sources`` are the
    ``(file, class or function)`` pairs, below ``megatron/core``, that declare the names.
    """

    name: str
    target: str
    sources: tuple[tuple[str, str], ...]


PLACES: Final = (
    ArgumentPlace(
        "TransformerConfig",
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        (
            ("model_parallel_config.py", "ModelParallelConfig"),
            ("transformer/transformer_config.py", "TransformerConfig"),
            ("transformer/transformer_config.py", "MLATransformerConfig"),
        ),
    ),
    ArgumentPlace(
        "DistributedDataParallelConfig",
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig.__post_init__",
        (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    ),
    ArgumentPlace(
        "OptimizerConfig",
        "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
        (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    ),
    ArgumentPlace(
        "initialize_model_parallel",
        "megatron.core.parallel_state:initialize_model_parallel",
        (("parallel_state.py", "initialize_model_parallel"),),
    ),
    ArgumentPlace(
        "GPTModel",
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        (("models/gpt/gpt_model.py", "GPTModel"),),
    ),
)


@lru_cache(maxsize=4)
def known_arguments(root: Path) -> dict[str, frozenset[str]]:
    """``{place: argument names}`` of the megatron folder ``root``; a place whose source is missing has none."""
    cache = source_cache_of((root, "arguments"))
    known = cache.get("arguments", dict)
    if known is None:
        known = {place.name: sorted(set(_declared(root / "core", place))) for place in PLACES}
        files = {str(root / "core" / file) for place in PLACES for file, _ in place.sources}
        cache.put("arguments", known, [file for file in files if Path(file).is_file()])
        cache.save()
    return {name: frozenset(names) for name, names in known.items()}


def arguments_of(version: str | None) -> dict[str, frozenset[str]] | None:
    """``{place: argument names}`` of the Megatron at hand when it has this version, else of the recorded one most like it.

    None for an unknown version, and when every recorded one is above.
    """
    root = package_root("core")
    if root is not None and version is not None and version == megatron_version():
        return known_arguments(root)
    known = recorded_section(version, "configuration") if version is not None else None
    return {place: frozenset(names) for place, names in known[1].items()} if known is not None else None


def _declared(core: Path, place: ArgumentPlace) -> Iterator[str]:
    for file, name in place.sources:
        try:
            tree = ast.parse((core / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                for member in node.body:
                    if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                        yield member.target.id
                    elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
                        yield from _parameters(member, first=1)
            elif isinstance(node, ast.FunctionDef) and node.name == name:
                yield from _parameters(node)


def _parameters(function: ast.FunctionDef, first: int = 0) -> Iterator[str]:
    return (parameter.arg for parameter in (*function.args.args[first:], *function.args.kwonlyargs))
