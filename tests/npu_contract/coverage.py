"""Which operators on NPU the records leave unproven."""

from importlib import import_module

from tests.npu_contract import schemas
from tests.npu_contract.cases import CASES
from tests.npu_contract.recording import BACKWARD, FORWARD, Record


def missing(records: dict[str, Record]) -> list[str]:
    """A sentence for each operator without a recorded call, forward or, where it has a gradient, backward."""
    found = []
    for operator in (file.stem for file in schemas.files()):
        own = [records[str(case)] for case in CASES if case.operator == operator and str(case) in records]
        if not any(record.operators(FORWARD) for record in own):
            found.append(f"{operator}: no call of torch_npu is recorded")
        if any(record.differentiable for record in own) and not any(record.operators(BACKWARD) for record in own):
            found.append(f"{operator}: it has a gradient, and no call of torch_npu is recorded in backward")
        ran = {schema for record in own for schema in record.schemas()}
        kernels = import_module(f"mindspeed.ops.npu.{operator}").KERNELS
        found += [f"{operator}: the kernel of {name} never ran" for name in kernels if name not in ran]
    return found


def without_backward(record: Record) -> Record:
    """The record as if nothing had been called in backward."""
    kept = [call for call in record.called if call.phase == FORWARD]
    return Record(kept, record.ours, record.differentiable)
