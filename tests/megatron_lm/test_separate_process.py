"""What fails in a process before a job reaches the one who started the job."""

import pytest

from mindspeed.megatron_lm.separate_process import call_separately
from mindspeed.problems import Fix, Problem, RunError

PROBLEMS = [
    Problem("MS601", "no text", where="corpus.jsonl", fix=Fix.give_option("--json-keys", "FIELD")),
    Problem("MS603", "no space", fix=Fix.advise("free some")),
]


def refuse(text: str) -> None:
    print(text)
    raise RunError(PROBLEMS)


def fail(text: str) -> None:
    raise ValueError(text)


def problems_of(function, log):
    with pytest.raises(RunError) as caught:
        call_separately(f"{__name__}:{function}", {"text": "heard"}, "reading it", log, "MS601")
    return caught.value.problems


def test_problems_arrive_with_their_fixes_and_the_log(tmp_path):
    log = tmp_path / "log"
    found = problems_of("refuse", log)
    assert [(problem.code, problem.message, problem.where, problem.fix) for problem in found] == [
        (problem.code, problem.message, problem.where, problem.fix) for problem in PROBLEMS
    ]
    assert {problem.chain for problem in found} == {(f"reading it, see {log}",)}
    assert "heard" in log.read_text()
    assert "MS601 no text" in log.read_text()


def test_any_other_error_is_the_last_line_of_the_log(tmp_path):
    (problem,) = problems_of("fail", tmp_path / "log")
    assert problem.message == "reading it failed: ValueError: heard"
