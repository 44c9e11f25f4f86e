from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, refusals

NAME = "reuse-fp32-param"


def feature() -> Any:
    made = CATALOG.feature(NAME)
    return made(made.Args(), World({}))


def test_bf16_weights_are_accepted() -> None:
    assert refusals(NAME, dtype="bf16") == []


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_weights_are_refused(dtype: str) -> None:
    assert refusals(NAME, dtype=dtype) == [
        f"MS304 {NAME}: weights are {dtype}, and a residual of 16 bits completes bf16 weights alone "
        f"| train in bf16, or remove {NAME}"
    ]


def test_one_part_is_accepted_and_none_is_refused() -> None:
    assert refusals(NAME, settings={NAME: {"parts": 1}}, dtype="bf16") == []
    assert refusals(NAME, settings={NAME: {"parts": 0}}, dtype="bf16") == [
        f"MS301 {NAME}.parts is 0: input should be greater than or equal to 1 "
        f"| --set {NAME}.parts=16  # windows of an optimizer step; only the main weights of one exist at a time"
    ]


def test_a_configuration_with_qk_clipping_is_refused() -> None:
    feature().config_ready(SimpleNamespace(qk_clip=False))
    with pytest.raises(MindSpeedError) as error:
        feature().config_ready(SimpleNamespace(qk_clip=True))
    assert str(error.value) == f"MS304 {NAME}: QK clipping writes main weights between steps\n  fix: remove {NAME}"


def test_an_optimizer_without_bf16_weights_is_refused() -> None:
    config = SimpleNamespace(optimizer="adam", bf16=False)
    with pytest.raises(MindSpeedError) as error:
        feature().optimizer_built(SimpleNamespace(config=config, chained_optimizers=[]))
    assert str(error.value) == (
        f"MS304 {NAME}: a residual of 16 bits completes bf16 weights alone, and the optimizer has bf16=False\n"
        f"  fix: remove {NAME}"
    )
