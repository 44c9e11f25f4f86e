"""Every call that an NPU operator makes of torch_npu: operator, arguments, shapes, types, and which backward ran."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.npu_contract import coverage, fake_npu, schemas
from tests.npu_contract.case import ANY, Case
from tests.npu_contract.cases import CASES
from tests.npu_contract.recording import BACKWARD, FORWARD, Record

EACH = [
    pytest.param(case, dtype, id=f"{case}-{str(dtype)[6:]}")
    for case in CASES
    for dtype in (*case.types, *([torch.float16] if case.types == ANY else []))
]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict]:
    with fake_npu.corrected_shapes(), fake_npu.groups() as groups:
        yield groups


@pytest.fixture(scope="module")
def records(groups) -> dict[str, Record]:
    """The record of every case, run once in its first type."""
    return {str(case): fake_npu.run(case, case.types[0], groups) for case in CASES}


@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_a_case_calls_what_it_names_with_the_shapes_of_the_schema(case: Case, dtype, groups):
    record = fake_npu.run(case, dtype, groups)
    assert record.operators(FORWARD) == case.forward
    assert record.operators(BACKWARD) == (case.backward or ())
    for schema, given, promised in record.ours:
        assert given == promised, f"{schema}: the kernel gives {given}, its shape kernel {promised}"


def test_the_committed_schemas_are_those_of_the_wheel():
    found = schemas.committed()
    assert schemas.of_wheel(found) == found, "python -m tests.npu_contract FOLDER --write-schemas"


def test_every_operator_on_npu_has_recorded_calls_forward_and_backward(records):
    assert coverage.missing(records) == []


def test_an_operator_without_recorded_calls_is_named(records):
    fewer = {name: record for name, record in records.items() if not name.startswith("swiglu")}
    assert coverage.missing(fewer) == [
        "swiglu: no call of torch_npu is recorded",
        "swiglu: the kernel of swiglu never ran",
        "swiglu: the kernel of swiglu_backward never ran",
    ]


def test_a_differentiable_operator_without_a_recorded_backward_is_named(records):
    forward_only = {name: coverage.without_backward(record) for name, record in records.items()}
    assert "rms_norm: it has a gradient, and no call of torch_npu is recorded in backward" in coverage.missing(forward_only)


def _keywords() -> list[object]:
    found = []
    for file in schemas.files():
        for call in schemas.calls_in(file.read_text(), file.name):
            found += [pytest.param(file, call, name, id=f"{file.stem}-{call.line}-{name}") for name in call.keywords]
    return found


class _Misspell(ast.NodeTransformer):
    def __init__(self, call: schemas.Call, keyword: str) -> None:
        self.call, self.keyword = call, keyword

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if node.lineno == self.call.line and ast.unparse(node.func).startswith("torch.ops.npu."):
            for keyword in node.keywords:
                keyword.arg = f"{keyword.arg}s" if keyword.arg == self.keyword else keyword.arg
        return node


def _kernels_with_a_misspelling(file: Path, call: schemas.Call, keyword: str) -> dict:
    tree = ast.fix_missing_locations(_Misspell(call, keyword).visit(ast.parse(file.read_text())))
    names: dict = {"__name__": "planted"}
    exec(compile(tree, str(file), "exec"), names)
    return names["KERNELS"]


@pytest.mark.parametrize(("file", "call", "keyword"), _keywords())
def test_a_misspelt_argument_fails_a_case(file: Path, call: schemas.Call, keyword: str, groups, records):
    kernels = _kernels_with_a_misspelling(file, call, keyword)
    refusals = []
    for case in CASES:
        record = records[str(case)]
        if not (record.schemas() & set(kernels) and call.operator in record.operators(FORWARD) + record.operators(BACKWARD)):
            continue
        try:
            fake_npu.run(case, case.types[-1], groups, kernels)
        except RuntimeError as error:
            refusals.append(str(error))
            break
    assert len(refusals) == 1, f"no case of {file.stem} reaches line {call.line}"
    assert f"Unknown keyword argument '{keyword}s'" in refusals[0]


def test_the_group_of_a_fused_product_goes_by_its_hccl_name(groups):
    (case,) = [case for case in CASES if str(case) == "lcal_coc-all-gather"]
    (call,) = fake_npu.run(case, torch.bfloat16, groups).called
    assert call.arguments["hcom"] == f"{groups['TP'].group_name} of rank 0"
    assert call.arguments["world_size"] == 2


def test_kernels_are_those_that_the_dispatcher_finds(records):
    for file in schemas.files():
        for name in import_module(f"mindspeed.ops.npu.{file.stem}").KERNELS:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mindspeed::{name}", "PrivateUse1"), name
