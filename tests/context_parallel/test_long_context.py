"""`examples/long_context.py`: the loss does not depend on how many processes share a sequence, nor on the algorithm."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context.py"


def test_without_a_launcher_the_command_is_named(monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == (
        "this example runs in the processes of a launcher: torchrun --nproc-per-node 2 examples/long_context.py"
    )


def losses(nproc: int, attention: str) -> list[str]:
    launcher = [*warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command = [*launcher, str(SCRIPT), "--attention", attention, "--tokens", "240", "--steps", "5"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split()[3] for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "attention"), [(2, "ring"), (4, "ring"), (4, "ulysses"), (3, "kv-allgather")])
def test_the_losses_are_those_of_one_process(nproc: int, attention: str) -> None:
    assert losses(nproc, attention) == losses(1, attention)
