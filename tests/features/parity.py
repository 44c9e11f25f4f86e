"""Training beside the baseline: a table of cases as one long test of a feature."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.conftest import Prove

DTYPES: Final = ("fp32", "bf16")
FULL: Final = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
BUCKETS: Final = ("distributed-optimizer", "async-ddp", "async-param-gather")
TENSOR: Final = ("tensor-parallel", "sequence-parallel")
LLAMA: Final = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu", "num_query_groups": 2}
COMPRESSED_MASK: Final = 2048 * 2048
"""Bytes of the mask that all causal modes share: a process makes it once, whatever the size of its job."""
RINGS: Final = ("ring-attention", "ulysses-attention", "kv-allgather-cp")
"""The algorithms of context parallelism that need no settings."""


@dataclass(frozen=True, slots=True)
class Given:
    """What stands beside a feature under test: others, those of both runs (``also``), settings and the job."""

    features: Sequence[str]
    also: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]
    nproc: int | None
    world: Mapping[str, Any]


def given(
    *features: str,
    also: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    nproc: int | None = None,
    **world: Any,
) -> Given:
    """One case of a table."""
    return Given(features, also, settings or {}, nproc, world)


def cp(size: int, **settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Settings with this context-parallel size."""
    return {"context-parallel": {"size": size}, **settings}


def trains(name: str, cases: Mapping[str, Given]) -> Callable[..., None]:
    """A long test that the feature keeps its claim in each case."""

    @pytest.mark.long
    @pytest.mark.cover
    @pytest.mark.parametrize("case", [pytest.param(row, id=case) for case, row in cases.items()])
    def test(prove: Prove, case: Given) -> None:
        verdict = prove(name, *case.features, also=case.also, settings=case.settings, world=case.world, nproc=case.nproc)
        assert not verdict.problems, verdict.problems

    return test
