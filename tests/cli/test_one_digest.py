"""One request has one digest: where torch is not installed, where it is, and in the running job."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from shlex import split

import pytest
from packaging.requirements import Requirement

from mindspeed.engine.inspection.contracts import recorded_contracts
from mindspeed.engine.inspection.megatron_copies import package_root
from mindspeed.engine.planning.fingerprint import is_of_machine, kind_of
from mindspeed.engine.planning.lock import read_lock
from tests.warm_processes import warm_python

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = {
    "level 1 alone": [],
    "a feature that changes an argument": ["--features", "swiglu", "--activation", "silu", "--gated-linear-unit"],
    "parallel sizes": ["--features", "ring-attention", "--tp", "2", "--cp", "2", "--world-size", "8"],
}
COMMAND = split(
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--swiglu --micro-batch-size 2"
)
SWEEP = """
import json, sys
from dataclasses import replace
from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import MindSpeedError
world = json.loads(sys.argv[1])
for name in sorted(registry.catalog(frozenset()).usable):
    try:
        environment = replace(registry.probe("npu"), megatron="0.16.1")
        plan = registry.resolve([Layer("test", (name,), world=world)], environment)
        print(name, plan.digest, [str(row) for row in plan.rows])
    except MindSpeedError as error:
        print(name, error)
"""
MODEL = {"world_size": 8, "tp": 2, "cp": 2, "num_layers": 8, "num_attention_heads": 8, "hidden_size": 64, "seq_length": 64}
MODEL |= {"num_experts": 0, "vocab_size": 512, "activation": "silu", "gated_linear_unit": True, "normalization": "RMSNorm"}
SCRIPT = """
import os, pathlib
from mindspeed.engine.runtime import session
pathlib.Path(__file__).with_suffix("." + os.environ["RANK"]).write_text(session.current().plan.digest)
"""


def needed_by(distribution: str) -> set[str]:
    """Return the distributions that one needs without its extras, itself included."""
    found, waiting = set(), [distribution]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            requirements = map(Requirement, metadata.requires(name) or ())
            waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """Run mindspeed in an environment that has what ``pip install mindspeed`` brings: ``without_torch(*words)``."""
    packages = tmp_path_factory.mktemp("packages")
    for name in needed_by("mindspeed") - {"mindspeed"}:
        files = metadata.distribution(name).files or ()
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(metadata.distribution(name).locate_file(top))
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "PYTHON"))}
    variables |= {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}

    def run(*words, program=("-m", "mindspeed")) -> str:
        command = [sys.executable, "-S", *program, *map(str, words)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    missing = "import importlib.util as u; print([n for n in ('torch', 'numpy', 'megatron') if u.find_spec(n)])"
    assert subprocess.run([sys.executable, "-S", "-c", missing], env=variables, capture_output=True, text=True).stdout == "[]\n"
    return run


def megatron():
    return ["--platform", "cpu", "--megatron", metadata.version("megatron-core")]


def checkout(folder: Path) -> Path:
    """Make a Megatron-LM of the installed megatron.core and a megatron.training with the recorded functions."""
    core = package_root("core")
    assert core is not None
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    (folder / "megatron" / "core").symlink_to(core / "core")
    (training / "__init__.py").touch()
    _, recorded = recorded_contracts(metadata.version("megatron-core"))
    for target, contract in recorded.items():
        module, _, name = target.partition(":")
        if module.startswith("megatron.training.") and contract.kind == "function":
            with training.joinpath(f"{module.rpartition('.')[2]}.py").open("a") as file:
                file.write(f"def {name}{contract.signature}:\n    pass\n")
    return folder


@pytest.mark.budget(10)
@pytest.mark.parametrize("request_words", REQUESTS.values(), ids=REQUESTS)
def test_a_check_without_torch_has_the_digest_of_one_with_torch(mindspeed, without_torch, request_words):
    words = ["features", "check", *request_words, *megatron(), "--json"]
    bare, here = (json.loads(text)["plan"] for text in (without_torch(*words), mindspeed(*words).stdout))
    assert bare["digest"] == here["digest"]
    beside = {"torch": metadata.version("torch").partition("+")[0]}
    assert here["environment"] == bare["environment"] | beside
    assert {key: bare[key] for key in bare if key != "environment"} == {key: here[key] for key in here if key != "environment"}


@pytest.mark.budget(10)
def test_the_sections_of_a_trainer_have_one_digest_too(mindspeed, without_torch, tmp_path):
    (tmp_path / "job.yaml").write_text("features: [swiglu]\nworld: {tp: 2}\ntrain: {train_iters: 1}\n")
    words = ["features", "check", "-f", tmp_path / "job.yaml", *megatron(), "--json"]
    bare, here = (json.loads(text)["plan"] for text in (without_torch(*words), mindspeed(*words).stdout))
    assert bare["digest"] == here["digest"]
    (unjudged,) = (row for row in bare["rows"] if row not in here["rows"])
    assert unjudged["text"].startswith("the rules of megatron-core ")
    assert [row for row in bare["rows"] if row != unjudged] == here["rows"]


@pytest.mark.long
def test_every_feature_has_the_same_plan_or_refusal_without_torch(without_torch):
    sweep = ["-c", SWEEP, json.dumps(MODEL)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    here = subprocess.run([sys.executable, *sweep], env=variables, capture_output=True, text=True, check=True)
    lines = here.stdout.splitlines()
    assert len(lines) > 60
    assert without_torch(program=sweep).splitlines() == lines


@pytest.mark.budget(10)
def test_a_command_of_megatron_lm_has_one_digest_with_a_checkout_and_without_one(mindspeed, monkeypatch, tmp_path):
    options = [*megatron(), "--world-size", "2", "--json"]

    def plans():
        of_job = json.loads(mindspeed("features", "check", *options).stdout)["plan"]
        made = [json.loads(mindspeed("check", *options, "--", *COMMAND).stdout)["commands"][0]["plan"], of_job]
        return [{key: value for key, value in plan.items() if key != "rows"} for plan in made]  # the stub has no bodies

    without = plans()
    assert "megatron.training.arguments:validate_args" in {planned["site"] for planned in without[0]["patches"]}
    monkeypatch.syspath_prepend(str(checkout(tmp_path)))
    assert package_root("training") == tmp_path / "megatron"
    assert plans() == without


@pytest.mark.budget(10)
def test_a_lock_that_is_made_without_torch_lacks_only_facts_of_a_machine(mindspeed, without_torch, tmp_path):
    request = ["--platform", "cpu", *REQUESTS["a feature that changes an argument"]]
    without_torch("lock", "-o", tmp_path / "ci.lock", *request, *megatron())
    assert mindspeed("lock", "-o", tmp_path / "here.lock", *request).exit_code == 0
    ci, here = (read_lock(tmp_path / f"{name}.lock") for name in ("ci", "here"))
    assert (ci.plan.digest, ci.job) == (here.plan.digest, here.job)
    missing = here.content.keys() - ci.content.keys()
    assert ci.content == {key: value for key, value in here.content.items() if key not in missing}
    assert {key for key in missing if not is_of_machine(key) and kind_of(key) != "target"} == set()
    assert {"version torch", "version python"} <= missing


@pytest.mark.budget(60)
def test_a_lock_that_is_made_without_torch_holds_in_the_running_job(without_torch, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    request = ["--platform", "cpu", *REQUESTS["a feature that changes an argument"]]
    said = without_torch("lock", "-o", tmp_path / "ci.lock", *request, "--world-size", "2", *megatron(), "--json")
    command = [*warm_python(), "-m", "mindspeed", "run", "--nproc", "2", "--lock", str(tmp_path / "ci.lock"), *request]
    done = subprocess.run([*command, "--", str(tmp_path / "script.py")], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {(tmp_path / f"script.{rank}").read_text() for rank in (0, 1)} == {json.loads(said)["digest"]}


def test_a_lock_needs_a_version_of_megatron(mindspeed, monkeypatch, tmp_path):
    monkeypatch.setattr("mindspeed.engine.inspection.megatron_copies.megatron_version", lambda: None)
    done = mindspeed("lock", "-o", tmp_path / "job.lock", "--platform", "cpu")
    assert (done.exit_code, done.stderr) == (
        3,
        (
            "MS502 megatron-core is not installed, but a lock file must record a version of megatron-core\n"
            "  fix: --megatron 0.16.1, or the version that the job uses\n"
        ),
    )


@pytest.mark.budget(5)
def test_a_check_that_knows_no_megatron_warns_that_its_digest_is_another_one(without_torch):
    warning, last = without_torch("features", "check", "--platform", "cpu").splitlines()
    assert warning == (
        "warning      megatron-core: megatron-core is not installed, so patches are not checked and the digest differs "
        "from that of a job; give --megatron VERSION"
    )
    assert last.startswith("no problems: flash-attention")
