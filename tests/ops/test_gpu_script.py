"""The parts of `benchmarks/gpu.py` that need neither a GPU nor Triton."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

from benchmarks import gpu
from benchmarks.accelerator import measuring, products, ring, streaming
from benchmarks.accelerator.measuring import Race, Work, mismatch
from benchmarks.accelerator.operation import Case
from benchmarks.accelerator.products import sizes_of
from benchmarks.gpu import main, rows_of


def work(**changes):
    one = lambda: torch.ones(3)  # noqa: E731
    return Work(**{"ours": one, "formula": one, "peers": {"a": one, "b": one}, "dtype": torch.float32} | changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_exits_with_3(tmp_path):
    ran = CliRunner().invoke(main, [str(tmp_path / "rows.json")])
    assert ran.output == "torch sees no GPU here, so nothing is timed; --interpret checks every row, small, on the CPU\n"
    assert ran.exit_code == 3
    assert not (tmp_path / "rows.json").exists()


def test_rows_are_a_share_of_the_copy_and_ratios_against_peers():
    race = Race({"ours": 2e-3, "a": 3e-3, "b": 2.5e-3}, copy_rate=1e12, drift=0.01)
    rows = rows_of("G1 x", work(moved=1.8e9, share=0.92, targets={"a": 1.6}, peers={"a": None, "b": None, "c": None}), race)
    assert [(row.what, row.target, round(row.measured, 6), row.met) for row in rows] == [
        ("G1 x: share of copy bandwidth", 0.92, 0.9, False),
        ("G1 x: a / ours", 1.6, 1.5, False),
        ("G1 x: best other peer (b) / ours", 1.0, 1.25, True),
    ]
    assert {row.note for row in rows} == {"2.000 ms; not run: c"}


def test_a_race_on_an_unsteady_machine_counts_as_missed():
    race = Race({"ours": 1e-3, "a": 3e-3, "b": 4e-3}, copy_rate=1e12, drift=0.06)
    rows = rows_of("G7 x", work(flops=2e12), race)
    assert [(row.measured, row.met) for row in rows] == [(0.0, False)]
    assert rows[0].note == "1.000 ms, 2000 TFLOP/s; rejected: the control drifted by 6% in each of three runs"


def test_a_wrong_result_is_told_and_a_right_one_is_not():
    assert mismatch(work()) == ""
    assert mismatch(work(ours=lambda: torch.ones(2))) == "shapes [(2,)] instead of [(3,)]"
    off = mismatch(work(ours=lambda: torch.tensor([1.0, 1.0, 1.25])))
    assert off == "result 0 is off by 0.25 of its largest value; 1e-05 is allowed"
    nan = mismatch(work(ours=lambda: torch.tensor([1.0, 1.0, torch.nan])))
    assert nan == "result 0 is off by nan of its largest value; 1e-05 is allowed"


@pytest.mark.parametrize("zipf", [False, True])
def test_experts_share_all_rows(zipf):
    sizes = sizes_of(7, 1000, zipf)
    assert sum(sizes) == 1000
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] > 2 * sizes[2]) == zipf


@pytest.fixture
def pretended(monkeypatch):
    """A GPU in name: three rows, of which one is wrong and one fails, and races that are known."""

    def failing(small):
        raise ValueError("no such kernel\nat all")

    wrong = work(ours=lambda: torch.zeros(3))
    cases = [Case("G1", "right", lambda small: work()), Case("G2", "wrong", lambda small: wrong), Case("G3", "broken", failing)]
    raced = []

    def race(work):
        raced.append(work)
        return Race({"ours": 1e-3, "a": 2e-3, "b": 3e-3}, copy_rate=1e12, drift=0.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(streaming, "CASES", cases)
    monkeypatch.setattr(products, "CASES", [])
    monkeypatch.setattr(ring, "CASES", [])
    monkeypatch.setattr(measuring, "race", race)
    monkeypatch.setattr(gpu, "_machine", lambda: "a GPU")
    return raced


def test_rows_that_are_wrong_are_told_and_not_timed(pretended, tmp_path):
    ran = CliRunner().invoke(main, [str(tmp_path / "rows.json")])
    lines = ran.output.splitlines()
    assert lines[0].startswith("G1 right: ")
    assert lines[1:3] == [
        "G2 wrong: result 0 is off by 1 of its largest value; 1e-05 is allowed",
        "G3 broken: ValueError: no such kernel",
    ]
    assert ran.exit_code == 1
    assert len(pretended) == 1
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["machine"] == "a GPU"
    assert [(row["what"], row["measured"], row["met"]) for row in data["rows"]] == [
        ("G1 right: best other peer (a) / ours", 2.0, True)
    ]


def test_rows_that_are_known_are_left_out_on_request(pretended, tmp_path):
    arguments = [str(tmp_path / "rows.json"), "--only", "G1"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert CliRunner().invoke(main, [*arguments, "--resume"]).exit_code == 0
    assert len(pretended) == 1
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert len(pretended) == 2


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_an_emulated_ring_gives_what_one_process_does(ranks):
    tensors = [torch.randn(ranks * 4, 1, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    dout = torch.randn_like(tensors[0])
    expected = ring._flash(tensors, dout, [SDPBackend.MATH])
    torch.testing.assert_close(ring.emulated(tensors, dout, ranks), expected, rtol=1e-5, atol=1e-5)


def test_the_row_of_the_emulated_ring_is_right_on_a_cpu():
    (case,) = ring.CASES
    assert case.row == "G6"
    assert mismatch(case.prepare(True)) == ""
