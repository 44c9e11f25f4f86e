"""Read the argument names of Megatron's configuration classes from source; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from mindspeed.engine.inspection.contract_reading import definition_nodes
from mindspeed.engine.inspection.megatron_copies import megatron_portions, megatron_version
from mindspeed.engine.inspection.releases import recorded_section
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.inspection.source import trees_kept
from mindspeed.engine.inspection.source_cache import source_cache_of


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """A configuration class or function that takes arguments by name.

    ``target`` is the function to wrap so that a value is in place before Megatron reads it; ``sources`` are the classes
    and functions that declare the names.
    """

    name: str
    target: str
    sources: tuple[str, ...]


def _configuration(target: str, *bases: str) -> ArgumentPlace:
    return ArgumentPlace(target.partition(":")[2], f"{target}.__post_init__", (*bases, target))


_TRANSFORMER: Final = "megatron.core.transformer.transformer_config:TransformerConfig"
_GROUPS: Final = "megatron.core.parallel_state:initialize_model_parallel"
_OPTIMIZER: Final = "megatron.core.optimizer:get_megatron_optimizer"
_MODEL: Final = "megatron.core.models.gpt.gpt_model:GPTModel"
_HYBRID: Final = "megatron.core.models.hybrid.hybrid_model:HybridModel"
PLACES: Final = (
    _configuration(
        _TRANSFORMER,
        "megatron.core.model_parallel_config:ModelParallelConfig",
        "megatron.core.transformer.transformer_config:MLATransformerConfig",
    ),
    _configuration("megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"),
    _configuration("megatron.core.optimizer.optimizer_config:OptimizerConfig"),
    ArgumentPlace("initialize_model_parallel", _GROUPS, (_GROUPS,)),
    ArgumentPlace("get_megatron_optimizer", _OPTIMIZER, (_OPTIMIZER,)),
    ArgumentPlace("GPTModel", f"{_MODEL}.__init__", (f"{_MODEL}.__init__",)),
    ArgumentPlace("HybridModel", f"{_HYBRID}.__init__", (f"{_HYBRID}.__init__",)),
)


def known_arguments() -> dict[str, frozenset[str]]:
    """``{place: argument names}`` of the Megatron on the path; a place whose source is missing has none."""
    cache = source_cache_of(*megatron_portions())
    with trees_kept():
        names = {place.name: cache.get(f"arguments of {place.name}", partial(_declared, place)) for place in PLACES}
    cache.save()
    return {place: frozenset(declared) for place, declared in names.items()}


def arguments_of(version: str | None) -> dict[str, frozenset[str]] | None:
    """``{place: argument names}`` of the Megatron at hand when it has this version, else of the recorded one most like it.

    None for an unknown version, and when every recorded one is above.
    """
    if version is None:
        return None
    if version == megatron_version():
        return known_arguments()
    known = recorded_section(version, "configuration")
    return {place: frozenset(names) for place, names in known[1].items()} if known is not None else None


def _declared(place: ArgumentPlace) -> list[str]:
    sites = [site for source in place.sources if (site := find_site(source)) is not None]
    return sorted({name for site in sites for node in definition_nodes(site) for name in _names(node)})


def _names(node: ast.stmt) -> Iterator[str]:
    """Fields of a dataclass, parameters of a function."""
    if isinstance(node, ast.ClassDef):
        fields = [member.target for member in node.body if isinstance(member, ast.AnnAssign)]
        yield from (field.id for field in fields if isinstance(field, ast.Name))
    elif isinstance(node, ast.FunctionDef):
        parameters = (*node.args.args, *node.args.kwonlyargs)
        yield from (parameter.arg for parameter in parameters if parameter.arg != "self")
