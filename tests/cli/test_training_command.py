"""``check`` of a training command: every problem at once, with its line; other verbs say that it is ``check``'s."""

import json
import shlex

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from tests.cli.conftest import LAPTOP

CHECK_WITH = "this verb takes feature names; for a training command use: mindspeed check"
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1"
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("MINDSPEED_FEATURES", "MINDSPEED_SET", "MINDSPEED_WITHOUT", "MINDSPEED_STRICT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(*words):
    return CliRunner().invoke(main, ["check", *LAPTOP, *words])


def problems_of(*words):
    result = run("--json", *words)
    assert result.exit_code == 1, result.output
    return json.loads(result.stdout)["problems"]


def test_words_after_two_dashes_are_planned():
    words = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *SIZES.split(), "--tensor-model-parallel-size", "2"]
    result = run("--json", "--", *words, "--use-fused-rmsnorm", "--normalization", "RMSNorm")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)["commands"][0]["plan"]
    assert {"rms-norm", "tensor-parallel"} <= {feature["name"] for feature in plan["features"]}
    assert plan["world"]["world_size"] == 2


def test_every_problem_of_a_script_is_told_at_once_with_its_line(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(
        f'HEADS=6\nARGS="\n  {SIZES}\n  --num-attention-heads $HEADS\n  --enable-mhc\n"\n'
        "torchrun --nproc_per_node 8 pretrain_gpt.py $ARGS \\\n  --tensor-model-parallel-size 4 \\\n  --nosuch 3 --seed x \\\n"
        "  --context-parallel-algo ring\n"
    )
    found = {(row["code"], row["where"].split(" ")[0].rpartition(":")[2]): row for row in problems_of(str(script))}
    assert {key: row["message"].split(":")[0] for key, row in found.items() if key[0] != "MS304"} == {
        ("MS114", "9"): "--seed is 'x', not a whole number",
        ("MS113", "5"): "--enable-mhc belongs to MindSpeed-LLM",
        ("MS301", "10"): "--context-parallel-algo is 'ring'",
    }
    assert ("MS304", "8") in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nosuch", "--nosuch is not an option of Megatron-LM 0.16.1 or mindspeed"),
        ("--lr", "--lr has no value"),
        ("--swiglu 3", "--swiglu takes no value, but is followed by 3"),
        ("--seed 1 2", "--seed takes one value, but 1 2 are given"),
        ("--normalization Other", "--normalization is 'Other', which Megatron-LM does not accept"),
    ],
)
def test_what_megatrons_parser_would_refuse_is_a_problem(words, message):
    (problem,) = problems_of("--", "pretrain_gpt.py", *SIZES.split(), *words.split())
    assert problem["code"] == "MS114"
    assert problem["message"].startswith(message)
    assert problem["fix"]


def test_a_switch_that_is_on_by_default_and_has_no_option_is_removed():
    (problem,) = problems_of("--", "pretrain_gpt.py", *SIZES.split(), "--apply-rope-fusion")
    assert problem["fix"] == "remove --apply-rope-fusion: it is on by default"


def test_an_empty_word_is_shown_as_it_is_typed(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(f'python pretrain_gpt.py {SIZES} --swiglu "$NONE" --train-samples 8 --lr 1 "$NONE"\n')
    assert [(row["message"], row["fix"]) for row in problems_of(str(script))] == [
        ("--swiglu takes no value, but is followed by ''", "remove ''"),
        ("--lr takes one value, but 1 '' are given", "give --lr one value"),
    ]


def test_the_arguments_of_a_script_are_none_unless_given(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(f'python pretrain_gpt.py {SIZES} --swiglu "$@"\n')
    assert run(str(script)).exit_code == 0


def test_paths_to_fill_in_and_processes_that_nobody_gave_are_warnings(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(
        f'CKPT="your path here"\ntorchrun pretrain_gpt.py {SIZES} --save $CKPT --load $NOWHERE \\\n'
        "  --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --num-experts 4 --disable-bias-linear\n"
    )
    result = run(str(script))
    assert result.exit_code == 0, result.output
    for text in (
        "--save is your path here (line 2): give it a value, or quote it",
        "--load is empty (line 2): give it a value, or quote it",
        "variables that the script does not set are treated as empty: NOWHERE; set them by: NOWHERE=VALUE mindspeed check ",
        "planned for 8, the minimum for these sizes (--world-size N)",
    ):
        assert text in result.output


def test_a_value_that_only_a_run_would_know_is_not_checked(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(
        f"TP=$1\ntorchrun pretrain_gpt.py {SIZES} --swiglu --lr $(cat rate) \\\n  --tensor-model-parallel-size $TP\n"
    )
    result = run(str(script))
    assert result.exit_code == 0, result.output
    for text in (
        "not checked: launcher: the value of --tensor-model-parallel-size (line 3), which is known only when the script runs",
        "not checked: launcher: the value of --lr (line 2), which is known only when the script runs",
        f"variables that the script does not set are treated as empty: $1; set them by: mindspeed check -- bash {script} ARG\n",
    ):
        assert text in result.output


def test_a_script_is_checked_with_its_arguments(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(f"TP=$1\ntorchrun --nproc-per-node 2 pretrain_gpt.py {SIZES} --tensor-model-parallel-size $TP\n")
    result = run("--json", "--", "bash", str(script), "2")
    assert result.exit_code == 0, result.output
    (command,) = json.loads(result.stdout)["commands"]
    assert (command["file"], command["line"]) == (str(script), 2)
    assert command["plan"]["world"]["tp"] == 2


@pytest.mark.parametrize(
    "script",
    [
        "run() {{ {command}; }}\nrun",
        "srun bash -c '{command}'",
        "case ${{1:-small}} in small) TP=2;; *) TP=8;; esac\n{command} --tensor-model-parallel-size $TP",
        "cat > run.sh <<EOF\n{command}\nEOF\nbash run.sh",
    ],
)
def test_commands_inside_functions_shells_branches_and_documents_are_checked(script, tmp_path):
    (tmp_path / "pretrain.sh").write_text(script.format(command=f"torchrun pretrain_gpt.py {SIZES} --seed x"))
    assert [row["message"] for row in problems_of(str(tmp_path))] == ["--seed is 'x', not a whole number"]


def test_a_script_whose_command_cannot_be_read_is_a_problem(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text(f"torchrun pretrain_gpt.py $(cat {SIZES})\n")
    (tmp_path / "arguments.sh").write_text(f"ARGS='{SIZES}'\n# for pretrain_gpt.py\n")
    (problem,) = problems_of(str(tmp_path))
    assert (problem["code"], problem["where"]) == ("MS301", str(script))
    assert problem["message"].endswith("can be read, although it has a program and Megatron-LM's training arguments")


def test_strict_refuses_what_is_left_out():
    words = ["--", "pretrain_gpt.py", *SIZES.split(), "--optimize-send-recv-comm"]
    assert run(*words).exit_code == 0
    (problem,) = problems_of("--strict", *words)
    assert (problem["code"], problem["fix"]) == ("MS113", "remove --optimize-send-recv-comm")


@pytest.mark.parametrize("verb", ["check", "plan"])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--", "torchrun", "pretrain_gpt.py", "--save", "my folder"], "-- torchrun pretrain_gpt.py --save 'my folder'"),
        (
            ["rms-norm", "swiglu", "--", "pretrain_gpt.py", "--bf16"],
            "-- pretrain_gpt.py --bf16 --features rms-norm,swiglu",
        ),
        (["pretrain_gpt.py"], "-- pretrain_gpt.py"),
        (["pretrain.sh"], "pretrain.sh"),
        (["--script", "pretrain.sh"], "pretrain.sh"),
        (["scripts"], "scripts"),
    ],
)
def test_a_verb_of_features_says_how_a_command_is_checked(verb, words, line, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "recompute").mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["features", verb, *LAPTOP, *words])
    options = [*(["--plan"] if verb == "plan" else []), *LAPTOP]
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {CHECK_WITH} {shlex.join(options)} {line}")
    assert CliRunner().invoke(main, ["features", verb, *LAPTOP, "recompute"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("memory plan --all --budget-mib 14900 --no-rotary", "--device-memory 14900 --no-rotary"),
        ("features check --device-memory 80GiB --strict --json", "--device-memory 80GiB --strict"),
        ("tune --budget-seconds 5 --set a.b=1 --set c.d=2 -f job.yaml", "--file job.yaml --set a.b=1 --set c.d=2"),
    ],
)
def test_the_line_to_type_has_the_options_that_check_takes(words, line):
    result = CliRunner().invoke(main, [*words.split(), "--", "pretrain_gpt.py", "--bf16"])
    assert result.stderr.splitlines()[-1] == f"Error: {CHECK_WITH} {line} -- pretrain_gpt.py --bf16"


def test_what_is_not_checked_is_in_no_row_an_option_of_another_command_line():
    words = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *SIZES.split(), "--tensor-model-parallel-size", "2"]
    words += ["--vocab-size", "50"]
    plan = json.loads(run("--json", "--", *words).stdout)["commands"][0]["plan"]
    (row,) = [row for row in plan["rows"] if row.get("fields") == ["vocab_size"]]
    assert row["text"] == "'vocabulary size ? is not divisible by tp=2' depends on vocab_size"
    text = run("--plan", "--", *words).stdout
    assert "not checked\n  tensor-parallel: give --padded-vocab-size\n" in text
    assert "--vocab-size" not in text


def test_the_fixes_of_a_training_command_are_its_own_arguments():
    found = problems_of("--", "pretrain_gpt.py", *SIZES.split(), "--features", "swiglu,sequence-parallel", "--bf16")
    assert {row["code"]: row["fix"] for row in found if row["features"] == ["swiglu"]} == {
        "MS304": "--swiglu, or remove swiglu"
    }
    fixes = [row["fix"] for row in found if row["features"] == ["sequence-parallel"]]
    assert "remove sequence-parallel, or --tensor-model-parallel-size 2 or more" in fixes
