"""Every call of torch_npu that is written down, held to the committed schemas; needs neither torch_npu nor a compiler."""

import ast

from tests.npu_contract import schemas
from tests.npu_contract.schemas import KERNELS


def test_every_call_names_an_operator_and_arguments_of_torch_npu():
    known = schemas.committed()
    found = schemas.calls()
    assert [complaint for call in found for complaint in schemas.complaints(call, known)] == []
    assert {call.operator for call in found} == set(known)


def test_every_file_with_kernels_calls_torch_npu_or_one_that_does():
    own = {call.file for call in schemas.calls()}
    others = {file.name for file in schemas.files()} - own
    sharing = {"npu_all_to_all_all_gather_bmm.py", "npu_bmm_reduce_scatter_all_to_all.py", "npu_mm_all_reduce_add_rms_norm_.py"}
    assert others == sharing


def test_a_wrong_call_is_told_in_one_sentence_each():
    known = {"npu_swiglu": "npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor"}

    def complaints(text: str) -> list[str]:
        return [sentence for call in schemas.calls_in(text, "swiglu.py") for sentence in schemas.complaints(call, known)]

    assert complaints("torch.ops.npu.npu_swiglu(x, dim=0)") == []
    assert complaints("torch.ops.npu.npu_swiglu(x, dims=0)") == ["swiglu.py:1: npu_swiglu has no argument dims"]
    assert complaints("torch.ops.npu.npu_swiglu(dim=0)") == ["swiglu.py:1: npu_swiglu lacks input"]
    assert complaints("torch.ops.npu.npu_swiglu(x, 0, 1)") == ["swiglu.py:1: npu_swiglu takes 2 arguments by place, not 3"]
    assert complaints("torch.ops.npu.npu_swiglu(x, **more)") == ["swiglu.py:1: npu_swiglu has no argument **"]
    assert complaints("torch.ops.npu.npu_silu(x)") == ["swiglu.py:1: npu_silu is not an operator of the committed schemas"]


def test_no_operator_imports_torch_npu():
    for file in KERNELS.parent.rglob("*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not any("torch_npu" in ast.unparse(node) for node in imports), file
