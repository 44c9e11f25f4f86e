"""Variables that the processes must have, and torch's switches."""

import pytest
import torch

from mindspeed.features.deterministic.digests import digest
from mindspeed.features.deterministic.feature import Deterministic
from mindspeed.features.deterministic.torch_settings import TorchSettings, refusals_named
from mindspeed.plugins import MindSpeedError, World
from mindspeed.plugins.answers import answer
from mindspeed.process.variables import unset_variables, variable_problems
from tests.features.resolving import active, overrides

NEEDED = answer(Deterministic, "process_variables", Deterministic.Args(), World({}))
VARIABLES = {name: variable.value for name, variable in NEEDED.items()}


def test_it_sets_megatrons_mode_and_adds_nothing() -> None:
    assert overrides("deterministic") == {"deterministic_mode": True}
    assert "deterministic" in active("deterministic")


def test_a_launcher_gives_the_variables_that_it_does_not_have() -> None:
    environ = {"NCCL_ALGO": "Tree", "PYTHONHASHSEED": "7"}
    given = unset_variables([NEEDED], environ)
    assert given == {name: value for name, value in VARIABLES.items() if name not in environ}
    assert variable_problems({"deterministic": NEEDED}, environ | given) == []


def test_a_process_without_them_is_a_problem_with_the_line_to_export() -> None:
    (problem,) = variable_problems({"deterministic": NEEDED}, VARIABLES | {"NCCL_ALGO": "NVLS", "PYTHONHASHSEED": "random"})
    assert problem.code == "MS517"
    assert problem.message == (
        "deterministic needs environment variables that must be set before the process starts: NCCL_ALGO is 'NVLS', "
        "PYTHONHASHSEED is 'random'"
    )
    assert problem.fix_text == "export NCCL_ALGO=Ring PYTHONHASHSEED=0"


def test_torchs_switches_stand_afterwards_as_before() -> None:
    before = TorchSettings.make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    before.restore()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_refused_operator_is_named() -> None:
    with pytest.raises(MindSpeedError) as caught, refusals_named():
        raise RuntimeError("put_ does not have a deterministic implementation, but you set ...")
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix_text) == ("MS616", "remove deterministic")
    assert problem.message == "the operator put_ has no deterministic implementation on this device"


def test_another_error_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), refusals_named():
        raise RuntimeError("shapes do not fit")


def test_a_digest_sees_every_bit() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    y = x.clone()
    assert digest([x]) == digest([y])
    y.view(torch.int16)[2] += 1
    assert digest([x]) != digest([y])
