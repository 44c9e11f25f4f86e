"""Communicators of a pipeline: few of them, and no schedule hangs by the rules of NCCL and HCCL."""

from typing import Any

import pytest

from mindspeed.pipeline.messages import channels, independent
from mindspeed.pipeline.operations import Placement
from mindspeed.platforms.backend_rules import NAMES
from tests.conftest import Prove

V = {"zero-bubble": {"placement": "v"}}
SEARCHED: dict[str, Any] = {"costs": [10, 20, 7, 10], "hop": 1}
LISTED = {"zero-bubble": SEARCHED}
LISTED_V = {"zero-bubble": {"placement": "v"} | SEARCHED}
MEASURED = {"zero-bubble": {"costs": "measured"}}


@pytest.mark.parametrize(
    ("pp", "vpp", "placement", "number"),
    [
        (2, 1, "loop", 2),
        (2, 2, "v", 2),
        (3, 1, "loop", 4),
        (4, 1, "loop", 4),
        (4, 2, "loop", 4),
        (4, 2, "v", 4),
        (5, 2, "loop", 6),
    ],
)
def test_a_rank_has_one_channel_of_each_of_few_communicators(pp: int, vpp: int, placement: Placement, number: int) -> None:
    sets = independent(channels(pp, vpp, placement))
    assert sorted(channel for chosen in sets for channel in chosen) == channels(pp, vpp, placement)
    for chosen in sets:
        ranks = [rank for channel in chosen for rank in channel]
        assert len(ranks) == len(set(ranks))
    assert len(sets) == number


def test_stages_in_a_ring_and_in_a_v_have_the_channels_that_they_need() -> None:
    assert channels(3, 1, "loop") == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert channels(3, 2, "loop") == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert channels(3, 2, "v") == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 1)]
    assert channels(2, 2, "v") == [(0, 1), (1, 0)]


def held(prove: Prove, rules: str, feature: str, pp: int, vpp: int, settings: dict[str, Any] | None = None, *also: str) -> None:
    given = {**(settings or {}), "device-emulation": {"backend": rules}}
    sizes = {"pp": pp, "vpp": vpp, **({"num_layers": 8} if vpp > 1 else {})}
    assert prove(feature, also=also, settings=given, world=sizes, steps=2).problems == []


@pytest.mark.budget(6)
@pytest.mark.parametrize("feature", ["nano-pipe", "zero-bubble"])
def test_two_stages_do_not_wait_for_each_others_communicator(prove: Prove, feature: str) -> None:
    held(prove, "nccl-rules", feature, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize("rules", NAMES)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    ("feature", "vpp", "settings", "also"),
    [
        ("nano-pipe", 1, None, ()),
        ("nano-pipe", 2, None, ()),
        ("nano-pipe", 1, None, ("dynamic-shapes",)),
        ("zero-bubble", 1, None, ()),
        ("zero-bubble", 1, MEASURED, ()),
        ("zero-bubble", 2, None, ()),
        ("zero-bubble", 2, V, ()),
        ("zero-bubble", 1, LISTED, ()),
        ("zero-bubble", 2, LISTED, ()),
        ("zero-bubble", 2, LISTED_V, ()),
    ],
    ids=[
        "nano",
        "nano-virtual",
        "nano-dynamic",
        "zero",
        "zero-measured",
        "zero-virtual",
        "zero-v",
        "listed",
        "listed-virtual",
        "listed-v",
    ],
)
def test_no_schedule_hangs(
    prove: Prove, rules: str, pp: int, feature: str, vpp: int, settings: dict[str, Any] | None, also: tuple[str, ...]
) -> None:
    held(prove, rules, feature, pp, vpp, settings, *also)
