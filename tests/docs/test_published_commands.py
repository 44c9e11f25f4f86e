"""Every training command that MindSpeed and MindSpeed-LLM publish has a plan, or is refused for a reason that is recorded."""

import json
import os
from pathlib import Path

import pytest

from mindspeed.problems import Problem
from tools.published_commands import RECORD, VARIABLES, measured, published, reason_of

NAMED = all(variable in os.environ for variable in VARIABLES.values())


def test_the_record_adds_up_and_pages_are_made_from_it():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    sources = record["checkouts"].values()
    for count in ("commands", "planned"):
        assert record[count] == sum(source[count] for source in sources)
    assert record["planned"] >= 170
    assert sum(alone for _, alone, _ in record["reasons"]) <= record["commands"] - record["planned"]
    assert all(count >= alone for count, alone, _ in record["reasons"])
    assert all(len(source["commit"]) == 40 for source in sources)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem("MS113", "--a, --b belong to MindSpeed-LLM: a model"), "belongs to MindSpeed-LLM: a model"),
        (Problem("MS113", "--a has no equivalent: none"), "no equivalent: none"),
        (Problem("MS304", "tensor-parallel: 25 heads of 2 ranks"), "tensor-parallel: N heads of N ranks"),
        (Problem("MS114", "--lr takes one value, but a b c are given"), "--lr takes one value, but ..."),
        (
            Problem("MS114", "--x is 'secret', which Megatron-LM does not accept"),
            "--x is ..., which Megatron-LM does not accept",
        ),
        (
            Problem("MS304", "a: layers are Transformer Engine's, and 'x' supports only Megatron's"),
            "a: layers are Transformer Engine's, and ... supports only Megatron's",
        ),
    ],
)
def test_a_reason_has_no_words_of_a_script(problem, reason):
    assert reason_of(problem) == reason


def test_commands_that_pretrain_are_found(tmp_path):
    (tmp_path / "a.sh").write_text(
        "torchrun pretrain_gpt.py --micro-batch-size 1\ntorchrun posttrain_gpt.py --micro-batch-size 1\n"
    )
    (command,) = published(tmp_path)
    assert (command.program, command.source) == ("pretrain_gpt.py", "a.sh")


@pytest.mark.long
@pytest.mark.skipif(not NAMED, reason="MINDSPEED_PATH and MINDSPEED_LLM_PATH do not name checkouts")
def test_the_record_is_what_the_checkouts_give():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    commits = {name: source["commit"] for name, source in record["checkouts"].items()}
    now = measured({name: Path(os.environ[variable]) for name, variable in VARIABLES.items()}, commits)
    assert now | {"date": record["date"]} == record
