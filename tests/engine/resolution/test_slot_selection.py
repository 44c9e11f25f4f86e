import pytest

from mindspeed.plugins import Condition, Conflicts, Cost, FeatureArgs, Field, Fix, Requires, RequiresSlot
from tests.plugins.synthetic import ask, catalog, make, order


class OwnerArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="ranks")
    method: str | None = Field(None, description="who does it, or auto")


class DegreeArgs(FeatureArgs):
    degree: int | None = Field(None, ge=1, description="neighbours")


NEED = RequiresSlot("attention", reason="somebody must", when=lambda args, world: args.size > 1, setting="method")


def sends(size: int, **settings: int):
    return lambda args, world: Cost((size,), f"{size} bytes", settings)


def by_heads(args: FeatureArgs, world) -> Cost:
    world.need("num_attention_heads", "seq_length")
    return Cost((world.num_attention_heads,), "by heads")


def known(*others, owner=("owner", NEED)):
    return catalog(make(*owner, args=OwnerArgs, sizes={"cp": "size"}), *others)


A = make("a", slots={"attention"}, cost=sends(30))
B = make("b", slots={"attention"}, cost=sends(20))


def rows(result):
    return [row.text for row in result.rows if row.kind == "choice"]


def method(value: str):
    return {"settings": {"owner": {"size": 2, "method": value}}, "world": {"world_size": 2}}


def test_a_setting_makes_the_feature_that_it_names_active_and_says_so():
    result = ask(known(A, B), **method("b"))
    assert order(result) == ["b", "owner"]
    assert tuple(reason.line for reason in result.features[0].why) == (
        "b: owner.method (command line) names it",
        "owner: the context-parallel size is 2",
    )


def test_naming_counts_as_asking_under_strict_but_what_it_requires_does_not():
    assert order(ask(known(A, B), strict=True, **method("b"))) == ["b", "owner"]
    (problem,) = ask(known(make("b", Requires("c"), slots={"attention"}), make("c")), strict=True, **method("b")).problems
    assert (problem.code, problem.message) == ("MS204", "b requires c")


def test_a_name_that_contradicts_a_request_is_a_problem_that_names_both():
    (problem,) = ask(known(A, B), "a", **method("b")).problems
    assert (problem.code, problem.message, problem.fix_text) == (
        "MS342",
        "owner.method (command line) names b, but a is already active in that role",
        "remove a, or --set owner.method=a",
    )
    assert problem.chain == ("owner: the context-parallel size is 2", "a: requested")
    assert order(ask(known(A, B), "a", **method("a"))) == ["a", "owner"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bb", ("MS201 the feature 'bb' does not exist\n  where: owner.method (command line)\n  fix: did you mean b?")),
        (
            "c",
            "MS342 owner.method names c, which is not a feature for attention\n"
            "  because: owner: the context-parallel size is 2\n"
            "  where: acme 1.0, WHERE\n"
            "  fix: --set owner.method=auto (or a, b)",
        ),
    ],
)
def test_a_name_must_be_that_of_a_feature_for_the_slot(value, expected):
    catalogue = known(A, B, make("c"))
    (problem,) = ask(catalogue, **method(value)).problems
    assert str(problem) == expected.replace("acme 1.0, WHERE", catalogue.usable["owner"].where)


def test_what_is_taken_out_cannot_be_named():
    (problem,) = ask(known(A, B), without=("b",), **method("b")).problems
    assert (problem.code, problem.message) == ("MS210", "owner.method names b, but command line removes b")
    (problem,) = ask(known(A, B), disabled=("b",), **method("b")).problems
    assert (problem.code, problem.message) == ("MS211", "owner.method names b, but command line removes b")


def test_nothing_is_named_or_chosen_where_the_slot_is_not_needed():
    for value in ("b", "auto"):
        result = ask(known(A, B), "owner", settings={"owner": {"method": value}})
        assert (order(result), rows(result)) == (["owner"], [])


def test_without_the_setting_it_is_as_ever_and_the_fix_says_that_auto_exists():
    (problem,) = ask(known(A, B), world={"cp": 2, "world_size": 2}).problems
    assert (problem.code, problem.message, problem.fix_text) == (
        "MS205",
        "owner needs a feature for attention, because somebody must",
        "add a or b to the features, or --set owner.method=auto",
    )


def test_auto_takes_the_cheapest_and_shows_reason_and_alternatives():
    result = ask(known(A, B, make("c", slots={"attention"})), **method("auto"))
    assert order(result) == ["b", "owner"]
    assert result.features[0].why[0].line == "b: owner.method is auto (command line), and it costs least: 20 bytes"
    assert rows(result) == [
        "owner.method is auto, so b is chosen, which costs least: 20 bytes",
        "a: 30 bytes",
        "c: cannot, it declares no cost",
    ]


def test_of_equal_costs_the_first_name_is_taken():
    assert order(ask(known(A, make("b", slots={"attention"}, cost=sends(30))), **method("auto")))[0] == "a"


def test_auto_leaves_out_whoever_fails_a_check_or_excludes_another_or_does_not_run_here():
    wrong = Condition(lambda args, world: world.cp > 2, "{world.cp} ranks are too few", (Fix.advise("more"),))
    others = [
        make("checked", wrong, slots={"attention"}, cost=sends(1)),
        make("excluding", Conflicts("other"), slots={"attention"}, cost=sends(1)),
        make("elsewhere", slots={"attention"}, cost=sends(1), platforms={"npu"}),
        make("future", slots={"attention"}, cost=sends(1), megatron=">=9"),
        make("out", slots={"attention"}, cost=sends(1)),
        make("broken", slots={"attention"}, cost=lambda args, world: Cost((1 / 0,), "")),
        make("other", Conflicts("b")),
    ]
    result = ask(known(A, B, *others), "other", without=("out",), **method("auto"))
    assert order(result) == ["a", "other", "owner"]
    assert rows(result) == [
        "owner.method is auto, so a is chosen, which alone can: 30 bytes",
        "b: cannot, it conflicts with other",
        (
            "broken: cannot, its cost could not be computed: ZeroDivisionError: division by zero, raised by the hook 'cost' "
            "of feature broken"
        ),
        "checked: cannot, 2 ranks are too few",
        "elsewhere: cannot, it does not run on cpu",
        "excluding: cannot, it conflicts with other",
        "future: cannot, it needs megatron-core >=9",
        "out: cannot, removed by command line",
    ]


def test_auto_with_nobody_left_says_why_of_each():
    never = Condition(lambda args, world: False, "never")
    (problem,) = ask(known(make("a", never, slots={"attention"}, cost=sends(1))), **method("auto")).problems
    assert (problem.code, problem.message) == ("MS341", "owner.method is auto, but no feature can be chosen: a: never")


def test_auto_is_not_decided_without_the_values_that_decide_it_and_names_all_of_them():
    (problem,) = ask(known(A, make("h", slots={"attention"}, cost=by_heads)), **method("auto")).problems
    assert (problem.code, problem.message, problem.fix_text) == (
        "MS341",
        "owner.method is auto, but the choice needs values that are not set: num_attention_heads, seq_length",
        "--num-attention-heads N --seq-length N, or --set owner.method=a, or --set owner.method=h",
    )


def test_auto_beside_a_request_chooses_nothing_and_still_shows_what_others_cost():
    result = ask(known(A, B), "a", **method("auto"))
    assert order(result) == ["a", "owner"]
    assert rows(result) == ["owner.method is auto, but a is already active, so no other feature is chosen", "b: 20 bytes"]


def test_a_cost_brings_settings_along_which_the_checks_see_and_the_user_wins():
    small = Condition(lambda args, world: args.degree is not None and args.degree <= 4, "degree {args.degree} is not small")
    hybrid = make("hybrid", small, slots={"attention"}, args=DegreeArgs, cost=sends(5, degree=3))
    result = ask(known(A, hybrid), **method("auto"))
    assert rows(result)[0] == "owner.method is auto, so hybrid is chosen, which costs least: 5 bytes, with degree=3"
    degree = result.features[0].settings["degree"]
    assert (degree.value, degree.source) == (3, "owner.method=auto")
    settings = {**method("auto")["settings"], "hybrid": {"degree": 9}}
    result = ask(known(A, hybrid), settings=settings)
    assert rows(result)[1] == "hybrid: cannot, degree 9 is not small"
