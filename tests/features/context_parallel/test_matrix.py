"""Context parallelism beside other layouts on four and on eight ranks: what the parity tests leave of the matrix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

HYBRID = ("hybrid-attention", 4, {"hybrid-attention": {"ulysses_degree": 2}})
RING, ULYSSES, GATHERED, ADAPTIVE = (
    (name, 2, {}) for name in ("ring-attention", "ulysses-attention", "kv-allgather-cp", "adaptive-cp")
)
TENSOR = (["tensor-parallel", "sequence-parallel"], {"tensor-parallel": {"size": 2}})
STAGES = (["pipeline-parallel"], {"pipeline-parallel": {"size": 2}})
OPTIMIZER = (["distributed-optimizer", "async-ddp", "async-param-gather"], {})
AGAIN = (["recompute"], {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}})
ALL = ([*TENSOR[0], *STAGES[0]], {**TENSOR[1], **STAGES[1]})

CASES: dict[str, tuple[tuple[str, int, dict[str, Any]], tuple[list[str], dict[str, Any]], int]] = {
    "hybrid and replicas, distributed optimizer with overlaps": (HYBRID, OPTIMIZER, 8),
    "hybrid, recompute": (HYBRID, AGAIN, 4),
    "ring and replicas, distributed optimizer with overlaps": (RING, OPTIMIZER, 4),
    "Ulysses and replicas, distributed optimizer with overlaps": (ULYSSES, OPTIMIZER, 4),
    "gathering and replicas, recompute": (GATHERED, AGAIN, 4),
    "adaptive, tensor and sequence parallel": (ADAPTIVE, TENSOR, 4),
    "adaptive, pipeline": (ADAPTIVE, STAGES, 4),
    "ring, tensor, sequence and pipeline parallel": (RING, ALL, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_a_share_of_the_sequence_trains_as_the_whole(prove: Prove, case: str) -> None:
    (algorithm, size, own), (features, settings), nproc = CASES[case]
    given = {"context-parallel": {"size": size}, **own, **settings}
    assert prove(algorithm, *features, settings=given, nproc=nproc).problems == []
