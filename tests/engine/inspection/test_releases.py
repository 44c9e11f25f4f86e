"""Every recorded release has what plans and drift need, and recording a source again gives the committed file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from mindspeed.engine.inspection.contracts import BASELINE, CORE, part_of, recorded_contracts
from mindspeed.engine.inspection.releases import recorded_releases, recorded_section, release_file
from mindspeed.engine.planning.drift import Tree, installed_tree, source_tree
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, version_in
from mindspeed.megatron.release_recording import record_release
from mindspeed.plugins.discovery import discover
from mindspeed.registry import megatron_targets

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
AGAIN = "run: mindspeed patches record"


def test_supported_releases_have_every_section() -> None:
    supported = tuple(version for version in recorded_releases() if version_in(version, SUPPORTED_MEGATRON))
    assert BASELINE in supported
    assert recorded_releases("configuration") == recorded_releases("command_line") == supported


def test_a_version_between_recorded_ones_has_the_section_of_the_nearest_below() -> None:
    assert recorded_section("0.16.2", "configuration") == recorded_section("0.16.1", "configuration")
    assert recorded_section("0.13.0", "configuration") is None


@pytest.mark.guards(10)
def test_every_target_in_megatron_core_is_recorded_in_the_baseline() -> None:
    """Other releases may lack a row, which then reads "not recorded"; every distribution of the baseline can be recorded."""
    recorded = recorded_contracts(BASELINE)
    assert recorded is not None
    wanted = {target.target for target in megatron_targets(discover(only=())) if part_of(target.target) == CORE}
    assert wanted - recorded[1].keys() == set(), f"without a row; {AGAIN}"


@contextmanager
def _checkout() -> Iterator[Tree]:
    with source_tree(Path(CHECKOUT)) as tree:
        yield tree


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(
            installed_tree,
            marks=pytest.mark.skipif(
                metadata.version("megatron-core") != BASELINE, reason=f"the installed megatron-core is not {BASELINE}"
            ),
        ),
        pytest.param(
            _checkout,
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout to record from"),
            ],
        ),
    ],
    ids=["megatron-core", "Megatron-LM"],
)
def test_recording_again_gives_the_committed_file(tree: object, tmp_path: Path) -> None:
    with tree() as source:  # type: ignore[operator]
        written = record_release(source, megatron_targets(discover(only=())), tmp_path)
    assert written.read_text() == release_file(written.stem).read_text(), AGAIN
