"""The picture of one plan: what is requested, what becomes active and why, and what that changes in Megatron."""

from __future__ import annotations

from typing import Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.planned_feature import Reason, ReasonKind
from mindspeed.engine.resolution.request import Layer
from tools.docs.drawing import Flow, Node, Picture

REQUEST: Final = Layer(
    "job file",
    features=("sequence-parallel", "distributed-optimizer", "swiglu"),
    world={"world_size": 4, "tp": 2, "activation": "silu", "gated_linear_unit": True},
    level=2,
    without=("flash-attention", "matmul-add", "rms-norm", "rotary-embedding"),
)


def plan_picture() -> Picture:
    """Draw the plan of `REQUEST` for megatron-core 0.16.1 on the CPU."""
    plan = registry.resolve([REQUEST], made_up("cpu", "0.16.1"))
    requested = [name for name in plan.names if name in REQUEST.features]
    changes = _changes(plan)
    active = [Node(f.name, _reason(f.why[0]), 0 if f.name in requested else 1) for f in plan.features]
    columns = (
        ("requested", [Node(name, "", 3) for name in requested]),
        ("active, in this order", active),
        ("changes in Megatron", [node for _, node in changes]),
    )
    places = {name: row for row, name in enumerate(plan.names)}
    edges = [((0, row), (1, places[name])) for row, name in enumerate(requested)]
    edges += [((1, places[owner]), (2, row)) for row, (owner, _) in enumerate(changes)]
    text = (
        "Three features are requested. The plan adds what they require, puts all into one order with a reason for each, and "
        "lists every argument and every function of Megatron that changes."
    )
    return Picture("plan", "A plan: 4 processes, tensor parallelism of 2", text, ((Flow(columns, edges),),))


def _reason(reason: Reason) -> str:
    return "requested" if reason.kind is ReasonKind.REQUESTED else str(reason._replace(note=""))


def _changes(plan: ActivationPlan) -> list[tuple[str, Node]]:
    """Each change with the feature that makes it, in plan order."""
    found = [(o.owners[0], Node(f"{o.override.argument} = {o.override.value}", "argument", 2)) for o in plan.overrides]
    for planned in plan.patches:
        if planned.owner in plan.names and not planned.skipped:
            module, _, name = planned.site.partition(":")
            found.append((planned.owner, Node(f"{planned.patch.kind} {name}", module.removeprefix("megatron.core."), 4)))
    return sorted(found, key=lambda row: plan.names.index(row[0]))
