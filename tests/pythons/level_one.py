"""The plain script under every level-1 feature, and what undo leaves: ``python -m tests.pythons.level_one KIND FILE``.

``KIND`` is ``stock`` (the platform alone), ``one`` (the features of one process) or ``two`` (all, with the sequence over two
processes). Each rank writes ``{"python", "megatron", "features", "reached", "losses", "norms", "undone", "left"}``: the active
level-1 features and those with a point that was reached, entries that differ after an activation was undone, and code that
differs after a training was.
"""

import json
import sys
import types
from typing import Any, Final

import torch

import mindspeed
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.registry import catalog
from tests.engine.patching.process_snapshots import differences, identities, import_models

LEVEL_ONE: Final = sorted(name for name, spec in catalog(frozenset()).specs.items() if spec.level == 1)
WORLD: Final[dict[str, Any]] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 32,
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_linear_unit": True,
    "linear_bias": False,
    "rotary": True,
    "num_experts": 4,
    "grouped_experts": True,
}
MODEL: Final = ("--llama", "--experts", "4", "--layers", "2", "--share-sequence", "--per-token")
CODE: Final = (types.FunctionType, types.CodeType, types.MethodType, staticmethod, classmethod, property, type)


def plan_of(kind: str) -> ActivationPlan:
    """Return the plan of a kind; a ring has blocks to merge only on several processes."""
    if kind == "stock":
        return mindspeed.plan(level=0, platform="cpu", world={**WORLD, "world_size": 1})
    if kind == "one":
        names = [name for name in LEVEL_ONE if name != "ring-attention-update"]
        return mindspeed.plan(names, platform="cpu", world={**WORLD, "world_size": 1})
    return mindspeed.plan([*LEVEL_ONE, "ring-attention"], platform="cpu", world={**WORLD, "world_size": 2, "cp": 2})


def code_left(before: dict[int, Any], after: dict[int, Any]) -> list[str]:
    """Functions, classes, bases and code objects that are not what they were; values that a training computes are not told."""
    left = []
    for key, (name, _, entries) in before.items():
        now = dict(after[key][2]) if key in after else {}
        code = [(entry, value) for entry, value in entries if isinstance(value, CODE) or entry == "__bases__"]
        for entry, value in code:
            same = now.get(entry) == value if entry == "__bases__" else now.get(entry) is value
            if not same:
                left.append(f"{name}: {entry}")
    return left


def trained(kind: str) -> tuple[list[float], list[float]]:
    from tests.megatron import plain_script

    torch.distributed.init_process_group("nccl")
    flags = MODEL if kind == "stock" else (*MODEL, "--grouped-experts")
    losses, norms, _ = plain_script.run(plain_script.parse(flags))
    torch.distributed.destroy_process_group()
    return losses, norms


def main() -> None:
    kind = sys.argv[1]
    plan = plan_of(kind)
    import_models()

    before = identities()
    mindspeed.activate(plan)
    assert differences(before, identities()), "activation changed nothing"
    mindspeed.deactivate()
    undone = differences(before, identities())

    before = identities()
    mindspeed.activate(plan)
    losses, norms = trained(kind)
    report = mindspeed.report()
    mindspeed.deactivate()
    assert report is not None
    answer = {
        "python": sys.version.split()[0],
        "megatron": megatron_version(),
        "features": [name for name in plan.names if name in LEVEL_ONE],
        "reached": [one.name for one in report.features if one.name in LEVEL_ONE and any(p.reached for p in one.points)],
        "losses": losses,
        "norms": norms,
        "undone": undone,
        "left": code_left(before, identities()),
    }
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
