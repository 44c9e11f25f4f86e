import pytest

from mindspeed.plugins import World
from tests.features.resolving import CATALOG, ask, overrides, refusals
from tests.moe.configurations import config
from tests.moe.refusals import job, refusal

NAME = "moe-shared-experts"


def refused(world=None, **settings):
    return refusals(NAME, world_size=1, **(world or {"num_experts": 4}), settings={NAME: settings})


def test_a_number_or_a_size_is_needed():
    assert refused(count=1) == refused(size=64) == refused(count=2, gate=True) == []
    assert refused() == [f"MS304 {NAME}: the number of shared experts is not given, nor their size | --set {NAME}.count=1"]


def test_a_number_and_a_size_agree():
    world = {"num_experts": 4, "moe_ffn_hidden_size": 32}
    assert refused(world, count=2, size=64) == refused(world, count=2) == refused(world, size=96) == []
    assert refused(world, count=2, size=96) == [
        f"MS304 {NAME}: count=2 experts of width 32 are not size=96 wide "
        f"| remove the setting {NAME}.count, or remove the setting {NAME}.size"
    ]


@pytest.mark.parametrize("field", ["num_experts", "linear_bias"])
def test_jobs_that_it_does_not_support_are_refused(field):
    assert refused({"num_experts": 4} | job(field), count=1) == [refusal(NAME, field)]


def test_only_alltoalls_hide_shared_experts():
    allgather = {"num_experts": 4, "dispatcher": "allgather"}
    assert refused(allgather, count=1) == refused(allgather | {"dispatcher": "alltoall"}, count=1, overlap=True) == []
    given = {NAME: {"size": 64, "overlap": True}, "expert-parallel": {"dispatcher": "allgather"}}
    by_setting = refusals(NAME, world_size=2, ep=2, num_experts=4, settings=given)
    assert (
        by_setting
        == refused(allgather, count=1, overlap=True)
        == [
            f"MS304 {NAME}: overlap hides shared experts under all-to-alls, and Megatron's dispatcher is allgather "
            f"| --set expert-parallel.dispatcher=alltoall, or --set {NAME}.overlap=false"
        ]
    )


def test_a_size_reaches_megatron():
    assert overrides(NAME, size=64, overlap=True) == {
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_overlap": True,
    }
    assert overrides(NAME, count=2) == {}  # the width of a routed expert is not known


def test_a_count_reaches_megatron_as_a_size_where_the_width_of_a_routed_expert_is_known():
    cls = CATALOG.feature(NAME)
    (override,) = cls(cls.Args(count=2), World({"moe_ffn_hidden_size": 32})).megatron_args()
    assert (override.argument, override.value) == ("moe_shared_expert_intermediate_size", 64)


def ready(given, **settings):
    cls = CATALOG.feature(NAME)
    configuration = config(moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=given, moe_shared_expert_gate=False)
    cls(cls.Args(**settings), World({})).config_ready(configuration)
    return configuration


def test_a_count_is_a_size_and_the_old_switch_a_gate():
    configuration = ready(None, count=2, gate=True)
    assert (configuration.moe_shared_expert_intermediate_size, configuration.moe_shared_expert_gate) == (64, True)
    assert ready(64, count=2).moe_shared_expert_gate is False


def test_a_count_is_a_width_that_the_planner_knows():
    world = {"num_experts": 4, "moe_ffn_hidden_size": 32}
    for settings, given in [({"count": 2}, None), ({"size": 64}, None), ({"count": 2}, 0), ({"count": 2}, 64)]:
        known = world if given is None else {**world, "shared_expert_hidden_size": given}
        resolution = ask(NAME, world_size=1, settings={NAME: settings}, **known)
        assert (resolution.problems, resolution.world.shared_expert_hidden_size) == ([], 64)
    overlapped = ask(NAME, world_size=1, settings={NAME: {"size": 64, "overlap": True}}, **world)
    assert (overlapped.problems, overlapped.world.shared_expert_overlap) == ([], True)
    assert refused({**world, "shared_expert_hidden_size": 96}, count=2) == [
        f"MS304 {NAME}: shared experts are 64 wide by the settings, and shared_expert_hidden_size is 96 "
        f"| remove --shared-expert-hidden-size, or remove {NAME}"
    ]
    assert refused({**world, "shared_expert_hidden_size": 96}, size=64) == [
        f"MS304 {NAME}: shared experts are 64 wide by the settings, and shared_expert_hidden_size is 96 "
        f"| remove --shared-expert-hidden-size, or remove {NAME}"
    ]
