"""`benchmarks/gpu.py` where there is no GPU: every row is prepared and checked, small, by the kernels themselves."""

from click.testing import CliRunner

from benchmarks.accelerator import measuring, products, ring, streaming
from benchmarks.gpu import main


def test_every_row_is_right_in_the_interpreter():
    ran = CliRunner().invoke(main, ["--interpret"])
    lines = ran.output.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["right"] * len([*streaming.CASES, *products.CASES, *ring.CASES])
    assert {line.partition(" ")[0] for line in lines} == {*(f"G{row}" for row in range(1, 10)), "G14"}
    assert ran.exit_code == 0


def test_a_row_that_is_wrong_is_named_and_fails(monkeypatch):
    monkeypatch.setitem(measuring.TOLERANCE, streaming.torch.float32, -1.0)
    ran = CliRunner().invoke(main, ["--interpret", "--only", "G4"])
    assert ran.output.startswith("G4 ring update 8192 x 32 x 128 fp32, forward: result 0 is off by ")
    assert ran.exit_code == 1
