"""Contracts are read from text alone, say what callers can notice, and are recorded for every target and release."""

from pathlib import Path

import pytest

from mindspeed.engine.inspection.contract_reading import read_contract, successors
from mindspeed.engine.inspection.contracts import (
    ABSENT,
    CHECKOUT,
    CORE,
    Contract,
    compare,
    contract_for,
    difference,
    part_of,
)
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.plugins.discovery import discover
from mindspeed.registry import megatron_targets
from mindspeed.workbench.pages.drift import guarded
from mindspeed.workbench.pages.reference import REFERENCE


def function(signature: str, body: str = "one") -> Contract:
    return Contract("function", signature, body)


@pytest.mark.parametrize(
    ("new", "verdict", "words"),
    [
        (function("(a, b=1)"), "same", ""),
        (function("(a, b=1)", "other"), "body changed", ""),
        (function("(a, b=1, c=2)"), "appended", "parameters: +c=2"),
        (function("(a, b=1, *, c=2)", "other"), "appended", "parameters: +c=2"),
        (function("(a, b=1, *rest, **more)"), "appended", "parameters: +*rest, +**more"),
        (function("(a, b=1, *, c)"), "changed", "parameters: +c"),
        (function("(a, c=2, b=1)"), "changed", "parameters: +c=2"),
        (function("(b=1, a=0)"), "changed", "parameters: a=0 (was a)"),
        (function("(a, b=2)"), "changed", "parameters: b=2 (was b=1)"),
        (function("(a)"), "changed", "parameters: -b"),
        (function("(a, /, b=1)"), "changed", "parameters: in another order"),
        (Contract("class", "(a, b=1)", "one"), "changed", "kind: class (was function)"),
        (Contract(ABSENT), "gone", ""),
    ],
)
def test_the_verdict_says_what_a_caller_can_notice(new: Contract, verdict: str, words: str) -> None:
    old = function("(a, b=1)")
    assert compare(old, new) == verdict
    assert difference(old, new) == words


def test_parameters_cannot_be_appended_where_the_rest_is_taken_already() -> None:
    assert compare(function("(a, *rest)"), function("(a, b=1, *rest)")) == "changed"
    assert compare(function("(a, **more)"), function("(a)")) == "changed"
    assert compare(function("(*, a=1)"), function("(*, b=2, a=1)")) == "appended"


@pytest.mark.parametrize(
    ("signature", "verdict"),
    [
        ("(a, c=2, b=1)", "appended"),
        ("(c=2, a=0, b=1)", "changed"),
        ("(a, c, b=1)", "changed"),
        ("(b=1, a)", "changed"),
        ("(a, c=2)", "changed"),
        ("(a, c=2, b=2)", "changed"),
        ("(a, b=1, **more)", "changed"),
        ("(a, b=1, *, c=2)", "appended"),
    ],
)
def test_an_optional_parameter_may_stand_anywhere_for_a_wrapper_that_finds_its_own_by_name(
    signature: str, verdict: str
) -> None:
    assert compare(function("(a, b=1)"), function(signature), by_name=True) == verdict


def test_a_target_that_was_absent_is_new() -> None:
    assert compare(Contract(ABSENT), function("()")) == "new"
    assert compare(Contract(ABSENT), Contract(ABSENT)) == "same"


MODULE = '''
from megatron.core.jit import jit_fuser
from megatron.core.base import Base

FAST = True


def plain(a: int, /, b: "str" = 1, *rest, c, d=None, **more) -> int:
    """Text."""
    return a + b


@jit_fuser
def decorated(a):
    return a


if FAST:
    def either(a):
        return a
else:
    def either(b):
        return b


class Derived(Base):
    @staticmethod
    def build(a):
        return a

    @property
    def size(self):
        return 1
'''
BASE = '''
class Base:
    """Text."""

    def __init__(self, config, *, name="x"):
        self.config = config

    def forward(self, x):
        return x
'''


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``megatron.core`` of two modules, first on the path."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").touch()
    for name, text in (("__init__", ""), ("jit", "def jit_fuser(f):\n    return f\n"), ("module", MODULE), ("base", BASE)):
        (core / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return core


def contract(name: str) -> Contract:
    return read_contract(f"megatron.core.module:{name}")


def test_a_contract_holds_parameters_without_annotations(tree: Path) -> None:
    assert contract("plain").signature == "(a, /, b=1, *rest, c, d=None, **more)"
    assert contract("Derived").signature == "(self, config, *, name='x')"
    assert contract("Derived.forward") == Contract("method", "(self, x)", read_contract("megatron.core.base:Base.forward").body)


def test_a_contract_tells_kinds_apart(tree: Path) -> None:
    names = ("plain", "Derived", "Derived.build", "Derived.size", "Derived.forward", "FAST", "either", "missing")
    assert [contract(name).kind for name in names] == [
        "function",
        "class",
        "staticmethod",
        "property",
        "method",
        "assignment",
        "branches",
        "absent",
    ]
    assert contract("either").signature == "(a) or (b)"


def test_a_contract_under_another_name_says_where_it_is(tree: Path) -> None:
    assert contract("Base").site == "megatron.core.base:Base"


def test_layout_comments_docstrings_and_annotations_are_not_part_of_a_body(tree: Path) -> None:
    before = contract("plain")
    file = tree / "module.py"
    file.write_text(file.read_text().replace('"""Text."""', '"""Other."""  # new').replace("a + b", "(a +\n        b)"))
    assert contract("plain") == before
    file.write_text(file.read_text().replace("(a +", "(a -"))
    assert compare(before, contract("plain")) == "body changed"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("decorated", "@jit_fuser\n", ""),
        ("either", "return b", "return -b"),
        ("Derived", "return 1", "return 2"),
        ("Derived", "def build(a)", "def build(b)"),
        ("FAST", "True", "False"),
    ],
)
def test_what_changes_behaviour_changes_the_body(tree: Path, name: str, old: str, new: str) -> None:
    before = contract(name)
    file = tree / "module.py"
    file.write_text(file.read_text().replace(old, new))
    assert contract(name).body != before.body


def test_a_body_has_the_same_hash_in_every_python_version(tree: Path) -> None:
    (tree / "module.py").write_text("def f(x, y=(1, 2)):\n    return f'{x!r:>{y}}' if x else {**y, 'a': ...}\n")
    assert contract("f") == Contract("function", "(x, y=(1, 2))", "666fefe6c9a3a395")


def test_a_renamed_definition_is_found_by_its_body_then_by_its_parameters(tree: Path) -> None:
    old = {name: contract(name) for name in ("plain", "decorated", "Derived.build")}
    file = tree / "module.py"
    text = file.read_text().replace("def plain", "def ordinary").replace("class Derived", "class Inherited")
    file.write_text(text)
    assert successors("megatron.core.module:plain", old["plain"]) == ["megatron.core.module:ordinary"]
    assert successors("megatron.core.module:Derived.build", old["Derived.build"]) == ["megatron.core.module:Inherited.build"]
    file.write_text(text.replace("return a + b", "return a * b"))
    assert successors("megatron.core.module:plain", old["plain"]) == ["megatron.core.module:ordinary"]


def test_targets_outside_megatron_have_no_contract() -> None:
    assert part_of("torch.cuda:is_available") is None
    assert part_of("megatron.core.utils:divide") == CORE
    assert part_of("megatron.training.training:train_step") == CHECKOUT
    assert part_of("pretrain_gpt:forward_step") == CHECKOUT


def test_a_version_between_recorded_ones_is_held_to_the_nearest_below() -> None:
    target = "megatron.core.parallel_state:destroy_model_parallel"
    assert contract_for(target, "0.16.2") == contract_for(target, "0.16.1")
    found = contract_for(target, "0.15.9")
    assert found is not None
    assert found[0] == "0.15.3"
    assert contract_for(target, "0.11.0") is None


def test_the_page_of_drift_has_a_row_for_every_target_and_a_column_for_every_release() -> None:
    catalog = discover(only=())
    text = REFERENCE["drift"].text(catalog)
    for target in megatron_targets(catalog):
        assert f"| {target.feature} | `{target.target}` |" in text
    assert f"| feature | target | {' | '.join(recorded_releases())} |" in text


def test_patches_for_some_releases_only_are_listed_and_stay_few() -> None:
    catalog = discover(only=())
    targets = megatron_targets(catalog)
    rows = guarded(catalog, targets)
    assert ("eod-reset", "megatron.training.utils:get_batch_on_this_tp_rank", "<0.18") in rows
    assert not [row for row in rows if row[0] == "ampipe"], "the range of a feature is no guard of a patch"
    assert len(rows) <= 0.21 * len(targets), "another guard is the last resort: can mindspeed/megatron serve both releases?"
    assert f"{len(rows)} of {len(targets)} patches are for some releases only" in REFERENCE["drift"].text(catalog)
