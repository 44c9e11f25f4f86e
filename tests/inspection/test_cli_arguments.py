"""The recorded arguments of Megatron-LM's parser, read without Megatron-LM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.inspection.cli_arguments import FOLDER, Argument, recorded_surfaces, surface
from mindspeed.inspection.nearest_release import nearest

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")


def test_the_three_releases_are_recorded() -> None:
    assert recorded_surfaces() == ("0.14.0", "0.15.3", "0.16.1")


@pytest.mark.parametrize("version", recorded_surfaces())
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
    for version in recorded_surfaces():
        known = surface(version)
        assert known is not None
        options = [option for argument in known.arguments for option in argument.options]
        assert len(options) == len(set(options))


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout to record from")
def test_recording_a_checkout_again_gives_the_committed_file(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from mindspeed.megatron.cli_recording import record; "
        "print(record(*map(Path, sys.argv[1:])))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, CHECKOUT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    written = Path(run.stdout.splitlines()[-1])
    assert written.read_text() == (FOLDER / written.name).read_text()
