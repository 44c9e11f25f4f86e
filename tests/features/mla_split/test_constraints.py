"""What the feature refuses, with the way out."""

from typing import Any

import pytest

import mindspeed
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
