from mindspeed.plugins import World
from tests.features.resolving import CATALOG, ask, refusals
from tests.moe.configurations import config
from tests.moe.refusals import job, refusal

NAME = "moe-shared-experts"


def refused(world=None, **settings):
    return refusals(NAME, world_size=1, **(world or {"num_experts": 4}), settings={NAME: settings})


def test_a_number_or_a_size_is_needed():
    assert refused(count=1) == refused(size=64) == refused(count=2, gate=True) == []
    assert refused() == [
        (f"MS304 {NAME}: neither the number (count) nor the width (size) of shared experts is set | --set {NAME}.count=1")
    ]


def test_a_dense_model_is_refused():
    assert refused(job("num_experts"), count=1) == [refusal(NAME, "num_experts")]


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
        (
            f"MS304 {NAME}: {NAME}.size (or {NAME}.count x moe_ffn_hidden_size, if only count is set) gives shared experts a "
            f"hidden size of 64, but shared_expert_hidden_size is 96 | remove --shared-expert-hidden-size, or remove {NAME}"
        )
    ]
    assert refused({**world, "shared_expert_hidden_size": 96}, size=64) == [
        (
            f"MS304 {NAME}: {NAME}.size (or {NAME}.count x moe_ffn_hidden_size, if only count is set) gives shared experts a "
            f"hidden size of 64, but shared_expert_hidden_size is 96 | remove --shared-expert-hidden-size, or remove {NAME}"
        )
    ]
