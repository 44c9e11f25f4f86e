"""Faults that are planted in a layer are reported with their line, and within two seconds."""

from dataclasses import replace
from inspect import getsourcelines

import pytest

from mindspeed.engine.planning.patch_checks import with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.platforms.backend_rules import BackendRules
from mindspeed.plugins import MindSpeedError
from mindspeed.plugins.patches import Wrap
from mindspeed.workbench.verification.case import VerificationCase, build_case, held_to
from mindspeed.workbench.verification.harness import Verdict, verify
from mindspeed.workbench.verification.pool import WorkerPool
from tests.platforms import planted_communication as planted

LAYER = "megatron.core.transformer.mlp:MLP.forward"
LONG = pytest.mark.long
FAULTS = {
    "two_groups": (planted.order_of_two_groups, "nccl-rules"),
    "receive_ahead": (planted.receive_ahead_of_a_send, "hccl-rules"),
    "creation": (planted.host_block_in_creation, "hccl-rules"),
    "collective_order": (planted.unequal_collective_order, "nccl-rules-eager"),
    "refused": (planted.refused_type, "nccl-rules"),
}


def faulty(fault: str, rules: BackendRules) -> VerificationCase:
    case = build_case(["tensor-parallel"], [held_to(rules)])
    patch = Wrap(LAYER, f"{planted.__name__}:{fault}", "a planted fault")
    patches = with_sites([PlannedPatch("fault", patch, LAYER)])
    plan = replace(case.plan, patches=(*case.plan.patches, *patches))
    return replace(case, plan=plan, recipe=replace(case.recipe, steps=1))


def mentions(text: str, function: object) -> bool:
    """Whether a text has a line of a function of the planted faults."""
    source, first = getsourcelines(function)  # type: ignore[arg-type]
    return any(f"{planted.__file__}:{number} in" in text for number in range(first, first + len(source)))


@pytest.mark.budget(6)
@pytest.mark.parametrize("fault", [pytest.param(name, marks=[] if name == "two_groups" else [LONG]) for name in FAULTS])
def test_a_fault_in_a_layer_is_reported_with_its_line(pool: WorkerPool, fault: str) -> None:
    function, rules = FAULTS[fault]
    with pytest.raises(MindSpeedError) as raised:
        verify(faulty(fault, rules), pool)
    (problem,) = raised.value.problems
    assert problem.code == ("MS520" if fault == "refused" else "MS619")
    assert mentions(str(problem), function)


@pytest.mark.budget(6)
def test_a_host_read_in_a_layer_is_counted_with_its_line(pool: WorkerPool) -> None:
    verdict: Verdict = verify(faulty("read", "nccl-rules"), pool)
    found = [count for line, count in verdict.proof.host_reads.items() if mentions(line, planted.host_read)]
    assert len(found) == 1
    assert found[0] > 0
