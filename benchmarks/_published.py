"""The planner beside numbers that AMD has published of its own planner: Primus projections from one node to eight.

Sources: ROCm/rocm-blogs, blogs/software-tools-optimization/primus-projection/README.md: its table of MI325X and its summary of
Mixtral 8x22B; AMD-AGI/Primus, docs/projection.md: the messages of that model's experts. A rate on eight nodes is predicted from
the published rate on one node; where that is not given there is no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from benchmarks.table import Row
from mindspeed.job.arithmetic import parameters, rank_parameters, shape_of_world
from mindspeed.job.world import World
from mindspeed.plugins.discovery import discover
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.search import Question, Scores
from mindspeed.workbench.tuning.space import SIZES, Choice, Layouts
from mindspeed.workbench.tuning.time import DEFAULTS, Machine

COMMAND: Final = "python -m benchmarks.tuning"
LLAMA: Final[dict[str, Any]] = {
    "ranks_per_node": 8,
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "num_experts": 0,
    "vocab_size": 128256,
    "seq_length": 8192,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "rotary": True,
    "tied_embeddings": False,
    "dtype": "bf16",
    "platform": "cuda",
    "megatron": "0.16.1",
}
LARGE: Final = {**LLAMA, "num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
MIXTRAL: Final = {
    **LLAMA,
    "num_layers": 56,
    "hidden_size": 6144,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 48,
    "num_experts": 8,
    "router_topk": 2,
    "vocab_size": 100352,
    "world_size": 64,
    "pp": 4,
    "ep": 8,
    "global_batch_size": 256,
    "micro_batch_size": 2,
}
OVERLAPS: Final = ("distributed-optimizer", "async-ddp", "async-param-gather")  # or FSDP, which gathers ahead as well
FULL: Final = {"recompute": {"granularity": "full", "method": "block", "num_layers": 80}}


@dataclass(frozen=True)
class Published:
    """Tokens per second and GPU on one node of eight and on eight nodes, measured by AMD, and its own projection."""

    name: str
    model: dict[str, Any]
    micro_batch_size: int
    samples_per_gpu: int
    choice: Choice
    one_node: int
    eight_nodes: int
    projected: int
    note: str = ""


CASES: Final = (
    Published("Llama 3.1 8B, FP8", LLAMA, 2, 16, Choice(OVERLAPS), 16224, 16186, 17787),
    Published("Llama 3.1 70B, BF16", LARGE, 1, 1, Choice((*OVERLAPS, "recompute"), FULL), 1135, 1174, 1096),
    Published(
        "Llama 3.1 70B, FP8",
        LARGE,
        4,
        4,
        Choice((*OVERLAPS, "recompute"), FULL),
        1135,
        1726,
        1872,
        "; the rate on one node stands twice in the source, for BF16 and for FP8, and belongs to one of them",
    ),
)


def published_rows() -> list[Row]:
    """Errors of rates and of parameter counts against what is published."""
    rows = []
    for case in CASES:
        predicted = case.one_node * _seconds(case, 8) / _seconds(case, 64)
        error = 100 * abs(predicted / case.eight_nodes - 1)
        theirs = 100 * (case.projected / case.eight_nodes - 1)
        rates = f"{case.one_node:,} on 8 GPUs, {predicted:,.0f} foretold and {case.eight_nodes:,} measured on 64"
        note = f"tokens/s/GPU: {rates}; Primus {theirs:+.1f} %{case.note}"
        rows.append(Row(f"anchor: {case.name}, 1 to 8 nodes", 10, error, "%", COMMAND, note))
    world = World(MIXTRAL)
    for what, ours, theirs in (
        ("parameters", parameters(shape_of_world(world)).total, 140_845_350_912),
        ("parameters of a rank, pp 4 and ep 8", round(sum(rank_parameters(world))), 6_078_750_720),
    ):
        note = f"{ours:,} here, {theirs:,} published, which has three norms with biases in a layer and one vocabulary"
        rows.append(Row(f"anchor: Mixtral 8x22B, {what}", 10, 100 * abs(ours / theirs - 1), "%", COMMAND, note))
    return [*rows, _all_to_all_row()]


def _all_to_all_row() -> Row:
    """Error of the bytes that an all-to-all of one layer moves, without what stays on a rank."""
    sizes = {name: [MIXTRAL.get(name, 1)] for name in SIZES}
    question = Question(Layouts(MIXTRAL, sizes), [], FixedRequest(), Machine(DEFAULTS["cuda"]))
    work = Scores(question, discover(only=())).work(Choice())
    passes, ranks = work["layer"] / 3, MIXTRAL["ep"]  # backward takes as long as two passes; tokens go and come back in both
    ours = float((work["ep_byte"] / (4 * passes) * ranks / (ranks - 1))[0])
    theirs = 384 * 2**20
    note = f"{ours:,.0f} bytes here, {theirs:,} published"
    return Row("anchor: Mixtral 8x22B, an all-to-all", 10, 100 * abs(ours / theirs - 1), "%", COMMAND, note)


def _seconds(case: Published, ranks: int) -> float:
    """Seconds of a step by the formulas, at the orders of magnitude of an accelerator."""
    batch = {"global_batch_size": case.samples_per_gpu * ranks, "world_size": ranks}
    sizes = {name: [1] for name in SIZES} | {"micro_batch_size": [case.micro_batch_size]}
    question = Question(Layouts({**case.model, **batch}, sizes), [case.choice], FixedRequest(), Machine(DEFAULTS["cuda"]))
    return float(Scores(question, discover(only=())).seconds(case.choice)[0])
