"""The recorded arguments of Megatron-LM's parser, read without Megatron-LM."""

import pytest

from mindspeed.engine.inspection.cli_arguments import Argument, surface
from mindspeed.engine.inspection.releases import nearest, recorded_releases


def test_every_supported_release_is_recorded() -> None:
    assert recorded_releases("command_line") == ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.20.0")


@pytest.mark.parametrize("version", recorded_releases("command_line"))
def test_every_recorded_release_has_the_arguments_of_the_layouts(version: str) -> None:
    known = surface(version)
    assert known is not None
    assert known.version == version
    assert known.by_option["--tensor-model-parallel-size"] == Argument(
        ("--tensor-model-parallel-size",), "tensor_model_parallel_size", default=1, type="int"
    )
    assert known.by_option["--use-distributed-optimizer"].action == "store_true"
    assert known.by_option["--transformer-impl"].choices is not None
    assert known.by_option["--attention-backend"].choices == ("flash", "fused", "unfused", "local", "auto")
    assert [argument.dest for argument in known.by_dest["swiglu"]] == ["swiglu"]


def test_an_argument_that_takes_a_value_is_told_from_a_switch() -> None:
    known = surface("0.16.1")
    assert known is not None
    assert known.by_option["--num-layers"].takes_value
    assert not known.by_option["--swiglu"].takes_value


def test_a_version_between_recorded_ones_is_read_as_the_nearest_below() -> None:
    found = surface("0.16.2")
    assert found is not None
    assert found.version == "0.16.1"
    assert surface("0.13.0") is None
    assert nearest("not a version", ["0.14.0"]) is None


def test_patch_releases_of_one_minor_release_speak_for_one_another() -> None:
    recorded = ["0.14.0", "0.15.3", "0.16.1"]
    read_as = {version: nearest(version, recorded) for version in ("0.14.2", "0.15.0", "0.15.4", "0.16.0", "0.16.1", "0.17.0")}
    assert read_as == {
        "0.14.2": "0.14.0",
        "0.15.0": "0.15.3",
        "0.15.4": "0.15.3",
        "0.16.0": "0.16.1",
        "0.16.1": "0.16.1",
        "0.17.0": "0.16.1",
    }


def test_no_option_is_recorded_twice() -> None:
    for version in recorded_releases("command_line"):
        known = surface(version)
        assert known is not None
        options = [option for argument in known.arguments for option in argument.options]
        assert len(options) == len(set(options))
