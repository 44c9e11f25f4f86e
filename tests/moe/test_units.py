"""Experts in units: the schedule, and the cut of the table."""

from collections.abc import Iterator

import pytest
import torch

from mindspeed.features.deepspeed_moe.units import Step, Units, schedule

LETTERS = {"dispatch": "d", "gather": "g", "scatter": "s", "return": "r"}


def flat(steps: list[Step]) -> Iterator[Step]:
    """The steps with those between the products of a unit behind its computation."""
    for step in steps:
        yield step
        yield from step.between


def text(steps: list[Step]) -> str:
    """Posts in capitals, waits in small letters, (c0 ...) the products of unit 0 with
    what is done between them, w the place of the weights."""
    words = []
    for step in steps:
        if step.act == "compute":
            between = text(list(step.between))
            words.append(f"(c{step.unit} {between})" if between else f"c{step.unit}")
        elif step.act == "weights":
            words.append("w")
        else:
            letter = LETTERS[step.leg]
            words.append(f"{letter.upper() if step.act == 'post' else letter}{step.unit}")
    return " ".join(words)


@pytest.mark.parametrize(
    ("units", "steps"),
    [
        (1, "D0 w d0 c0 R0 r0"),
        (2, "D0 D1 w d0 c0 R0 d1 c1 R1 r0 r1"),
        (3, "D0 D1 D2 w d0 c0 R0 d1 c1 R1 d2 c2 R2 r0 r1 r2"),
        (4, "D0 D1 D2 D3 w d0 c0 R0 d1 c1 R1 d2 c2 R2 d3 c3 R3 r0 r1 r2 r3"),
    ],
)
def test_units_without_tensor_ranks_return_while_the_next_one_is_computed(units: int, steps: str) -> None:
    assert text(schedule(units)) == steps
    assert text(schedule(units, one_group=True)) == steps


@pytest.mark.parametrize(
    ("units", "steps"),
    [
        (1, "D0 d0 G0 w g0 c0 S0 s0 R0 r0"),
        (2, "D0 d0 G0 D1 w g0 (c0 d1 G1) S0 g1 (c1 s0 R0) S1 r0 s1 R1 r1"),
        (3, "D0 d0 G0 D1 D2 w g0 (c0 d1 G1) S0 g1 (c1 d2 G2 s0 R0) S1 g2 (c2 s1 R1) S2 r0 r1 s2 R2 r2"),
        (
            4,
            "D0 d0 G0 D1 D2 D3 w g0 (c0 d1 G1) S0 g1 (c1 d2 G2 s0 R0) S1 g2 (c2 d3 G3 s1 R1) S2 g3 (c3 s2 R2) S3 "
            "r0 r1 r2 s3 R3 r3",
        ),
    ],
)
def test_units_are_gathered_and_scattered_under_their_neighbours(units: int, steps: str) -> None:
    assert text(schedule(units, gathers=True)) == steps


@pytest.mark.parametrize(
    ("units", "steps"),
    [
        (1, "D0 d0 G0 w g0 c0 S0 s0 R0 r0"),
        (2, "D0 d0 G0 w g0 D1 (c0 d1 G1) g1 S0 (c1 s0 R0) r0 S1 s1 R1 r1"),
        (3, "D0 d0 G0 w g0 D1 D2 (c0 d1 d2 G1) g1 G2 S0 (c1 g2 s0 R0) r0 S1 (c2 s1 R1) r1 S2 s2 R2 r2"),
        (
            4,
            "D0 d0 G0 w g0 D1 D2 (c0 d1 d2 G1) g1 G2 S0 (c1 g2 s0 D3 R0) d3 r0 G3 S1 (c2 g3 s1 R1) r1 S2 (c3 s2 R2) r2 "
            "S3 s3 R3 r3",
        ),
    ],
)
def test_streams_lets_one_group_transfer_at_a_time(units: int, steps: str) -> None:
    assert text(schedule(units, gathers=True, one_group=True)) == steps


@pytest.mark.parametrize("units", range(1, 9))
@pytest.mark.parametrize("one_group", [False, True])
def test_a_unit_takes_its_legs_in_order_and_groups_stay_apart_where_asked(units: int, one_group: bool) -> None:
    steps = list(flat(schedule(units, gathers=True, one_group=one_group)))
    journey = ["post dispatch", "wait dispatch", "post gather", "wait gather", "compute ", "post scatter", "wait scatter"]
    for unit in range(units):
        taken = [f"{step.act} {step.leg}" for step in steps if step.unit == unit and step.act != "weights"]
        assert taken == [*journey, "post return", "wait return"]
    flying: list[str] = []
    for step in steps:
        if step.act == "post":
            flying.append(step.leg)
        elif step.act == "wait":
            flying.remove(step.leg)
        assert not one_group or len({leg in ("gather", "scatter") for leg in flying}) <= 1


@pytest.mark.parametrize(("capacity", "parts", "sizes"), [(6, 2, [3, 3]), (5, 2, [3, 2]), (5, 4, [2, 2, 1]), (3, 8, [1, 1, 1])])
def test_a_table_is_cut_into_units_and_joined_again(capacity: int, parts: int, sizes: list[int]) -> None:
    units = Units.of(ranks=2, experts=3, groups=2, capacity=capacity, parts=parts)
    table = torch.arange(2 * 3 * 2 * capacity * 4, dtype=torch.float32).view(-1, 4)
    cut = units.cut(table)
    assert [len(rows) for rows in cut] == [2 * 2 * size for size in sizes] * 3
    assert torch.equal(cut[0][0], table[0])
    assert torch.equal(units.join(cut), table)
