"""Experts on several ranks against one process of unmodified Megatron: models, layouts and features beside."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conftest import Prove

ALLTOALL, ALLGATHER = ("moe-alltoall-overlap",), ("moe-allgather-overlap",)
ZERO = ("moe-zero-memory",)
LEVEL1 = {"moe-zero-memory": {"level": "level1"}}
SHARED = {"shared_expert_hidden_size": 48}
PIPELINE = {"pp": 2, "ep": 2}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}
SINGLE = {"moe_grouped_gemm": False}
"""Experts of a model with dense layers, whose layers Megatron chooses by its configuration."""
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
GATED = {**SIGMOID, **GROUPS, "moe_shared_expert_gate": True}


@dataclass(frozen=True)
class Row:
    """A case: features under test, the model (``world`` and ``options`` of its configuration) and its surroundings."""

    id: str
    features: tuple[str, ...]
    world: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    nproc: int = 2
    long: bool = True


def both(name: str, **case: Any) -> list[Row]:
    """The case with each overlap."""
    return [Row(f"{name}, {kind}", (f"moe-{kind}-overlap",), **case) for kind in ("alltoall", "allgather")]


MODELS = [
    *both("top 1 of 4", world={"router_topk": 1}, options={"moe_router_pre_softmax": True}),
    *both("top 4 of 8", world={"router_topk": 4, "num_experts": 8}),
    *both("top 8 of 16", world={"router_topk": 8, "num_experts": 16}),
    *both("pre-softmax", options={"moe_router_pre_softmax": True}),
    *both("sigmoid with bias and scaling", options=SIGMOID),
    *both("group-limited, gated shared experts", world={"num_experts": 8, **SHARED}, options=GROUPS),
    Row("gate", ALLTOALL, {"num_experts": 8, **SHARED}, GATED, long=False),
    *both("losses", options={"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 1e-2}),
    *both("drop by probability", world={"expert_capacity_factor": 0.8}, options={"moe_token_drop_policy": "probs"}),
    *both("drop by position", world={"expert_capacity_factor": 0.8}, options={"moe_token_drop_policy": "position"}),
    Row("padded", ALLTOALL, {"expert_capacity_factor": 1.0, "padded_experts": True}),
    *both("multi-token prediction", world={"mtp_num_layers": 1}),
    *both("latent attention", world={"multi_latent_attention": True}),
    *both("dense layers between", options={"moe_layer_freq": [0, 1, 0, 1], **SINGLE}),
    Row("many experts", ALLTOALL, {"num_experts": 16}, settings={"moe-alltoall-overlap": {"parts": 4}}),
]
LAYOUTS = [
    *both("bf16", world={"dtype": "bf16", **SHARED}),
    Row("level 1 in bf16", ZERO, {"dtype": "bf16", **SHARED}, settings=LEVEL1),
    Row("tensor ranks in bf16", (*ALLTOALL, "moe-tp-extend-ep"), {"dtype": "bf16", "tp": 2}),
    *both("stages in bf16", world={**PIPELINE, "dtype": "bf16"}, nproc=4),
    *both("four ranks of experts", world={"ep": 4, "num_experts": 8, **SHARED}, nproc=4),
    *both("tensor ranks split experts", world={"tp": 2, "ep": 2}, nproc=4),
    Row("tensor ranks have whole experts", (*ALLTOALL, "moe-tp-extend-ep"), {"tp": 2, "ep": 2, **SHARED}),
    Row("four ranks of whole experts", (*ALLTOALL, "moe-tp-extend-ep"), {"tp": 2, "ep": 4}, nproc=4),
    Row("gathered tensor ranks", (*ALLGATHER, "moe-tp-extend-ep"), {"tp": 2, "ep": 2}),
    *both("two stages", world={**PIPELINE, **SHARED}, nproc=4),
    *both("two stages, the first dense", world=PIPELINE, options={"moe_layer_freq": [0, 0, 1, 1], **SINGLE}, nproc=4),
    *both("two chunks a stage", world={**PIPELINE, "vpp": 2}, nproc=4),
    Row("prediction on the last stage", ALLTOALL, {**PIPELINE, "mtp_num_layers": 1}, nproc=4),
    Row("level 1 in two chunks", ZERO, {**PIPELINE, "vpp": 2}, settings=LEVEL1, nproc=4),
]
NEIGHBOURS = [
    Row("sharded optimizer", (*ALLTOALL, "distributed-optimizer", "async-ddp"), SHARED),
    Row("sharded optimizer, gathered", (*ALLGATHER, "distributed-optimizer", "async-ddp"), SHARED),
    Row("level 1, sharded optimizer", (*ZERO, "distributed-optimizer", "async-ddp"), SHARED, settings=LEVEL1),
    Row("recompute of attention", (*ALLTOALL, "recompute"), settings={"recompute": {"modules": ["core_attn"]}}),
    Row("recompute of experts", (*ALLTOALL, "recompute"), settings={"recompute": {"modules": ["moe"]}}),
    *both("recompute of everything", also=("recompute",), settings={"recompute": FULL}),
    Row("swiglu and matmul-add", (*ALLTOALL, "swiglu", "matmul-add")),
    Row("grouped, token permute", ("expert-parallel", "moe-grouped-gemm", "moe-token-permute")),
    Row("adaptive recompute", (*ALLTOALL, "moe-adaptive-recompute"), settings={"moe-adaptive-recompute": {"scale": 1.0}}),
]
ONCE = {"moe-alltoall-dispatcher": {"once_per_rank": True}}
WIDE = {"router_topk": 4, "num_experts": 8}
PAIRS = [
    Row("once per rank", ("moe-alltoall-dispatcher",), WIDE, settings=ONCE),
    Row("once per rank, overlapped in parts", ALLTOALL, WIDE, settings=ONCE | {"moe-alltoall-overlap": {"parts": 2}}),
    Row("once per rank, level 1", ZERO, {**WIDE, **SHARED}, settings=ONCE | LEVEL1),
    Row("once per rank, tokens dropped", ALLTOALL, {**WIDE, "expert_capacity_factor": 0.8}, settings=ONCE),
    Row("once per rank, whole experts", (*ALLTOALL, "moe-tp-extend-ep"), {**WIDE, "tp": 2}, settings=ONCE),
    Row("once per rank, four ranks", ALLTOALL, {**WIDE, "ep": 4}, settings=ONCE, nproc=4),
    Row("dispatcher by bytes", ("expert-parallel",), WIDE, settings={"expert-parallel": {"dispatcher": "auto"}}),
]
NINE: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "moe-grouped-gemm": {},
    "moe-allgather-dispatcher": {},
    "moe-alltoall-dispatcher": {},
    "moe-allgather-overlap": {},
    "moe-alltoall-overlap": {},
    "moe-tp-extend-ep": {},
    "moe-shared-experts": {"moe-shared-experts": {"count": 1, "gate": "hidden", "overlap": True}},
    "moe-zero-memory": LEVEL1,
    "moe-adaptive-recompute": {"moe-adaptive-recompute": {"scale": 1.0}},
}


def each(name: str) -> list[Row]:
    """A feature alone, and in every surrounding."""
    tensor = {"tp": 2, "ep": 2}
    whole = name == "moe-tp-extend-ep"
    ranks = tensor if whole else {}
    surroundings: dict[str, dict[str, Any]] = {
        "alone": {"world": ranks},
        "bf16": {"world": {**ranks, "dtype": "bf16"}},
        "tensor ranks": {"world": {"tp": 2, "ep": 4} if whole else tensor, "nproc": 4},
        "stages": {"world": {**ranks, **PIPELINE}, "nproc": 4},
        "sharded optimizer": {"world": ranks, "features": ("distributed-optimizer", "async-ddp")},
    }
    rows = []
    for where, case in surroundings.items():
        features = (name, *case.pop("features", ()))
        rows.append(Row(f"{name}: {where}", features, settings=NINE[name], **case))
    return rows


ROWS = [*MODELS, *LAYOUTS, *NEIGHBOURS, *PAIRS, *(row for name in NINE for row in each(name))]


@pytest.mark.cover
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id, marks=[pytest.mark.long] if row.long else []) for row in ROWS])
def test_experts_train_as_in_one_process_of_megatron(prove: Prove, row: Row) -> None:
    verdict = prove(
        *row.features,
        world={"ep": 2, **row.world},
        options=row.options,
        settings=row.settings,
        also=row.also,
        nproc=row.nproc,
        steps=2,
    )
    assert verdict.problems == []
