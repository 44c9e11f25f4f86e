"""An error of ours that a module raises while Megatron builds it reaches the user as it was raised."""

import pickle
from typing import Any

import pytest
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from mindspeed.problems import Fix, MindSpeedError, PlatformError, Problem

PROBLEM = Problem("MS304", "some-feature: the layer cannot be built", ("some-feature",), fix=Fix.remove_feature("some-feature"))


class Inner:
    def __init__(self, error: type[MindSpeedError]) -> None:
        raise error([PROBLEM])


class Outer:
    def __init__(self, inner: Any, error: type[MindSpeedError]) -> None:
        build_module(inner, error=error)


@pytest.mark.parametrize("error", [MindSpeedError, PlatformError])
def test_code_and_fix_survive_two_modules_around_the_error(error: type[MindSpeedError]) -> None:
    with pytest.raises(error) as raised:
        build_module(ModuleSpec(Outer), inner=ModuleSpec(Inner), error=error)
    assert raised.value.problems == (PROBLEM,)
    assert str(raised.value) == "MS304 some-feature: the layer cannot be built\n  fix: remove some-feature"
    assert pickle.loads(pickle.dumps(raised.value)).problems == (PROBLEM,)
