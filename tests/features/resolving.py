"""Resolving built-in features for a small model whose every value is known, one value at a time made wrong."""

import re
from collections.abc import Callable
from typing import Any

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import Resolution, resolve
from mindspeed.job.world import World
from mindspeed.plugins import Feature
from mindspeed.plugins.discovery import discover
from mindspeed.problems import Fix, Problem

MODEL: dict[str, Any] = {
    "world_size": 8,
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "num_experts": 0,
    "grouped_experts": False,
    "vocab_size": 512,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "linear_bias": False,
    "activation": "silu",
    "rotary": True,
}
CATALOG = discover(only=())


def ask(
    *names: str,
    settings: dict[str, dict[str, Any]] | None = None,
    model: dict[str, Any] = MODEL,
    has_variant: Callable[[str, str], bool] = lambda op, platform: False,
    **world: Any,
) -> Resolution:
    """Resolve a request on the command line for ``model``, of which ``world`` replaces values.

    By ``has_variant`` operators are references, so that level 1 adds nothing to a plan.
    """
    layer = Layer("command line", features=names, settings=settings or {}, world=model | world)
    return resolve([layer], CATALOG, made_up("cpu", "0.16.1"), has_variant=has_variant)


def refusals(*names: str, settings: dict[str, dict[str, Any]] | None = None, **world: Any) -> list[str]:
    """``"CODE message | fix"`` of every problem."""
    found = ask(*names, settings=settings, **world).problems
    return [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in found]


def outlines(*names: str, settings: dict[str, dict[str, Any]] | None = None, **world: Any) -> list[str]:
    """``"CODE features: values at fault | fixes"`` of every problem, which no wording changes."""
    return [outline(problem) for problem in ask(*names, settings=settings, **world).problems]


def outline(problem: Problem) -> str:
    """Return code, features, values at fault and kinds of fix of a problem, after looking at its sentence."""
    assert re.search(r"[{}]|\bNone\b", problem.message + problem.fix_text) is None, problem
    facts = " ".join(f"{fact.name}={fact.value!r}" for fact in problem.facts)
    head = f"{problem.code} {' '.join(problem.features)}" + (f": {facts}" if facts else "")
    return f"{head} | {', '.join(map(_kind, problem.fix))}"


def _kind(fix: Fix) -> str:
    if fix.steps:
        return f"({' + '.join(map(_kind, fix.steps))})"
    value = f"={fix.value!r}" if fix.value is not None and fix.verb in ("give-field", "give-setting") else ""
    return fix.verb if fix.verb in ("advice", "run-command") else f"{fix.verb} {fix.name}{value}"


def active(*names: str, **request: Any) -> list[str]:
    """Names of the active features of a request that must be fine."""
    resolution = ask(*names, **request)
    assert not resolution.problems, "\n".join(map(str, resolution.problems))
    return [feature.name for feature in resolution.features]


def not_checked(*names: str, settings: dict[str, dict[str, Any]] | None = None, **world: Any) -> list[str]:
    """Rows of what cannot be decided for a model of which nothing but ``world`` is known."""
    return [row.line() for row in ask(*names, settings=settings, model={}, **world).rows if row.kind == "not-checked"]


def overrides(name: str, **settings: Any) -> dict[str, Any]:
    """What a feature with these settings sets in Megatron."""
    feature: type[Feature[Any]] = CATALOG.feature(name)
    instance: Any = feature(feature.Args(**settings), World({}))
    return {override.argument: override.value for override in instance.megatron_args()}
