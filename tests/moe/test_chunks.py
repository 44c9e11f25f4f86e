import pytest
import torch
from torch import Tensor

from mindspeed.features.ampipe.layers import pipelined
from mindspeed.moe.transfer import Steps, finished


def logging(name: str, phases: list[str], log: list[str]) -> Steps:
    for phase in phases[:-1]:
        log.append(f"{phase}{name}")
        yield
    log.append(f"{phases[-1]}{name}")
    return torch.tensor(int(name))


def order(chunks: int, relayed: bool = False) -> tuple[list[Tensor], str]:
    log: list[str] = []
    phases = list("AGERC") if relayed else list("AEC")
    results = pipelined([logging(str(number), phases, log) for number in range(chunks)], relayed)
    return results, " ".join(log)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [(2, "A0 A1 E0 E1 C0 C1"), (4, "A0 A1 A2 A3 E0 E1 E2 E3 C0 C1 C2 C3")],
)
def test_attention_of_all_chunks_comes_before_the_first_experts(chunks: int, expected: str):
    results, log = order(chunks)
    assert log == expected
    assert [int(result) for result in results] == list(range(chunks))


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (2, "A0 A1 G0 E0 G1 E1 R0 R1 C0 C1"),
        (4, "A0 A1 G0 A2 G1 A3 G2 E0 G3 E1 R0 E2 R1 E3 R2 R3 C0 C1 C2 C3"),
    ],
)
def test_what_arrived_is_sent_on_behind_the_next_computation(chunks: int, expected: str):
    assert order(chunks, relayed=True)[1] == expected


def test_one_computation_runs_to_its_end():
    log: list[str] = []
    assert int(finished(logging("7", list("ABC"), log))) == 7
    assert log == ["A7", "B7", "C7"]
