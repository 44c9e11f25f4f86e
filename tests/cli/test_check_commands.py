"""``mindspeed check`` reads commands in words, scripts, folders and job files, and tells problems in every format."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import LAPTOP

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
    assert first.startswith("jobs/good.sh:1: no problems; plan ")
    assert second.startswith("jobs/good.sh:3: no problems; plan ")
    assert f"MS114 {MESSAGE}\n  where: jobs/bad.sh:3\n  fix: give --seed a whole number\n" in result.stdout


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
    assert "MS305 nowhere.sh cannot be read: it is no file" in result.stdout
    assert "jobs/good.sh:1: no problems" in result.stdout


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
