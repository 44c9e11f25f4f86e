"""The launch examples, parsed by the real tools and models where they are installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "launch"


@pytest.mark.parametrize(
    ("page", "file"),
    [("slurm.md", "slurm.sh"), ("kubernetes.md", "pytorchjob.yaml"), ("kubernetes.md", "volcano.yaml")],
)
def test_a_page_shows_the_example_as_it_is(page, file):
    assert (EXAMPLES / file).read_text().rstrip() + "\n```\n" in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.sh")), ids=lambda file: file.name)
def test_bash_parses_the_script(file):
    assert subprocess.run(["bash", "-n", file], check=False).returncode == 0


@pytest.mark.long
def test_the_models_of_kubernetes_keep_every_field_of_the_manifests():
    kubernetes = pytest.importorskip("kubernetes.client", reason="pip install kubernetes kubeflow-training")
    training = pytest.importorskip("kubeflow.training.models", reason="pip install kubernetes kubeflow-training")
    for name in dir(training):
        if name.startswith("KubeflowOrg"):
            setattr(kubernetes.models, name, getattr(training, name))
    client = kubernetes.ApiClient()

    def kept(value, model):
        made = client.deserialize(SimpleNamespace(data=json.dumps(value)), model)
        return client.sanitize_for_serialization(made)

    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    assert kept(job, "KubeflowOrgV1PyTorchJob") == job
    tasks = yaml.safe_load((EXAMPLES / "volcano.yaml").read_text())["spec"]["tasks"]
    assert [kept(task["template"], "V1PodTemplateSpec") for task in tasks] == [task["template"] for task in tasks]


@pytest.mark.long
def test_a_job_trains_on_ray(tmp_path):
    pytest.importorskip("ray", reason="pip install ray")
    words = "pretrain --tp 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2"
    words += " --global-batch-size 4 --train-iters 5 --log-interval 1 --run"
    command = [sys.executable, EXAMPLES / "on_ray.py", "--ranks", "2", "--", *words.split(), tmp_path / "run"]
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines()) if "loss" in row][
        -1
    ] == 5


@pytest.mark.long
@pytest.mark.skipif(shutil.which("check-jsonschema") is None, reason="check-jsonschema not found: pip install check-jsonschema")
@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[bf]*.yml"),
        ("github-actions", "action.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_for_a_host_fit_its_schema(schema, pattern):
    files = sorted(ROOT.glob(pattern))
    assert files
    done = subprocess.run(["check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
