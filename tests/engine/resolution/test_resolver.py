import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from mindspeed.plugins import (
    After,
    Before,
    Condition,
    Conflicts,
    FeatureArgs,
    Field,
    Fix,
    Numerics,
    Requires,
    RequiresAny,
    RequiresSlot,
)
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from tests.plugins.synthetic import CPU, ask, catalog, codes, make, order


class SizeArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="ranks")


def messages(resolution):
    return [problem.message for problem in resolution.problems]


def test_a_requirement_is_added_and_says_who_asked():
    result = ask(catalog(make("ring", Requires("base", reason="it owns the group")), make("base")), "ring")
    assert order(result) == ["base", "ring"]
    assert tuple(reason.line for reason in result.features[0].why) == (
        "base: required by ring, because it owns the group",
        "ring: requested",
    )


def test_strict_refuses_to_add_a_requirement():
    known = catalog(make("ring", Requires("base", reason="it owns the group")), make("base"))
    (problem,) = ask(known, "ring", strict=True).problems
    assert str(problem) == (
        "MS204 ring requires base, because it owns the group\n"
        "  because: ring: requested\n"
        "  where: acme 1.0, tests/plugins/synthetic.py:24; acme 1.0, tests/plugins/synthetic.py:24\n"
        "  fix: add base to the features, or remove --strict"
    ).replace("tests/plugins/synthetic.py:24", known.usable["ring"].where.removeprefix("acme 1.0, "))
    assert order(ask(known, "ring", "base", strict=True)) == ["base", "ring"]


def test_strict_counts_a_size_as_asking_for_its_owner():
    known = catalog(make("virtual", Requires("pipeline")), make("pipeline", args=SizeArgs, sizes={"pp": "size"}))
    assert order(ask(known, "virtual", strict=True, world={"pp": 2})) == ["pipeline", "virtual"]


def test_an_unknown_feature_suggests_near_names():
    (problem,) = ask(catalog(make("ring-attention"), make("swiglu")), "ring-atention").problems
    assert str(problem) == (
        "MS201 the feature 'ring-atention' does not exist\n  where: command line\n  fix: did you mean ring-attention?"
    )


def test_a_conflict_prints_both_chains_and_the_ways_out():
    known = catalog(make("a", Conflicts("b", reason="both own the loss")), make("b"), make("c", Requires("b")))
    (problem,) = ask(known, "a", "c").problems
    assert problem.code == "MS202"
    assert problem.message == "a conflicts with b, because both own the loss"
    assert problem.chain == ("a: requested", "b: required by c", "c: requested")
    assert problem.fix_text == "remove a or c"


def test_two_holders_of_a_slot_conflict_without_knowing_each_other():
    (problem,) = ask(catalog(make("a", slots={"linear"}), make("b", slots={"linear"})), "a", "b").problems
    assert (problem.code, problem.message) == (
        "MS203",
        "a and b both hold the slot linear, a role that only one feature can have",
    )


def test_a_conflict_may_name_a_slot():
    known = catalog(make("a", slots={"linear"}), make("b", Conflicts("linear")))
    assert messages(ask(known, "a", "b")) == ["a conflicts with b"]


def test_one_of_several_is_never_chosen_for_the_user():
    known = catalog(make("a", RequiresAny("b", "c", reason="it needs a clock")), make("b"), make("c"))
    assert messages(ask(known, "a")) == ["a needs one of b, c, because it needs a clock"]
    assert order(ask(known, "a", "c")) == ["a", "c"]


def test_a_needed_slot_lists_who_can_hold_it():
    known = catalog(make("a", RequiresSlot("linear")), make("b", slots={"linear"}), make("c", slots={"linear"}))
    (problem,) = ask(known, "a").problems
    assert (problem.code, problem.fix_text) == ("MS205", "add b or c to the features")
    assert order(ask(known, "a", "c")) == ["a", "c"]


def test_a_cycle_prints_its_path_and_who_declared_each_edge():
    known = catalog(make("a", After("b")), make("b", After("c")), make("c", After("a")), make("d", After("a")))
    (problem,) = ask(known, "a", "b", "c", "d").problems
    assert problem.code == "MS206"
    assert problem.message == "the declared order of these features contradicts itself: a before c before b before a"
    assert problem.chain == (
        "a comes before c, declared by c",
        "c comes before b, declared by b",
        "b comes before a, declared by a",
    )


def test_before_and_after_decide_the_order():
    known = catalog(make("a", After("z")), make("m"), make("z", Before("m")))
    assert order(ask(known, "a", "m", "z")) == ["z", "a", "m"]


def test_an_order_may_name_a_slot():
    known = catalog(make("a", After("linear")), make("b", slots={"linear"}), make("c", Before("linear"), slots={"other"}))
    assert order(ask(known, "a", "b", "c")) == ["c", "b", "a"]
    assert order(ask(known, "a", "c")) == ["a", "c"]


def test_a_failed_check_is_formatted_and_an_unknown_value_is_a_row():
    check = Condition(
        lambda a, w: w.num_layers % a.size == 0,
        "{world.num_layers} layers do not divide by {args.size}",
        (Fix.give_field("pp", 1),),
    )
    known = catalog(make("a", check, args=SizeArgs))
    settings = {"a": {"size": 3}}
    (problem,) = ask(known, "a", settings=settings, world={"num_layers": 4}).problems
    assert (problem.code, problem.message, problem.fix_text) == ("MS304", "a: 4 layers do not divide by 3", "--pp 1")
    assert order(ask(known, "a", settings=settings, world={"num_layers": 6})) == ["a"]
    (row,) = ask(known, "a", settings=settings).rows
    assert (row.kind, row.line()) == ("not-checked", "'? layers do not divide by 3' depends on num_layers; give --num-layers")
    assert codes(ask(known, "a", settings=settings, strict=True).problems) == ["MS307"]


def test_a_check_of_another_feature_holds_where_that_one_is_active():
    check = Condition(
        lambda a, w, other: other.size % 2 == 0,
        "size {other.size} is odd for {world.tp}",
        (Fix.give_setting("b.size", 2),),
        of="b",
    )
    known = catalog(make("a", check), make("b", args=SizeArgs))
    assert order(ask(known, "a")) == ["a"]
    assert order(ask(known, "a", "b", settings={"b": {"size": 4}})) == ["a", "b"]
    (problem,) = ask(known, "a", "b", settings={"b": {"size": 3}}).problems
    assert (problem.code, problem.message, problem.fix_text) == ("MS304", "a: size 3 is odd for 1", "--set b.size=2")
    assert problem.features == ("a", "b")


def test_a_check_that_raises_names_its_feature():
    known = catalog(make("a", Condition(lambda a, w: 1 / 0, "never")))
    assert messages(ask(known, "a")) == ["the condition <lambda> of a raised ZeroDivisionError: division by zero"]


def test_a_check_of_a_plugin_that_every_plan_has_may_raise_too():
    platform = make("platform", Condition(lambda a, w: 1 / 0, "never"))
    (problem,) = resolve([], catalog(), CPU, base=(platform,)).problems
    assert problem.message == "the condition <lambda> of platform raised ZeroDivisionError: division by zero"
    assert problem.fix_text == "report it to the authors of mindspeed"


def test_settings_are_checked_all_at_once_with_near_names():
    known = catalog(make("a", args=SizeArgs))
    result = ask(known, "a", "b", settings={"a": {"siz": 2, "size": "two"}})
    assert [str(problem) for problem in result.problems] == [
        ("MS201 the feature 'b' does not exist\n  where: command line\n  fix: did you mean a?")
        if known.near("b")
        else ("MS201 the feature 'b' does not exist\n  where: command line\n  fix: mindspeed features list shows every name"),
        "MS301 a.size is 'two': input should be a valid integer, unable to parse string as an integer\n"
        "  where: command line\n  fix: --set a.size=1 (ranks)",
        "MS301 a has no setting 'siz'\n  where: command line\n  fix: did you mean a.size?",
    ]


@pytest.mark.guards(33)
def test_settings_of_an_inactive_feature_are_a_row():
    result = ask(catalog(make("a", args=SizeArgs), make("b")), "b", settings={"a": {"size": 2}})
    assert [row.text for row in result.rows] == ["settings are given (command line), but the feature is not active"]


def test_both_spellings_of_a_size_are_one_value():
    known = catalog(make("tensor", args=SizeArgs, sizes={"tp": "size"}))
    by_flag = ask(known, world={"tp": 2})
    assert order(by_flag) == ["tensor"]
    assert [reason.line for reason in by_flag.features[0].why] == ["tensor: the tensor-parallel size is 2"]
    assert by_flag.features[0].args == {"size": 2}
    by_setting = ask(known, settings={"tensor": {"size": 2}})
    assert by_setting.world.tp == 2
    assert order(by_setting) == ["tensor"]


def test_one_source_with_two_values_of_a_size_is_a_problem_but_a_later_source_wins():
    known = catalog(make("tensor", args=SizeArgs, sizes={"tp": "size"}))
    assert messages(ask(known, world={"tp": 2}, settings={"tensor": {"size": 4}})) == [
        "command line gives the tensor-parallel size twice: tp = 2 and tensor.size = 4"
    ]
    layers = [Layer("job file", world={"tp": 2}), Layer("command line", settings={"tensor": {"size": 4}})]
    result = resolve(layers, known, CPU)
    size = result.features[0].settings["size"]
    assert (result.world.tp, size.value, size.source, size.overrode) == (4, 4, "command line", ("job file: 2",))


def test_a_size_that_nobody_provides_is_a_problem():
    assert messages(ask(catalog(make("a")), world={"cp": 2})) == [
        "the context-parallel size is 2, but no installed feature provides this parallelism"
    ]


def test_a_size_that_perhaps_a_package_that_was_not_loaded_provides_is_refused_with_the_way_out():
    waiting = DiscoveredFeature("acme-ring", "acme", "1.0", "acme.features:Ring")
    (problem,) = ask(Catalog([waiting]), world={"cp": 2, "world_size": 2}).problems
    assert str(problem) == (
        "MS209 the context-parallel size is 2, but no feature that is built in or named in the request provides this "
        "parallelism\n"
        "  fix: --cp 1, or request the feature of an installed package that provides this parallelism"
    )


def test_the_world_size_must_be_a_multiple_of_the_parallel_sizes():
    known = catalog(make("t", args=SizeArgs, sizes={"tp": "size"}), make("p", args=SizeArgs, sizes={"pp": "size"}))
    (problem,) = ask(known, world={"tp": 2, "pp": 2, "world_size": 6}).problems
    assert str(problem) == (
        "MS302 world size 6 is not a multiple of tp x pp x cp = 2 x 2 x 1 = 4\n  fix: --world-size 8, or --tp 1, or --pp 1"
    )


def test_the_world_size_of_a_running_job_cannot_be_contradicted():
    from dataclasses import replace

    result = ask(catalog(make("a")), "a", world={"world_size": 4}, environment=replace(CPU, world_size=2))
    assert messages(result) == ["command line sets world size 4, but the job of this process has 2 ranks"]


def test_values_of_the_world_are_typed():
    result = ask(catalog(make("a")), "a", world={"tp": 0, "num_layers": "four", "num_layer": 2})
    assert messages(result) == [
        "tp is 0, which is less than 1 (tensor-parallel size)",
        "num_layers (transformer layers, or layers of a hybrid pattern) is 'four', not a whole number",
        "'num_layer' is not a size or model option of a job",
    ]


@pytest.mark.parametrize(("name", "field"), [("tensor_model_parallel_size", "tp"), ("moe_router_topk", "router_topk")])
def test_an_argument_of_megatron_among_sizes_suggests_the_field_that_is_read_from_it(name, field):
    (problem,) = ask(catalog(make("a")), "a", world={name: 2}).problems
    assert problem.fix_text == f"did you mean {field}?"


def test_a_number_of_the_world_may_be_whole_and_is_not_negative():
    resolution = ask(catalog(make("a")), "a", world={"expert_capacity_factor": 2})
    assert (messages(resolution), resolution.world.expert_capacity_factor) == ([], 2.0)
    meaning = "maximum number of tokens of an expert, as a multiple of its balanced share; 0 = unlimited"
    for value, text in (
        (-0.5, f"expert_capacity_factor is -0.5, which is less than 0 ({meaning})"),
        (float("nan"), f"expert_capacity_factor is nan, which is less than 0 ({meaning})"),
        ("1", f"expert_capacity_factor ({meaning}) is '1', not a number"),
    ):
        result = ask(catalog(make("a")), "a", world={"expert_capacity_factor": value})
        assert messages(result) == [text]


def test_taking_out_a_feature_that_is_required_is_a_problem():
    known = catalog(make("ring", Requires("base")), make("base"))
    assert messages(ask(known, "ring", without=("base",))) == ["ring requires base, and command line removes base"]
    assert messages(ask(known, "ring", without=("ring",))) == ["ring is requested (command line) and removed (command line)"]


def test_a_feature_above_the_level_is_a_problem_with_a_fix():
    (problem,) = ask(catalog(make("a", level=2)), "a", level=1).problems
    assert (problem.code, problem.fix_text) == ("MS207", "--optimization-level 2")


def test_level_one_switches_on_what_applies_and_says_what_it_leaves_out():
    known = catalog(
        make("exact", level=1),
        make("rough", level=1, numerics=Numerics.approximate(1e-2, 1e-2, "int8")),
        make("no-variant", level=1, ops=("norm",)),
        make("other-model", Condition(lambda args, world: world.num_experts > 0, "the model is dense"), level=1),
        make("other-device", level=1, platforms={"npu"}),
    )
    layers = [Layer("command line", level=1, world={"num_experts": 0})]
    result = resolve(layers, known, CPU, has_variant=lambda op, platform: False)
    assert order(result) == ["exact"]
    assert {row.feature: row.text for row in result.rows} == {
        "rough": "its results are not bitwise equal: approximate",
        "no-variant": "norm has only a plain-torch reference on cpu",
        "other-model": "the model is dense",
        "other-device": "not for cpu",
    }
    assert order(ask(known, level=0)) == []


def test_level_one_leaves_out_what_an_active_feature_excludes_unless_it_is_wanted():
    known = catalog(
        make("auto", level=1),
        make("own", Conflicts("auto", reason="it has that itself")),
        make("user", Requires("auto")),
    )
    result = ask(known, "own")
    assert (order(result), messages(result)) == (["own"], [])
    assert [row.text for row in result.rows if row.feature == "auto"] == ["own conflicts with it, because it has that itself"]
    wanted = "auto conflicts with own, because it has that itself"
    assert messages(ask(known, "own", "auto")) == [wanted]
    assert messages(ask(known, "own", "user")) == [wanted]


@pytest.mark.guards(5)
def test_platform_and_megatron_range_are_checked():
    known = catalog(make("a", platforms={"npu"}), make("b", megatron=">=0.17"))
    assert messages(ask(known, "a", "b")) == [
        "a does not run on cpu, only on npu",
        "b needs megatron-core >=0.17, but the version is 0.16.1",
    ]


def test_an_unsupported_megatron_is_a_problem_of_the_environment():
    (problem,) = ask(catalog(make("a")), "a", environment=made_up("cpu", "0.9.0")).problems
    assert (problem.code, problem.message) == ("MS502", "megatron-core 0.9.0 is not supported; supported is >=0.14,<0.21")


@pytest.mark.guards(15)
def test_a_constraint_on_a_name_nobody_has_is_the_declarers_mistake():
    known = catalog(make("a", Conflicts("nobody")), make("b"))
    assert messages(ask(known, "a", "b")) == ["feature a declares Conflicts on nobody, which no installed feature provides"]
    assert order(ask(known, "b")) == ["b"]


def test_holding_the_slot_of_a_requirement_is_refused_at_registration():
    known = catalog(make("a", Requires("b"), slots={"linear"}), make("b", slots={"linear"}))
    assert messages(ask(known, "a")) == ["feature a requires b, but both hold the slot linear"]


NAMES = [f"f{i}" for i in range(6)]
pairs = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda pair: pair[0] != pair[1])


@st.composite
def systems(draw):
    constraints = {name: [] for name in NAMES}
    for kind in (Requires, After, Conflicts):
        for a, b in draw(st.lists(pairs, max_size=4, unique=True)):
            constraints[a].append(kind(b))
    return constraints


@given(systems(), st.sets(st.sampled_from(NAMES), min_size=1), st.randoms())
@pytest.mark.guards(32)
def test_the_result_does_not_depend_on_the_order_of_the_request(constraints, wanted, random):
    known = catalog(*(make(name, *constraints[name]) for name in NAMES))
    names = sorted(wanted)
    shuffled = random.sample(names, len(names))
    first, second = ask(known, *names), ask(known, *shuffled)
    assert [f.name for f in first.features] == [f.name for f in second.features]
    assert sorted((p.code, p.message) for p in first.problems) == sorted((p.code, p.message) for p in second.problems)


@given(systems(), st.sets(st.sampled_from(NAMES), min_size=1))
def test_the_result_is_the_closure_by_brute_force(constraints, wanted):
    known = catalog(*(make(name, *constraints[name]) for name in NAMES))
    closure, grown = set(wanted), True
    while grown:
        grown = False
        for name, constraint in itertools.product(sorted(closure), (Requires,)):
            for c in constraints[name]:
                if isinstance(c, constraint) and c.name not in closure:
                    closure.add(c.name)
                    grown = True
    clash = any(isinstance(c, Conflicts) and c.name in closure for name in closure for c in constraints[name])
    result = ask(known, *wanted)
    assert ("MS202" in codes(result.problems)) == clash
    if not result.problems:
        names = [f.name for f in result.features]
        assert set(names) == closure
        for name in names:
            for c in constraints[name]:
                if isinstance(c, Requires | After) and c.name in closure:
                    assert names.index(c.name) < names.index(name)


@pytest.mark.parametrize("declarer", ["a", "b"])
def test_conflicts_are_symmetric(declarer):
    other = {"a": "b", "b": "a"}[declarer]
    known = catalog(make(declarer, Conflicts(other)), make(other))
    assert messages(ask(known, "a", "b")) == messages(ask(known, "b", "a")) == ["a conflicts with b"]


def test_a_feature_whose_size_is_one_says_that_it_changes_nothing():
    plan = registry.plan(features=["tensor-parallel"], world={"world_size": 1}, environment=made_up("cpu", "0.16.1"))
    assert ("note", "tensor-parallel", "the tensor-parallel size is 1, so tensor-parallel changes nothing") in [
        (row.kind, row.feature, row.text) for row in plan.rows
    ]
    plan = registry.plan(features=["tensor-parallel"], world={"tp": 2}, environment=made_up("cpu", "0.16.1"))
    assert not [row for row in plan.rows if "changes nothing" in row.text]


@pytest.mark.parametrize("lower", [{"world": {"tp": 2}}, {"settings": {"tensor": {"size": 2}}}])
def test_a_layer_that_leaves_a_feature_out_removes_the_size_that_a_lower_one_gives(lower):
    known = catalog(make("tensor", args=SizeArgs, sizes={"tp": "size"}))
    result = resolve([Layer("job file", **lower), Layer("command line", without=("tensor",))], known, CPU)
    assert order(result) == []
    assert result.world.tp == 1
    assert [(row.kind, row.feature, row.text) for row in result.rows] == [
        ("note", "tensor", "the tensor-parallel size 2 (job file) is ignored, because command line removes tensor")
    ]


def test_a_layer_that_leaves_a_feature_out_and_gives_its_size_contradicts_itself():
    known = catalog(make("tensor", args=SizeArgs, sizes={"tp": "size"}))
    (problem,) = ask(known, without=("tensor",), world={"tp": 2}).problems
    assert (problem.code, problem.fix_text) == ("MS210", "--tp 1, or drop --without tensor")


@pytest.mark.parametrize(("otherwise", "is_left"), [("idle", True), ("refuse", True), ("warn", False)])
@pytest.mark.parametrize("limit", [1, 2])
def test_level_one_leaves_out_what_has_nothing_to_do_beside_another_feature(otherwise, is_left, limit):
    holds = Condition(lambda args, world, other: world.pp >= limit, "one block", otherwise=otherwise, of="other")
    known = catalog(make("merging", holds, level=1), make("other"))
    resolution = ask(known, "other", world={"pp": 1})
    left = [("left-out", "merging", "one block")] if limit > 1 and is_left else []
    assert [(row.kind, row.feature, row.text) for row in resolution.rows if row.kind == "left-out"] == left
    assert ("merging" in order(resolution)) is not bool(left)
    assert "merging" in order(ask(known, world={"pp": 1}))


def test_level_one_makes_way_for_a_requested_feature_with_what_it_brought_along():
    grouped = make("grouped", Conflicts("recomputed", reason="experts compute their activation themselves"), level=1)
    added = make("added", Requires("grouped", reason="it adds their gradients"), level=1)
    resolution = ask(catalog(grouped, added, make("recomputed")), "recomputed")
    assert order(resolution) == ["recomputed"]
    assert [(row.kind, row.feature, row.text) for row in resolution.rows] == [
        ("left-out", "grouped", "it conflicts with recomputed, because experts compute their activation themselves"),
        ("left-out", "added", "grouped, which it requires, is skipped"),
    ]


def test_only_what_is_requested_and_what_it_requires_is_active_without_additions_of_level_one():
    known = catalog(make("auto", level=1), make("needed", level=1), make("wanted", Requires("needed")))
    layers = [Layer("command line", ("wanted",), world={"world_size": 2})]
    assert order(resolve(layers, known, CPU)) == ["auto", "needed", "wanted"]
    only = resolve([*layers, Layer("API", only=True)], known, CPU)
    assert (order(only), only.rows, messages(only)) == (["needed", "wanted"], [], [])
    assert order(resolve([Layer("job file", only=True), *layers, Layer("API", only=False)], known, CPU)) == order(
        resolve(layers, known, CPU)
    )
