"""Conditions that fail by a mistake of their author, and declarations in the former form."""

import pytest

from mindspeed.job.world import World
from mindspeed.plugins import Category, Condition, FeatureArgs, FeatureSpec
from mindspeed.plugins.conditions import ConditionError, failure
from mindspeed.plugins.declared_types import DeclarationError
from tests.plugins.synthetic import ask, catalog, make


def divides_by_zero(args, world):
    return 1 / 0


def returns_a_number(args, world):
    return world.tp


def reads_a_field_that_does_not_exist(args, world):
    return world.tensor_parallel > 1


def holds(args, world):
    return True


WRONG = {
    divides_by_zero: "raised ZeroDivisionError: division by zero",
    returns_a_number: "returned 1, not True or False",
    reads_a_field_that_does_not_exist: "raised AttributeError: the job has no field 'tensor_parallel'",
}


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_faulty_condition_is_a_problem_of_its_package_and_other_features_are_judged(function):
    dense = make("dense", Condition(lambda args, world: False, "the model is dense"))
    known = catalog(make("faulty", Condition(function, "never")), dense)
    problems = {problem.code: problem for problem in ask(known, "faulty", "dense").problems}
    assert problems.keys() == {"MS107", "MS304"}
    assert str(problems["MS107"]) == (
        f"MS107 the condition {function.__name__} of faulty {WRONG[function]}\n"
        "  because: faulty: requested\n"
        f"  where: acme 1.0, tests/plugins/test_conditions.py:{function.__code__.co_firstlineno}\n"
        "  fix: report it to the authors of acme"
    )


@pytest.mark.parametrize("text", ["{args.speed}", "{world.speed}", "{speed}", "{0}"])
def test_a_message_that_cannot_be_filled_is_a_mistake_of_its_author(text):
    with pytest.raises(ConditionError, match=r"^has a message or fix that cannot be formatted: "):
        failure(Condition(lambda args, world: False, text), "a", None, World({}))


def test_a_condition_that_is_given_twice_is_refused():
    condition = Condition(holds, "never")
    with pytest.raises(DeclarationError, match=r"^FeatureSpec\.constraints contains the condition holds twice$"):
        FeatureSpec("a", Category.TOOL, constraints=(condition, condition))


def test_a_product_that_divides_no_field_has_a_usual_fix():
    class Args(FeatureArgs):
        parts: int = 3

    split = Condition.divides("seq_length", (2, "cp", "args.parts"), "{world.seq_length} tokens cannot be split")
    (problem,) = ask(catalog(make("parts", split, args=Args)), "parts", world={"seq_length": 64}).problems
    assert problem.fix_text == "--seq-length 66 (a multiple of 2 x 1 x 3), or remove parts"


def test_a_declaration_has_at_most_eighteen_fields():
    assert len(FeatureSpec.__dataclass_fields__) <= 18
