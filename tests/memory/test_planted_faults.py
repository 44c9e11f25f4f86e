"""``features verify`` fails when something does not leave, and under poison when it is used before it is back."""

from typing import Any

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import RunError
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.pool import WorkerPool
from tests.memory.test_layer_parts import ACTIVATION, ADAPTIVE, HOST, NORM, POISON, REUSE, SWAP
from tests.workbench.verification.test_verification import each_long_but, failing, planted

PARKED, MAIN = "mindspeed.memory.parked:Parked", "mindspeed.memory.windows:MainWeight"
FAULTS = "tests.memory.faults"
KEPT, AT_REST = "bytes of saved activations", "bytes of optimizer between steps"
PARKS = [
    (NORM, f"{PARKED}.park", KEPT),
    (ACTIVATION, f"{PARKED}.park", KEPT),
    (SWAP, f"{PARKED}.park", KEPT),
    (ADAPTIVE, f"{PARKED}.park", KEPT),
    (REUSE, f"{MAIN}.park", AT_REST),
    (HOST, f"{MAIN}.park", AT_REST),
]
WAITS = [
    (NORM, f"{PARKED}.wait", "not_waited_for"),
    (ACTIVATION, f"{PARKED}.wait", "not_waited_for"),
    (SWAP, f"{PARKED}.wait", "not_waited_for"),
    (ADAPTIVE, f"{PARKED}.wait", "not_waited_for"),
    (REUSE, f"{MAIN}.restore", "not_waited_for"),
    (HOST, "mindspeed.features.swap_optimizer.swapped:_Moved.wait", "used_in_flight"),
]


@pytest.mark.parametrize(("name", "target", "blamed"), each_long_but(1, PARKS))
def test_a_park_that_is_removed_is_found_by_its_bytes(pool: WorkerPool, name: str, target: str, blamed: str) -> None:
    case = build_case([name], [Layer("test")], (), 1)
    verdict = verify(planted(case, target, "nothing_leaves", FAULTS), pool)
    assert blamed in failing(verdict)
    assert not any(what.startswith(("loss", "gradient", "weight")) for what in failing(verdict))


@pytest.mark.parametrize(("name", "target", "fault"), each_long_but(1, WAITS))
def test_a_wait_that_is_removed_is_found_under_poison(pool: WorkerPool, name: str, target: str, fault: str) -> None:
    case = build_case([name], [Layer("test", settings=POISON)], (), 1)
    assert found(planted(case, target, fault, FAULTS), pool)


def found(case: Any, pool: WorkerPool) -> bool:
    """Whether the proof says that a case does not hold: by an operator that read what is away, or by NaN."""
    try:
        return not verify(case, pool).holds
    except RunError as error:
        return "MS617" in str(error)
