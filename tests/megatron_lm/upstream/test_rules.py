"""Megatron's own rules are executed without torch, and everything that they refuse is collected."""

from pathlib import Path

import pytest

from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.workbench.lint.upstream import process, rules
from mindspeed.workbench.lint.upstream.process import find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, RulesVerdict, judge
from tests.megatron_lm.upstream.checkouts import ARGUMENTS, MISSING, make

KNOWN = surface_or_nearest("0.16.1")


def verdict(folder: Path, words: str, arch: str | None = None) -> RulesVerdict:
    return verdicts(folder, words, arch=arch)[0]


def verdicts(folder: Path, *commands: str, arch: str | None = None) -> list[RulesVerdict]:
    checkout = find_checkout(str(folder / "pretrain_gpt.py"), {})
    assert checkout is not None
    return judge(checkout, [Command(words.split(), 1) for words in commands], KNOWN, arch)


def told(folder: Path, words: str, arch: str | None = None) -> list[tuple[str, str, str]]:
    found = verdict(folder, words, arch).problems
    return [(p.message.removeprefix("Megatron-LM 0.16.1 refuses this command: "), p.where, p.fix_text) for p in found]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("megatron"))


def line(text: str) -> int:
    return next(number for number, one in enumerate(ARGUMENTS.splitlines(), 1) if text in one)


@pytest.mark.budget(20)
def test_rules_that_read_an_unknown_value_are_undecided_and_the_rest_is_told(checkout: Path) -> None:
    found = find_checkout(str(checkout / "pretrain_gpt.py"), {})
    assert found is not None
    command = Command(["--bf16", "--fp16", "--hidden-size", "8"], 1, unknown={"num_layers"})
    (verdict,) = judge(found, [command], KNOWN)
    assert [problem.message.partition(": ")[2] for problem in verdict.problems] == ["not args.fp16"]
    assert f"megatron/training/arguments.py:{line('too many')}" in verdict.undecided


@pytest.mark.budget(20)
def test_every_rule_that_fails_is_told_with_its_place_and_values(checkout: Path) -> None:
    words = "--hidden-size 7 --tensor-model-parallel-size 2 --bf16 --fp16 --num-layers 101 --deterministic-mode"
    here = "megatron/training/arguments.py"
    assert told(checkout, words) == [
        ("hidden does not divide", f"{here}:{line('hidden does not')}", "--hidden-size N (a multiple of 2)"),
        ("not args.fp16", f"{here}:{line('assert not args.fp16')}", "remove --fp16"),
        ("101 layers are too many", f"{here}:{line('too many')}", "--num-layers N (at most 100)"),
        ("deep ones have no biases", f"{here}:{line('deep ones')}", "--num-layers N (less than 50), or --disable-bias-linear"),
        ("not deterministic", f"{here}:{line('not deterministic')}", "remove --deterministic-mode"),
    ]
    first, *_, biases, _ = verdict(checkout, words).problems
    assert first.code == "MS115"
    assert first.chain == (
        "its rule is args.hidden_size % args.tensor_model_parallel_size == 0",
        "--hidden-size is 7 (command line), --tensor-model-parallel-size is 2 (command line)",
    )
    assert biases.chain[1] == "--num-layers is 101 (command line), add_bias_linear is True (default)"


def test_rules_that_the_same_changes_mend_are_one_problem(tmp_path: Path) -> None:
    both = "        assert not (args.bf16 and args.fp16), 'both'\n"
    folder = make(tmp_path, ARGUMENTS.replace("    if args.bf16:\n", f"    if args.bf16:\n{both}"))
    (problem,) = verdict(folder, "--bf16 --fp16").problems
    assert (problem.message.rpartition(": ")[2], problem.fix_text) == ("both", "remove --bf16 or --fp16")
    assert problem.chain[-1].startswith("also refused at megatron/training/arguments.py:")


def test_a_value_that_two_options_give_is_missing_once_and_the_first_one_gives_it(tmp_path: Path) -> None:
    found = told(make(tmp_path, MISSING), "")
    assert [(message, fix) for message, _, fix in found] == [
        ("one of them is needed", "--num-layers N, or --encoder-num-layers N")
    ]


@pytest.mark.budget(20)
def test_rules_of_a_device_are_decided_by_its_architecture_alone(checkout: Path) -> None:
    words = "--save-interval 2"
    assert told(checkout, words) == []
    here = f"megatron/training/arguments.py:{line('intervals differ')}"
    needs = f"megatron/training/arguments.py:{line('newer ones need it')}"
    assert verdict(checkout, words).undecided == (here, needs)
    assert [message for message, _, _ in told(checkout, words, "9.0")] == ["intervals differ"]
    assert verdict(checkout, words, "10.0").problems == ()
    assert verdict(checkout, words, "10.0").undecided == (needs,)


@pytest.mark.budget(20)
def test_configurations_are_made_and_their_functions_are_those_of_torch(checkout: Path) -> None:
    assert [message for message, _, _ in told(checkout, "--num-layers 3 --swiglu")] == ["three gated layers"]
    assert told(checkout, "--num-layers 3") == []


@pytest.mark.budget(20)
def test_an_exit_is_a_problem_and_the_rest_goes_on(checkout: Path) -> None:
    assert [message for message, _, _ in told(checkout, "--exits --num-layers 0")] == ["--exits is gone", "no layers"]


@pytest.mark.budget(40)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('broken')", "megatron.training.arguments: RuntimeError: broken (line 1)"),
        ("import sys\nprint('out')\nsys.exit(3)", "megatron.training.arguments: SystemExit: 3 (line 3)"),
        ("import os\nos._exit(3)", "the process ended with status 3: nothing"),
        ("def (", "megatron.training.arguments: SyntaxError: "),
        ("open('/tmp/nothing', 'w')", "megatron.training.arguments: PermissionError: open is not allowed in a check (line 1)"),
        ("import socket\nsocket.socket()", "megatron.training.arguments: PermissionError: socket.__new__ is not allowed"),
        ("import nowhere.at_all\nnowhere.at_all.call(1)[2] + 1", "megatron.training.arguments: UndecidedError: "),
    ],
)
def test_a_checkout_that_cannot_be_run_is_one_problem(tmp_path: Path, text: str, reason: str) -> None:
    (problem,) = verdict(make(tmp_path, text), "").problems
    assert problem.message.startswith(f"the rules of Megatron-LM in {tmp_path} cannot be run: {reason}")
    assert problem.fix_text == "check without them: --static"


@pytest.mark.budget(20)
def test_a_configuration_that_cannot_be_imported_is_one_problem_and_other_rules_go_on(tmp_path: Path) -> None:
    folder = make(tmp_path)
    config = folder / "megatron/core/transformer/transformer_config.py"
    config.write_text(config.read_text() + "\nraise RuntimeError('half of it')\n")
    assert told(folder, "--bf16 --fp16") == [
        ("not args.fp16", f"megatron/training/arguments.py:{line('assert not args.fp16')}", "remove --fp16"),
        (
            f"the rules of Megatron-LM in {tmp_path} cannot be run: megatron.core.transformer.transformer_config: "
            f"RuntimeError: half of it (line {len(config.read_text().splitlines())})",
            str(folder / "megatron/training/arguments.py"),
            "check without them: --static",
        ),
    ]


@pytest.mark.budget(20)
def test_a_rule_that_does_not_end_is_one_problem(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS", 1.0)
    found = verdicts(checkout, "--loops", "--num-layers 0")
    assert [problem.message.rpartition(": ")[2] for (problem,) in (one.problems for one in found)] == [
        "no result within 1 s",
        "no layers",
    ]


@pytest.mark.budget(40)
def test_commands_behind_one_that_ends_the_process_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "    if args.exits:\n        import os, time\n        os._exit(3) if args.bf16 else time.sleep(9)\n"
    folder = make(tmp_path, ARGUMENTS.replace("    if args.exits:\n", f"{ends}    if args.exits:\n"))
    monkeypatch.setattr(rules, "TIMEOUT", 2.0)
    found = verdicts(folder, "", "--exits --bf16", "--num-layers 0", "--exits", "--num-layers 101 --disable-bias-linear")
    assert [[problem.message.rpartition(": ")[2] for problem in one.problems] for one in found] == [
        [],
        ["nothing"],
        ["no layers"],
        ["no result within 5 s"],
        ["101 layers are too many"],
    ]


def test_the_checkout_is_that_of_the_program_or_of_the_path(checkout: Path, tmp_path: Path) -> None:
    assert find_checkout(str(checkout / "examples" / "x.py"), {}).version == "0.16.1"  # type: ignore[union-attr]
    assert find_checkout("x.py", {"PYTHONPATH": f"{tmp_path}:{checkout}"}).source == "PYTHONPATH"  # type: ignore[union-attr]
    assert find_checkout("x.py", {}, str(tmp_path)) is None
