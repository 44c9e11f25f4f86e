"""Options that a training script registers are no mistakes of its command."""

from pathlib import Path

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.script_options import script_options
from mindspeed.problems import ResolutionError
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import command_of_words
from mindspeed.workbench.lint.upstream.process import Checkout

SCRIPT = """
import nowhere
from megatron.post_training.arguments import add_arguments
from more import options

def extra(parser):
    parser.add_argument("--alpha", "-a", type=float)
    parser.add_argument(name)
"""
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "pretrain_own.py": SCRIPT,
        "megatron/post_training/arguments.py": "def add_arguments(p):\n    p.add_argument('--export-cfg')\n",
        "more/options.py": "parser.add_argument('--beta', action='store_true')\n",
        "broken.py": "def (",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_options_of_a_script_and_of_its_imports_are_read(checkout: Path) -> None:
    found = {"--alpha", "--export-cfg", "--beta"}
    nowhere = Path("command line")
    assert script_options(str(checkout / "pretrain_own.py"), nowhere, None) == found
    assert script_options("/elsewhere/pretrain_own.py", nowhere, checkout) == found
    assert script_options("/elsewhere/pretrain_own.py", checkout / "pretrain.sh", None) == found


def test_a_script_is_read_again_in_another_folder_and_after_a_change(tmp_path: Path, monkeypatch) -> None:
    def registered(folder: Path) -> frozenset[str]:
        monkeypatch.chdir(folder)
        return script_options("pretrain.py", Path("command line"), None)

    other = tmp_path / "other"
    other.mkdir()
    assert registered(tmp_path) == frozenset()
    (tmp_path / "pretrain.py").write_text("parser.add_argument('--first')\n")
    (other / "pretrain.py").write_text("parser.add_argument('--second')\n")
    assert [registered(tmp_path), registered(other)] == [{"--first"}, {"--second"}]
    (other / "pretrain.py").write_text("parser.add_argument('--third-of-it')\n")
    assert registered(other) == {"--third-of-it"}


@pytest.mark.parametrize("program", ["nowhere.py", "broken.py"])
def test_a_script_that_cannot_be_read_has_none(checkout: Path, program: str) -> None:
    assert script_options(program, Path("command line"), checkout) == frozenset()


def test_a_command_may_use_the_options_of_its_script(checkout: Path) -> None:
    words = f"torchrun --nproc-per-node 1 pretrain_own.py {MODEL} --alpha 3 --export-cfg x y --beta --gamma 1"
    job = CheckedJob(command_of_words(words.split()), made_up("cuda", "0.16.1"), Checkout(checkout, "0.16.1", "given"))
    ((plan, _),) = check_jobs([job])
    assert isinstance(plan, ResolutionError)
    *_, problem = plan.problems
    assert problem.message == "--gamma is not an option of Megatron-LM 0.16.1 or mindspeed"
