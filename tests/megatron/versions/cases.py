"""What is proven on every supported Megatron: each feature alone, and the layouts that belong together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mindspeed.registry import catalog


@dataclass(frozen=True, slots=True)
class Case:
    """One `mindspeed features verify`: the features, their settings and sizes, the processes, what both runs have."""

    features: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    nproc: int | None = None


FEATURES: Final = (
    "tensor-parallel",
    "sequence-parallel",
    "pipeline-parallel",
    "virtual-pipeline",
    "data-parallel",
    "expert-parallel",
    "distributed-optimizer",
    "async-ddp",
    "async-param-gather",
    "recompute",
    "rms-norm",
    "swiglu",
    "rotary-embedding",
    "flash-attention",
)
"""The ten Megatron features and operator features, which one plan can have together."""

SPECS: Final = catalog(frozenset()).specs

_FULL: Final = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
_BLOCK: Final = {"recompute": {"granularity": "full", "method": "block", "num_layers": 1}}
_SELECTIVE: Final = {"recompute": {"granularity": "selective"}}
_EXPERTS: Final = {"recompute": {"granularity": "selective", "modules": ["moe"]}}


def _dispatched(dispatcher: str) -> Mapping[str, Mapping[str, Any]]:
    return {"expert-parallel": {"dispatcher": dispatcher}}


CASES: Final[Mapping[str, Case]] = {
    **{name: Case((name,)) for name in sorted(SPECS)},
    "tp2 with sequence parallelism": Case(("tensor-parallel", "sequence-parallel"), nproc=2),
    "tp2 with sequence parallelism, bf16": Case(("tensor-parallel", "sequence-parallel"), world={"dtype": "bf16"}, nproc=2),
    "pp2 x vpp2 with overlapped p2p": Case(
        ("pipeline-parallel", "virtual-pipeline"), {"virtual-pipeline": {"overlap_p2p": True}}, nproc=2
    ),
    "tp2 x pp2": Case(("tensor-parallel", "pipeline-parallel"), nproc=4),
    "dp2 with the distributed optimizer and both overlaps": Case(
        ("distributed-optimizer", "async-ddp", "async-param-gather"), nproc=2
    ),
    "ep2 with all-gather": Case(("expert-parallel",), _dispatched("allgather"), nproc=2),
    "ep2 with all-to-all": Case(("expert-parallel",), _dispatched("alltoall"), nproc=2),
    "ep2 x tp2 with sequence parallelism": Case(("expert-parallel", "tensor-parallel", "sequence-parallel"), nproc=4),
    "full recompute with dropout": Case(("recompute",), _FULL),
    "block-wise recompute with dropout": Case(("recompute",), _BLOCK),
    "selective recompute with dropout": Case(("recompute",), _SELECTIVE),
    "recompute of experts with dropout": Case(("recompute",), _EXPERTS),
    "full recompute with dropout beside tp2": Case(("recompute",), _FULL, also=("sequence-parallel",)),
    "operators under tp2 with sequence parallelism": Case(
        ("rms-norm", "swiglu", "rotary-embedding", "flash-attention"), also=("sequence-parallel",)
    ),
}
