"""What the feature refuses, with the way out."""

from typing import Any

import pytest

import mindspeed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.problems import ResolutionError

WORLD: dict[str, Any] = {"multi_latent_attention": True, "num_layers": 4, "world_size": 2}
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}


def messages(*others: str, offload: bool = True, world: Any = None, **settings: Any) -> list[str]:
    given = {**settings, "mla-split": {"offload_output": offload}}
    try:
        mindspeed.plan(["mla-split", *others], settings=given, world=WORLD | (world or {}), platform="cpu", level=2)
    except ResolutionError as error:
        return [f"{problem.code} {problem.message}" for problem in error.problems]
    return []


def test_attention_that_is_not_latent_has_no_up_projections() -> None:
    text = "MS304 mla-split: attention is not multi-latent, so it has no up-projections"
    assert messages(offload=False) == []
    assert messages(offload=False, world={"multi_latent_attention": False}) == [text]


@pytest.mark.parametrize(
    ("other", "settings", "reason"),
    [
        ("recompute", {"recompute": FULL}, "offloads what recomputation of whole layers does not keep"),
        ("swap-attention", {}, "swap-attention already offloads the output of core attention"),
    ],
)
def test_the_output_is_offloaded_once(other: str, settings: Any, reason: str) -> None:
    assert messages(other, offload=False, **settings) == []
    (text,) = messages(other, **settings)
    assert reason in text


def test_linear_layers_of_another_feature_conflict() -> None:
    (text,) = messages("sequence-parallel", "coc", offload=False, world={"tp": 2})
    assert "coc" in text
    assert "linear" in text


def absorbed(megatron: str = "0.16.1", **world: Any) -> list[str]:
    """Return the problems of absorption in a job whose attention is sparse."""
    job = WORLD | {"indexer_topk": 4} | world
    try:
        mindspeed.plan(["mla-split"], {"mla-split": {"absorb": True}}, made_up("cpu", megatron), world=job, level=2)
    except ResolutionError as error:
        return [problem.message for problem in error.problems]
    return []


def test_only_sparse_attention_absorbs_its_up_projection() -> None:
    assert absorbed() == []
    assert absorbed(indexer_topk=0) == ["mla-split: attention is not sparse (DSA), and absorb changes only sparse attention"]


@pytest.mark.parametrize("megatron", ["0.17.1", "0.18.2", "0.19.1", "0.20.0"])
def test_later_releases_of_megatron_are_refused(megatron: str) -> None:
    text = "mla-split: absorb supports the sparse attention of Megatron 0.16, but the version is {}. Megatron 0.17 and 0.18 "
    rest = "recompute their indexer from keys of heads, and later releases absorb the up-projection themselves"
    assert absorbed(megatron) == [text.format(megatron) + rest]


def test_the_weight_in_the_place_of_values_is_not_offloaded() -> None:
    text = "mla-split: Megatron offloads activations of single modules to host memory, which mla-split does not support"
    assert absorbed(fine_grained_offloading=True) == [text]
    assert messages(offload=False, world={"fine_grained_offloading": True}) == []
