"""Where Megatron takes its arguments, and which names each place has: read from source, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from mindspeed.activation.memory import memory_of


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
)


@lru_cache(maxsize=4)
def known_arguments(root: Path) -> dict[str, frozenset[str]]:
    """``{place: argument names}`` of the megatron folder ``root``; a place whose source is missing has none."""
    memory = memory_of((root, "arguments"))
    known = memory.recall("arguments")
    if known is None:
        known = {place.name: sorted(set(_declared(root / "core", place))) for place in PLACES}
        files = {str(root / "core" / file) for place in PLACES for file, _ in place.sources}
        memory.keep("arguments", known, [file for file in files if Path(file).is_file()])
        memory.save()
    return {name: frozenset(names) for name, names in known.items()}


def _declared(core: Path, place: ArgumentPlace) -> Iterator[str]:
    for file, name in place.sources:
        try:
            tree = ast.parse((core / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from (
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                )
            elif isinstance(node, ast.FunctionDef) and node.name == name:
                yield from (parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs))
