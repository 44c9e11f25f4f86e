"""Rules of the source tree that import-linter cannot state."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where import-linter brings it
    import tomli as tomllib

from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON
from mindspeed.ops import OPERATORS
from mindspeed.plugins.constraints import Slot

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindspeed"
FEATURES = {file.parent.name.replace("_", "-") for file in (PACKAGE / "features").glob("*/feature.py")}
OTHER_MEANINGS = {value for name, value in vars(Slot).items() if name[0] != "_"} | {*OPERATORS, "profiler", "deepspeed-moe"}
"""Names of features that name a slot, a category, an operator or a module of torch as well, which the framework may use."""
CONTRACTS = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
}


@cache
def sources() -> dict[str, ast.Module]:
    """Every module by name, parsed where a test needs it: collecting tests is work of every process."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(file.read_text("utf-8"))
        for file in sorted(PACKAGE.rglob("*.py"))
    }


def layers_of(contract: str) -> dict[str, int]:
    """The packages of a contract about layers, each with its place; the lowest has 0."""
    rows = enumerate(reversed(CONTRACTS[contract]["layers"]))
    return {package: place for place, row in rows for package in re.findall(r"\w+", row)}


LAYERS, ENGINE = layers_of("the framework is layered"), layers_of("the engine is layered")
WORDS_OF_OTHERS = {
    "mindspeed.plugins.found",  # the entry point group, and the folders of features
    "mindspeed.megatron_lm.training_plan",  # modules that a script for Megatron-LM imports
    "mindspeed.compat.old_modules",
}
"""Modules with words that look like names of modules, and are not imported."""
DOORS = ("mindspeed.nn", "mindspeed.optim", "mindspeed.parallel")
"""Packages with features for trainers without Megatron, whose classes have the names of torch's or of their features."""
TABLES_OF_FEATURES = ("mindspeed.features", "mindspeed.compat", "mindspeed.compat.old_flags", *DOORS)
"""Packages that name features: the features, their doors, and the tables of those that old names and flags stand for."""
CIRCLES_OF_OLD_NAMES = "mindspeed.compat"
"""Package that answers to MindSpeed's old names, whose managers, features and arguments refer to one another."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a module but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


def imports(tree: ast.Module) -> set[str]:
    """Modules of mindspeed that a module imports, also inside functions."""
    found = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & sources().keys() or {node.module}
    return found & sources().keys()


@pytest.mark.budget(6)
def test_modules_do_not_import_one_another_in_a_circle():
    graph = {
        name: {other for other in imports(tree) if not other.startswith(CIRCLES_OF_OLD_NAMES)} - {name}
        for name, tree in sources().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """The string constants of a module that are no docstrings."""
    documentation = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node


def test_the_framework_names_no_feature_in_a_string():
    names = sorted(FEATURES - OTHER_MEANINGS, key=len, reverse=True)
    named = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])")
    prose = re.compile(r"\b(tensor|pipeline|expert|data)-parallel(?= [a-z])")  # "tensor-parallel size" is no name
    found = [
        f"{module}:{text.lineno} names {match}"
        for module, tree in sources().items()
        if not module.startswith(TABLES_OF_FEATURES)
        for text in texts(tree)
        for match in named.findall(prose.sub("", text.value))
    ]
    assert found == []


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for module, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_" and not module.startswith(DOORS):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_no_string_names_a_module_of_a_higher_package():
    """An import by name is an arrow as well, which import-linter does not see."""
    found = [
        f"{module}:{text.lineno} names {text.value}"
        for module, tree in sources().items()
        if module not in WORDS_OF_OTHERS
        for text in texts(tree)
        if (name := re.fullmatch(r"(mindspeed(?:\.\w+)+)\.?(?::[\w.]+)?", text.value)) and height(name[1]) > height(module)
    ]
    assert found == []


def height(name: str) -> tuple[int, int]:
    """The place of a module among the layers of the framework, and of the engine."""
    _, package, inner = f"{name}..".split(".", 2)
    return LAYERS.get(package, -1), ENGINE.get(inner.partition(".")[0], -1) if package == "engine" else -1


def test_the_package_asks_for_every_megatron_that_the_resolver_supports_and_ci_installs_one_of_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (asked,) = [one for one in map(Requirement, project["optional-dependencies"]["train"]) if one.name == "megatron-core"]
    assert (asked.specifier, asked.marker) == (SpecifierSet(SUPPORTED_MEGATRON), None)
    pins = [line.partition("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()]
    (pinned,) = [version for name, _, version in pins if name == "megatron-core"]
    assert (pinned, pinned in asked.specifier) == ("0.16.1", True)


PROSE = frozenset({"message", "why", "fix", "fix_text", "reason", "refusal", "note"})
"""Names of texts that are written for a reader: what a program must know of them is data beside them."""
READS = frozenset({"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "split", "rsplit", "count"})
READS |= {"partition", "rpartition"}
PATTERNS = frozenset({"findall", "finditer", "fullmatch", "match", "search", "sub"})


def is_prose(node: ast.AST) -> bool:
    """Return whether an expression is a text for a reader: ``problem.message``, ``why[0]``, ``str(problem)``."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in PROSE
        case ast.Subscript(value=value):
            return is_prose(value)
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id="problem")]):
            return True
    return False


def readings_of_prose(tree: ast.AST) -> Iterator[int]:
    """Yield the lines on which a module looks into such a text."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=text, attr=name)) if name in READS and is_prose(text):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name), args=args) if name in PATTERNS and any(map(is_prose, args)):
                yield node.lineno
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]) if is_prose(text):
                yield node.lineno


@pytest.mark.parametrize(
    "line",
    [
        'problem.message.startswith("MS")',
        'feature.why[-1].endswith(" asks for it")',
        '"--tp" in problem.message',
        "OPTION.findall(problem.fix_text)",
        're.sub("--tp", "--tensor-model-parallel-size", fix)',
        'str(problem).partition(":")',
        '[note for note in notes if not note.startswith("--x")]',
    ],
)
def test_the_search_for_readers_of_prose_finds_them(line):
    assert list(readings_of_prose(ast.parse(line)))


def test_no_module_decides_by_the_text_of_a_message():
    assert [f"{name}:{line}" for name, tree in sources().items() for line in readings_of_prose(tree)] == []
