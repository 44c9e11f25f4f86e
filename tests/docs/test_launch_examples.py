"""The launch examples, parsed by the real tools and models where they are installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from mindspeed.workbench.training.checkpoints import newest_complete
from tests.workbench.training.torchrun_nodes import Node, free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "launch"
MANIFESTS = ("ascendjob.yaml", "pytorchjob.yaml", "trainjob.yaml", "volcano.yaml")


@pytest.mark.parametrize(
    ("page", "file"),
    [("slurm.md", "slurm.sh"), *(("kubernetes.md", name) for name in MANIFESTS)],
)
def test_a_page_shows_the_example_as_it_is(page, file):
    assert (EXAMPLES / file).read_text().rstrip() + "\n```\n" in (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.sh")), ids=lambda file: file.name)
def test_bash_parses_the_script(file):
    assert subprocess.run(["bash", "-n", file], check=False).returncode == 0


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("Dockerfile*")), ids=lambda file: file.name)
def test_an_image_copies_what_exists_and_locks_its_job(file, tmp_path):
    steps = [line.split(maxsplit=1) for line in file.read_text().splitlines() if line and line[0] not in "# "]
    copied = [words.split()[0] for step, words in steps if step == "COPY"]
    assert copied == [".", "${JOB}"]
    (job := tmp_path / "job").mkdir()
    shutil.copy(EXAMPLES / "job.yaml", job / "job.yaml")
    locking = [words for step, words in steps if step == "RUN"][-1].replace("/job/", f"{job}/")
    made = locking.partition("&& ")[2] if locking.startswith("source ") else locking.partition(" &&")[0]
    options = ["--platform", "npu", "--megatron", "0.16.1"] if locking.startswith("source ") else []
    done = subprocess.run([sys.executable, "-m", *made.split(), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (job / "mindspeed.lock").is_file()


JOB = """
platform: cpu
world: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 32, global_batch_size: 4, micro_batch_size: 2}
train: {train_iters: 80, save_interval: 4, log_interval: 1, sample_tokens: 0, eval_iters: 1, lr: 0.01, warmup_iters: 1}
"""


def containers(value):
    """Yield every container of a manifest that has a command, or that a TrainJob describes."""
    if isinstance(value, dict):
        if "command" in value:
            yield value
        for part in value.values():
            yield from containers(part)
    elif isinstance(value, list):
        for part in value:
            yield from containers(part)


def pod(file, folder):
    """The command of a manifest's pod with its folders in ``folder``, and its variables."""
    container = next(containers(yaml.safe_load((EXAMPLES / file).read_text())))
    script = container["args"][0].replace("/job/", f"{folder}/job/").replace("/runs/", f"{folder}/runs/")
    return [*container["command"], script], {row["name"]: row["value"] for row in container.get("env", [])}


def scheduled(file, number, port):
    """The variables that the operator of a manifest sets in pod ``number`` of two with one device each."""
    if file == "volcano.yaml":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return address | {"WORLD_SIZE": "2", "RANK": str(number), "PET_NPROC_PER_NODE": "1"}
    if file == "ascendjob.yaml":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return address | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": str(number)}
    if file == "trainjob.yaml":
        address = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        return address | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number)}
    meeting = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_RDZV_ID": "pretrain"}
    return meeting | {"PET_NNODES": "2:2", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": "100"}


def locked_job(folder):
    (folder / "job").mkdir()
    (folder / "runs").mkdir()
    (folder / "job" / "job.yaml").write_text(JOB)
    command = [sys.executable, "-m", "mindspeed", "lock", "-f", "job.yaml", "-o", "mindspeed.lock", "--world-size", "2"]
    subprocess.run(command, cwd=folder / "job", check=True, stdout=subprocess.DEVNULL)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", MANIFESTS)
def test_the_command_of_a_manifest_starts_is_killed_and_reaches_its_end(tmp_path, file):
    locked_job(tmp_path)
    command, environ = pod(file, tmp_path)
    port, run = free_port(), tmp_path / "runs" / "job"
    pods = [Node(tmp_path / f"pod{number}.log", command, **(environ | scheduled(file, number, port))) for number in range(2)]
    killed, end = False, time.monotonic() + 1500
    try:
        while sum(pod.look() for pod in pods) < len(pods):
            assert time.monotonic() < end
            if not killed and (newest_complete(run) or 0) >= 8:
                killed = True
                pods[1].lose()
            if file in ("ascendjob.yaml", "volcano.yaml") and killed and pods[1].starts == 2 and pods[0].starts == 1:
                pods[0].restart()  # a pod that fails makes all of them start again
            time.sleep(0.3)
    finally:
        printed = [pod.end() for pod in pods]
    assert killed
    assert newest_complete(run) == 80, printed
    assert "pass  disk" in printed[0]


SCONTROL = """#!/bin/bash
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> requeued.txt ;;
esac
"""
SRUN = """#!/bin/bash
# srun of two tasks on this machine: TERM reaches all of them, and the highest status is its own
tasks=2
while [[ "$1" == --* ]]; do
    [[ "$1" == --ntasks-per-node=1 ]] && tasks=1
    shift
done
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=$tasks "$@" &
    started+=($!)
done
trap 'kill -TERM "${started[@]}" 2>/dev/null' TERM
highest=0
for process in "${started[@]}"; do
    while
        status=0
        wait "$process" || status=$?
        kill -0 "$process" 2>/dev/null
    do :; done
    if [ "$status" -ne 0 ]; then kill -TERM "${started[@]}" 2>/dev/null; fi
    if [ "$status" -gt "$highest" ]; then highest=$status; fi
done
exit "$highest"
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_script_of_slurm_requeues_at_its_time_limit_and_after_a_failure_and_then_ends(tmp_path):
    locked_job(tmp_path)
    for name in ("job.yaml", "mindspeed.lock"):
        (tmp_path / "job" / name).rename(tmp_path / name)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = (EXAMPLES / "slurm.sh").read_text().replace("29500", str(free_port()))
    (tmp_path / "slurm.sh").write_text(script)
    paths = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": paths, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]", "OMP_NUM_THREADS": "1"}

    def ends(sent=None):
        count = len((tmp_path / "requeued.txt").read_text().split()) if (tmp_path / "requeued.txt").exists() else 0
        before, end = newest_complete(tmp_path / "runs" / "job") or 0, time.monotonic() + 500
        with (tmp_path / "output.txt").open("a") as output:
            job = subprocess.Popen(["bash", "slurm.sh"], cwd=tmp_path, env=env, stdout=output, stderr=output)
        while sent is not None and (newest_complete(tmp_path / "runs" / "job") or 0) < before + 4:
            assert job.poll() is None, (tmp_path / "output.txt").read_text()
            assert time.monotonic() < end
            time.sleep(0.3)
        if sent == "TERM":
            job.terminate()
        elif sent == "KILL":
            ranks = [child for child in psutil.Process(job.pid).children(recursive=True) if child.environ().get("SLURM_PROCID")]
            next(rank for rank in ranks if "pretrain" in rank.cmdline()).kill()
        status = job.wait(timeout=600)
        requeued = (tmp_path / "requeued.txt").read_text().split() if (tmp_path / "requeued.txt").exists() else []
        return status, len(requeued) - count

    assert ends("TERM") == (75, 1)
    status, requeued = ends("KILL")
    assert status > 0
    assert requeued == 1
    assert ends() == (0, 0)
    assert newest_complete(tmp_path / "runs" / "job") == 80


@pytest.mark.long
def test_the_models_of_kubernetes_keep_every_field_of_the_manifests():
    kubernetes = pytest.importorskip("kubernetes.client", reason="pip install kubernetes==31.0.0 kubeflow-training")
    training = pytest.importorskip("kubeflow.training.models", reason="pip install kubernetes==31.0.0 kubeflow-training")
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


def test_the_model_of_kubeflow_trainer_keeps_every_field_of_its_manifest():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")

    def without_quantities(value):
        """Remove what the package gives a model without a value: 16Gi and the number of GPUs."""
        if isinstance(value, list):
            return [without_quantities(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {key: without_quantities(each) for key, each in value.items() if key not in ("limits", "sizeLimit")}

    job = without_quantities(yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text()))
    assert models.TrainerV1alpha1TrainJob.model_validate(job).to_dict() == job


def rank_on_ray(run):
    """Return the process of rank 1 of a run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if {"mindspeed", str(run)} <= set(process.cmdline()) and process.environ().get("RANK") == "1":
                return process
    raise AssertionError(f"no process trains in {run}")


@pytest.mark.long
def test_a_rank_on_ray_that_is_killed_is_named_and_all_start_again(tmp_path):
    pytest.importorskip("ray", reason="pip install ray")
    words = "pretrain --tp 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2"
    words += " --global-batch-size 4 --train-iters 100 --save-interval 5 --log-interval 1 --auto-resume"
    run = tmp_path / "run"
    command = [sys.executable, EXAMPLES / "on_ray.py", "--ranks", "2", "--retries", "1", "--", *words.split(), run]
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        limit = time.monotonic() + 300
        while not newest_complete(run) and job.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        rank_on_ray(run).kill()
        output, _ = job.communicate(timeout=500)
    assert job.returncode == 0, output
    assert re.search(r"rank [01] on \S+ failed with exit status", output)
    steps = [row["step"] for row in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if "loss" in row]
    assert steps[-1] == newest_complete(run) == 100


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
