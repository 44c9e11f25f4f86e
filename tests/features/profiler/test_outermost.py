"""The profiler's context of a step is the outermost one, whatever other features are called."""

from mindspeed import plan, registry
from mindspeed.engine.planning.build_plan import manager_of


def test_ranges_that_other_features_begin_around_a_step_are_in_the_trace():
    made = plan(["profiler", "deterministic"], platform="cpu")
    manager = manager_of(made, registry.catalog_for(made.names), registry.base_features("cpu"))
    around = [one.plugin_name for one in reversed(manager.hook.around_train_step.get_hookimpls())]
    assert around[0] == "profiler"
    assert len(around) > 1
