"""The bridge on classes and functions of the same form as Megatron's; Megatron itself is only read, not imported."""

import inspect
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mindspeed.engine.inspection.config_arguments import PLACES, known_arguments
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride, plan_from_json
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.effects import EffectTracker
from mindspeed.features.swiglu.feature import Swiglu
from mindspeed.megatron.argument_overrides import check_overrides, override_parameters, unused_overrides
from mindspeed.megatron.hook_wrappers import config_post_init
from mindspeed.plugins import ArgOverride, FeatureArgs, MindSpeedError, World, active
from mindspeed.plugins.manager import FeatureManager


def planned(argument: str, value: Any, *owners: str) -> PlannedOverride:
    return PlannedOverride(owners or ("tensor-parallel",), ArgOverride(argument, value, "a test wants it"))


@pytest.fixture
def activate(monkeypatch):
    """Make a plan with these overrides the active one, without patches."""

    def make(*overrides: PlannedOverride) -> session.Session:
        plan = ActivationPlan(features=(), world=World({}), overrides=overrides)
        manager = FeatureManager([])
        active = session.Session(plan, manager, applied=None, proof=EffectTracker(plan, manager))
        monkeypatch.setattr(session, "_session", active)
        return active

    return make


def config_class(seen: list[dict[str, Any]]) -> type[Any]:
    @dataclass
    class Config:
        size: int = 1
        modules: list[str] | None = None
        names: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            seen.append(vars(self).copy())

    Config.__post_init__ = config_post_init(Config.__post_init__)
    return Config


def test_a_configuration_has_the_plans_value_before_its_own_checks_run(activate):
    seen: list[dict[str, Any]] = []
    activate(planned("size", 4))
    assert config_class(seen)().size == 4
    assert seen == [{"size": 4, "modules": None, "names": []}]


def gelu(x: float) -> float:
    return x


def silu(x: float) -> float:
    return x


def is_large(config: Any) -> bool:
    return bool(config.size > 100)


def only(condition: Any) -> PlannedOverride:
    return PlannedOverride(("swiglu",), ArgOverride("fused", True, "a test", only=condition))


@pytest.mark.parametrize(
    ("condition", "meant", "words"),
    [
        ({"gated": True, "activation": "silu"}, {"silu"}, "activation is silu and gated is True"),
        ({"size": 1000}, {"large"}, "size is 1000"),
        (f"{__name__}:is_large", {"large"}, f"{__name__}:is_large"),
        ({"of_no_configuration": 1}, set(), "of_no_configuration is 1"),
    ],
)
def test_an_override_goes_only_to_configurations_that_it_is_meant_for(activate, condition, meant, words):
    active = activate(only(condition))

    @dataclass
    class Config:
        activation: Any = gelu
        gated: bool = False
        size: int = 1
        fused: bool = False

        def __post_init__(self) -> None:
            pass

    Config.__post_init__ = config_post_init(Config.__post_init__)
    made = {"gelu": Config(), "silu": Config(silu, True), "ungated": Config(silu), "large": Config(size=1000)}
    assert {name for name, config in made.items() if config.fused} == meant
    (planned,) = active.plan.overrides
    assert str(planned.override) == f"fused = True where {words}"
    again = plan_from_json(json.loads(json.dumps(active.plan.to_json())))
    assert again.overrides == active.plan.overrides
    assert again.digest != ActivationPlan(features=(), world=World({}), overrides=(only(None),)).digest


def test_a_condition_that_cannot_be_imported_is_a_problem(activate):
    activate(planned("size", 2), PlannedOverride(("a",), ArgOverride("names", ("x",), "a test", only="nowhere:at_all")))
    with pytest.raises(MindSpeedError) as error:
        config_class([])()
    assert str(error.value) == (
        "MS406 the function nowhere:at_all cannot be imported: No module named 'nowhere'. Without this "
        "condition of a feature, mindspeed cannot decide whether to set Megatron's argument names. The feature's author must "
        "correct the function\n  fix: remove a"
    )


def test_without_a_plan_and_for_other_names_a_configuration_stays_as_it_is(activate):
    config = config_class([])
    assert config(size=3).size == 3
    activate(planned("other", 4))
    assert config(size=3).size == 3


def test_a_tuple_becomes_a_list_and_survives_json(activate):
    active = activate(planned("modules", ("core_attn", "mlp")))
    assert config_class([])().modules == ["core_attn", "mlp"]
    again = plan_from_json(active.plan.to_json())
    assert again == active.plan
    assert (
        plan_from_json(
            {
                **active.plan.to_json(),
                "overrides": [
                    {
                        "owners": ["tensor-parallel"],
                        "optional": False,
                        "argument": "modules",
                        "value": ["core_attn", "mlp"],
                        "reason": "a test wants it",
                        "only": None,
                    }
                ],
            }
        )
        == active.plan
    )


@pytest.mark.guards(18)
def test_a_script_that_wants_something_else_is_told_where(activate):
    activate(planned("size", 2), planned("names", ("a",), "recompute", "other"))
    config = config_class([])
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(MindSpeedError) as error:
        config(size=4, names=["b"])
    assert str(error.value) == (
        "MS605 the script sets size=4, but the plan sets size=2 for tensor-parallel\n"
        f"  where: Config at {__file__}:{line}\n"
        "  fix: remove size from the script, or change the settings of tensor-parallel\n"
        "MS605 the script sets names=['b'], but the plan sets names=('a',) for recompute, other\n"
        f"  where: Config at {__file__}:{line}\n"
        "  fix: remove names from the script, or change the settings of recompute, other"
    )


def test_a_script_that_wants_something_else_than_a_level_one_feature_keeps_its_value_with_a_row(activate, monkeypatch):
    activate(planned("size", 2, "swiglu"))
    feature, rows = Swiglu(FeatureArgs(), World({})), []
    feature.requested = False
    monkeypatch.setattr(
        active,
        "_active",
        active.ActiveFeatures({"swiglu": feature}, lambda problem, log: rows.append(problem), lambda make: nullcontext()),
    )
    assert config_class([])(size=4).size == 4
    assert [f"{row.code} {row.message}" for row in rows] == [
        "MS413 swiglu: the script sets size=4, but 2 is needed; this part of the model is unchanged"
    ]


def test_a_script_may_give_the_default_or_the_plans_value(activate):
    activate(planned("size", 2))
    config = config_class([])
    assert config(size=1).size == config(size=2).size == 2


def test_a_function_gets_the_plans_values_however_it_is_called(activate):
    activate(planned("tensor_size", 2), planned("order", "tp-dp"))

    def initialize(tensor_size: int = 1, pipeline_size: int = 1, *, order: str = "tp-dp-pp") -> tuple[Any, ...]:
        return tensor_size, pipeline_size, order

    wrapped = override_parameters(initialize)
    assert wrapped() == (2, 1, "tp-dp")
    assert wrapped(1, 3) == (2, 3, "tp-dp")
    assert wrapped(pipeline_size=3, tensor_size=2) == (2, 3, "tp-dp")
    assert inspect.signature(wrapped) == inspect.signature(initialize)
    with pytest.raises(MindSpeedError) as error:
        wrapped(8)
    (problem,) = error.value.problems
    assert problem.message == "the script sets tensor_size=8, but the plan sets tensor_size=2 for tensor-parallel"
    assert problem.where.startswith(f"initialize at {__file__}:")


@pytest.mark.guards(18)
def test_what_was_taken_is_recorded_with_what_the_script_had(activate):
    active = activate(planned("size", 2), planned("nowhere", 1, "acme"))
    config = config_class([])
    assert [override.override.argument for override in unused_overrides()] == ["size", "nowhere"]
    config(size=2)
    assert active.proof.taken == {"size": {"Config": 2}}
    config()
    config(size=2)
    assert active.proof.taken == {"size": {"Config": 1}}
    assert [override.owners for override in unused_overrides()] == [("acme",)]


def test_a_script_without_megatron_lms_loop_need_not_take_its_arguments(activate):
    optional = replace(planned("create_attention_mask_in_dataloader", False), optional=True)
    activate(optional, planned("nowhere", 1, "acme"))
    assert [override.override.argument for override in unused_overrides()] == ["nowhere"]


def test_nothing_is_untaken_without_a_plan():
    assert unused_overrides() == ()


def test_an_argument_that_megatron_does_not_have_is_a_problem_with_near_names():
    overrides = [planned("tensor_model_parallel_size", 2), planned("tensor_parallel_size", 2), planned("zzz", 1, "a", "b")]
    assert [str(problem) for problem in check_overrides(overrides, megatron_version())] == [
        f"MS401 tensor_parallel_size, set by tensor-parallel, is not an argument of megatron-core {megatron_version()}\n"
        "  fix: did you mean tensor_model_parallel_size or expert_tensor_parallel_size or context_parallel_size?",
        f"MS401 zzz, set by a and b, is not an argument of megatron-core {megatron_version()}",
    ]


def test_arguments_of_a_megatron_that_nobody_knows_are_not_judged():
    assert check_overrides([planned("zzz", 1)], "0.9.0") == []
    assert check_overrides([planned("zzz", 1)], None) == []


def test_the_names_of_every_place_are_read_from_source():
    names = known_arguments()
    assert set(names) == {place.name for place in PLACES}
    assert {"tensor_model_parallel_size", "recompute_modules", "q_lora_rank"} <= names["TransformerConfig"]
    assert {"overlap_grad_reduce", "bucket_size"} <= names["DistributedDataParallelConfig"]
    assert {"use_distributed_optimizer", "lr"} <= names["OptimizerConfig"]
    assert {"expert_tensor_parallel_size", "order"} <= names["initialize_model_parallel"]
    assert {"model_chunks", "use_gloo_process_groups"} <= names["get_megatron_optimizer"]


def test_without_megatron_there_are_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    assert set(known_arguments().values()) == {frozenset()}
