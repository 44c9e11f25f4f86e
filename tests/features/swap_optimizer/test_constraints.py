from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, active, refusals

NAME, REUSE = "swap-optimizer", "reuse-fp32-param"


def feature() -> Any:
    made = CATALOG.feature(NAME)
    return made(made.Args(), World({}))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weights_of_any_type_are_accepted(dtype: str) -> None:
    assert refusals(NAME, dtype=dtype) == []


def test_residuals_are_made_inside_of_its_windows() -> None:
    assert active(NAME, REUSE, dtype="bf16")[-2:] == [REUSE, NAME]


def test_one_part_is_accepted_and_none_is_refused() -> None:
    assert refusals(NAME, settings={NAME: {"parts": 1}}, dtype="bf16") == []
    assert refusals(NAME, settings={NAME: {"parts": 0}}, dtype="bf16") == [
        f"MS301 {NAME}.parts is 0: input should be greater than or equal to 1 "
        f"| --set {NAME}.parts=16  # windows of an optimizer step; three of them are on the device at most"
    ]


def test_a_configuration_with_qk_clipping_is_refused() -> None:
    feature().config_ready(SimpleNamespace(qk_clip=False))
    with pytest.raises(MindSpeedError) as error:
        feature().config_ready(SimpleNamespace(qk_clip=True))
    assert str(error.value) == f"MS304 {NAME}: QK clipping writes main weights between steps\n  fix: remove {NAME}"


def test_an_optimizer_that_looks_at_whole_matrices_is_refused() -> None:
    config = SimpleNamespace(optimizer="muon", bf16=True)
    with pytest.raises(MindSpeedError) as error:
        feature().optimizer_built(SimpleNamespace(config=config, chained_optimizers=[]))
    assert str(error.value) == f"MS304 {NAME}: the optimizer muon does not update each element by itself\n  fix: remove {NAME}"


def test_an_optimizer_that_is_split_is_accepted() -> None:
    feature().optimizer_built(SimpleNamespace(config=SimpleNamespace(optimizer="adam", bf16=True), chained_optimizers=[]))
