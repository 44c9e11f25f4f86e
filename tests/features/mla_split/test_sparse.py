"""Sparse attention over latent vectors: training beside Megatron's attention to keys and values of heads."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import BUCKETS, FULL, Given, given, trains

NAME = "mla-split"
ABSORBED: dict[str, Any] = {NAME: {"absorb": True}}
ROLES = ["transformer-engine-layers"]
"""Layers for which alone Megatron has sparse attention."""


def sparse(*features: str, settings: Any = None, also: Any = (), topk: int = 5, **world: Any) -> Given:
    """Return a case of a model of 24 tokens whose queries have ``topk`` keys."""
    model = {"multi_latent_attention": True, "indexer_topk": topk}
    return given(*features, also=[*ROLES, *also], settings=ABSORBED | (settings or {}), **model, **world)


def test_attention_to_latent_vectors_is_that_to_keys_of_heads(prove: Prove) -> None:
    case = sparse(nproc=1)
    verdict = prove(NAME, also=case.also, settings=case.settings, world=case.world, nproc=1)
    assert not verdict.problems, verdict.problems
