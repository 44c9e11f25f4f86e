"""``mindspeed check`` reads commands in words, scripts, folders and job files, and tells problems in every format."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mindspeed.cli.check_start import Starts
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.problems import Problem, RunError
from tests.cli.conftest import LAPTOP
from tests.megatron_lm.upstream.checkouts import make

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1"
)
GOOD = f"python pretrain_gpt.py {MODEL}\n"
BAD = f"# a comment\npython pretrain_gpt.py {MODEL} \\\n  --seed x\n"
MESSAGE = "--seed is 'x', not a whole number"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/bad.sh").write_text(BAD)
    Path("jobs/good.sh").write_text(GOOD + 'echo "$@"\n' + GOOD)
    Path("jobs/other.sh").write_text("echo hello\n")
    return tmp_path


def test_every_command_of_a_folder_is_one_line(mindspeed, folder):
    result = mindspeed("check", *LAPTOP, "jobs")
    assert result.exit_code == 1
    *_, bad, first, second = [line for line in result.stdout.splitlines() if line.startswith("jobs/")]
    assert bad == "jobs/bad.sh:2: 1 problem"
    assert first.startswith("jobs/good.sh:1: no problems: ")
    assert second.startswith("jobs/good.sh:3: no problems: ")
    assert f"MS114 {MESSAGE}\n  where: jobs/bad.sh:3\n  fix: give --seed a whole number\n" in result.stdout


def test_every_started_job_is_a_line_as_it_ends(mindspeed, folder, monkeypatch):
    def of(starts, plan, command, checkout):
        if command.line == 1:
            raise RunError([Problem("MS604", "it fails"), Problem("MS604", "and again")])
        return plan if command.line == 3 else replace(plan, rows=(*plan.rows, PlanNote("not-checked", "start", "no CPU")))

    monkeypatch.setattr(Starts, "of", of)
    Path("jobs/good.sh").write_text(f"{GOOD}\n{GOOD}{GOOD}")
    result = mindspeed("check", "--start", "--json", *LAPTOP, "jobs")
    assert result.stderr == "jobs/good.sh:1: 2 problems\njobs/good.sh:3: started\njobs/good.sh:4: not started\n"
    assert [row["code"] for row in json.loads(result.stdout)["problems"]] == ["MS114", "MS604", "MS604"]


@pytest.mark.parametrize("words", [("jobs/good.sh",), ("jobs/other.sh",), ("--", *GOOD.split()), ("-f", "job.yaml"), ()])
def test_what_has_no_problem_ends_with_0(mindspeed, folder, words):
    Path("job.yaml").write_text("world: {world_size: 1}\n")
    result = mindspeed("check", *LAPTOP, *words)
    assert result.exit_code == 0, result.output


def test_a_job_file_with_problems_ends_with_1(mindspeed, folder):
    Path("job.yaml").write_text("features: [nosuch]\n")
    result = mindspeed("check", *LAPTOP, "-f", "job.yaml")
    assert result.exit_code == 1
    assert "MS201" in result.output


def test_a_missing_or_unreadable_script_is_a_problem(mindspeed, folder):
    result = mindspeed("check", *LAPTOP, "nowhere.sh", "jobs/good.sh")
    assert result.exit_code == 1
    assert "MS305 nowhere.sh cannot be read: it is not a file" in result.stdout
    assert "jobs/good.sh:1: no problems" in result.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "from megatron.bridge.training.config import ConfigContainer\n",
            (
                "a recipe of Megatron-Bridge needs torch, transformers and its models to be imported\n"
                "  where: x.py\n"
                "  fix: run its ConfigContainer.validate() where these packages are installed\n"
            ),
        ),
        (
            "from megatron.training import pretrain\n",
            "only the command that starts this program contains its arguments\n  where: x.py\n"
            "  fix: mindspeed check -- torchrun x.py ..., or check the shell script with that command\n",
        ),
    ],
)
def test_a_program_is_not_checked_and_why(mindspeed, folder, text, reason):
    Path("x.py").write_text(text)
    result = mindspeed("check", *LAPTOP, "x.py")
    assert (result.exit_code, result.stdout) == (1, f"MS305 x.py is not checked: {reason}x.py: 1 problem\n")


def test_json_has_every_command_and_problem(mindspeed, folder):
    data = json.loads(mindspeed("check", *LAPTOP, "--json", "jobs").stdout)
    assert [(one["file"], one["line"], one["problems"]) for one in data["commands"]] == [
        ("jobs/bad.sh", 2, 1),
        ("jobs/good.sh", 1, 0),
        ("jobs/good.sh", 3, 0),
    ]
    assert [(problem["code"], problem["message"]) for problem in data["problems"]] == [("MS114", MESSAGE)]


def test_annotations_of_github_name_file_and_line(mindspeed, folder):
    result = mindspeed("check", *LAPTOP, "--format", "github", "jobs")
    assert result.exit_code == 1
    assert result.stdout == f"::error file=jobs/bad.sh,line=3,title=MS114::{MESSAGE}%0Afix: give --seed a whole number\n"
    assert mindspeed("check", *LAPTOP, "--format", "github", "jobs/good.sh").stdout == ""


def test_sarif_has_rules_and_results(mindspeed, folder):
    (run,) = json.loads(mindspeed("check", *LAPTOP, "--format", "sarif", "jobs").stdout)["runs"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("MS114", "error")
    location = result["locations"][0]["physicalLocation"]
    assert (location["artifactLocation"]["uri"], location["region"]["startLine"]) == ("jobs/bad.sh", 3)
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["MS114"]


def ran(command, cwd):
    words = shlex.split(command)
    assert words[0] == "mindspeed"
    return subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.budget(30)
def test_the_action_and_the_hook_run_their_commands(folder):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    defaults = {name: given["default"] for name, given in action["inputs"].items()}
    command = step["run"].replace("$OPTIONS", defaults["options"]).replace("$PATHS", "jobs")
    assert "error file=jobs/bad.sh,line=3,title=MS114" in ran(command, folder).stdout
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert ran(f"{hook['entry']} jobs/bad.sh", folder).returncode == 1
    assert ran(f"{hook['entry']} jobs/good.sh", folder).returncode == 0


CUDA = ("--platform", "cuda", "--megatron", "0.16.1", "--static")
FLAT = f"python pretrain_gpt.py {MODEL} --sequence-parallel"
TRAPS = f"{FLAT}\n{FLAT} --num-query-groups 2\n"


def test_traps_are_told_once_with_every_command_and_the_worst_first(mindspeed, folder):
    Path("traps.sh").write_text(TRAPS)
    result = mindspeed("check", *CUDA, "traps.sh", "jobs/bad.sh")
    told = [line.partition(": ")[0] for line in result.stdout.splitlines() if line.startswith(("MS", "wrong", "note", "traps"))]
    assert told == ["MS114 --seed is 'x', not a whole number", "wrong numbers", "note", "traps.sh:1", "traps.sh:2"]
    assert "without tensor parallelism; fix: remove --sequence-parallel" in result.stdout
    assert "\n  in: traps.sh:1, traps.sh:2\n" in result.stdout
    assert result.exit_code == 1


def test_traps_are_warnings_of_every_format(mindspeed, folder):
    Path("traps.sh").write_text(TRAPS)
    found = json.loads(mindspeed("check", *CUDA, "--json", "traps.sh").stdout)["traps"]
    assert [(trap["name"], trap["consequence"], trap["commands"]) for trap in found] == [
        ("query-groups-without-the-switch", "wrong numbers", ["traps.sh:2"]),
        ("sequence-parallel-without-tensor-parallel", "note", ["traps.sh:1", "traps.sh:2"]),
    ]
    lines = mindspeed("check", *CUDA, "--format", "github", "traps.sh").stdout.splitlines()
    assert [line.partition("::")[2].partition("::")[0] for line in lines] == [
        "notice file=traps.sh,line=1,title=sequence-parallel-without-tensor-parallel",
        "warning file=traps.sh,line=2,title=query-groups-without-the-switch",
        "notice file=traps.sh,line=2,title=sequence-parallel-without-tensor-parallel",
    ]
    (run,) = json.loads(mindspeed("check", *CUDA, "--format", "sarif", "traps.sh").stdout)["runs"]
    assert [result["level"] for result in run["results"]] == ["note", "warning", "note"]


def test_a_command_that_stops_at_its_first_step_is_wrong(mindspeed, folder):
    words = f"{GOOD.strip()} --group-query-attention --num-query-groups 3"
    result = mindspeed("check", *CUDA, "--", *words.split())
    assert result.exit_code == 1
    assert (
        "MS115 Megatron-LM accepts this command and then fails: --num-attention-heads is not divisible by --num-query-groups"
        in result.stdout
    )


def test_what_is_not_checked_names_the_options_of_megatron_that_decide_it(mindspeed, folder):
    launch = ("torchrun", "--nproc-per-node", "2", *GOOD.split()[1:])
    result = mindspeed("check", *CUDA, "--", *launch, "--tensor-model-parallel-size", "2")
    assert "not checked: tensor-parallel: give --padded-vocab-size\n  in: command line\n" in result.stdout


def test_the_first_line_says_by_which_megatron_a_command_is_checked(mindspeed, folder):
    make(folder / "megatron")
    rules = f"checked by the rules of Megatron-LM 0.16.1 in {folder / 'megatron'} (given), for cuda"
    arguments = "checked by the arguments of Megatron-LM 0.19.1, without its rules, for cpu"
    first, *_ = mindspeed("check", "--platform", "cuda", "--checkout", "megatron", "jobs/good.sh").stdout.splitlines()
    assert first == rules
    first, *_ = mindspeed("check", "--platform", "cpu", "--megatron", "0.19.1", "jobs").stdout.splitlines()
    assert first == arguments
    data = json.loads(mindspeed("check", "--platform", "cpu", "--megatron", "0.19.1", "--json", "jobs/good.sh").stdout)
    assert [f"checked by {one['judge']}" for one in data["commands"]] == [arguments] * 2


def test_a_job_file_that_is_given_as_a_script_is_a_problem(mindspeed, folder):
    (folder / "job.yaml").write_text("features: [swiglu]\n")
    result = mindspeed("check", "job.yaml")
    assert result.exit_code == 1
    assert "fix: check a job file by: mindspeed check -f job.yaml\n" in result.stdout


def test_missing_rules_are_told(mindspeed, folder):
    result = mindspeed("check", "--platform", "cuda", "--megatron", "0.16.1", "jobs/good.sh")
    assert result.exit_code == 0
    assert (
        "not checked: megatron-lm: Megatron-LM's rules are not run, because megatron/training/arguments.py is neither"
        in result.stdout
    )
    assert "own rules" not in mindspeed("check", *CUDA, "jobs/good.sh").stdout


def test_a_missing_program_is_told(mindspeed, folder):
    result = mindspeed("check", "--platform", "cuda", "--megatron", "0.16.1", "--", "torchrun", "absent.py", *GOOD.split()[2:])
    assert result.exit_code == 0
    assert "not checked: megatron-lm: absent.py does not exist here. Megatron-LM's rules are not run" in result.stdout


def test_a_command_that_needs_more_memory_than_a_device_has_has_a_problem(mindspeed, folder):
    command = ("--", *GOOD.split(), "--padded-vocab-size", "64")
    missing = mindspeed("check", *CUDA, "--device-memory", "1MiB", *command)
    assert "MS307 memory cannot be estimated without global_batch_size\n  fix: --global-batch-size N\n" in missing.stdout
    needed = mindspeed("check", *CUDA, "--device-memory", "1MiB", *command, "--global-batch-size", "1")
    assert needed.exit_code == 1
    assert "MS347 the peak of stage 0 is" in needed.stdout
    assert mindspeed("check", *CUDA, "--device-memory", "60GiB", *command, "--global-batch-size", "1").exit_code == 0
