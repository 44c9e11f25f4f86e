"""`examples/own_trainer.py`: features in a loop without Megatron, one after the other and together, against the plain loop."""

import subprocess
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

SCRIPT = Path(__file__).parents[2] / "examples" / "own_trainer.py"
ALONE = [[name] for name in ("ring", "moe", "chunked-loss", "recompute", "swap", "swap-optimizer", "pipeline")]


def losses(nproc: int, *words: str) -> list[float]:
    launcher = [*warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run([*launcher, str(SCRIPT), *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[3]) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    found = losses(1)
    assert found[-1] < found[0]
    return found


@pytest.mark.budget(6)
def test_all_features_on_one_process_are_the_plain_loop(plain: list[float]) -> None:
    assert losses(1, "--use", "all") == pytest.approx(plain, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("use", [*ALONE, ["all"]], ids="-".join)
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_features_are_the_plain_loop(plain: list[float], nproc: int, use: list[str]) -> None:
    assert losses(nproc, "--use", *use) == pytest.approx(plain, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("use", [[], ["ring", "chunked-loss", "swap-optimizer"]], ids="-".join)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrappers_of_torch_are_the_plain_loop(plain: list[float], wrapper: str, use: list[str]) -> None:
    assert losses(2, "--wrapper", wrapper, "--use", *use) == pytest.approx(plain, rel=1e-6)


def test_the_loop_has_at_most_eighty_lines() -> None:
    code = SCRIPT.read_text("utf-8").partition("def main")[2]
    assert len(code.splitlines()) <= 80
