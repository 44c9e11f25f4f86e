"""Ranks whose plans differ stop, and say who is odd and in what; a rank that fails tells the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.engine.planning import fingerprint
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.runtime import agreement, rendezvous
from mindspeed.engine.runtime.meeting import AGREED, VERDICT, MovedError, find_meeting, meeting, newest, open_meeting
from mindspeed.ops import availability, variants
from mindspeed.ops.speeds import Speed
from mindspeed.problems import Fix, MindSpeedError, Problem, RunError
from tests.warm_processes import warm_python

JOB = Path(__file__).with_name("agreement_job.py")
ROOT = Path(__file__).resolve().parents[3]
HERE = socket.gethostname()
FIX = "  fix: give all ranks the same job file, packages and environment"


class Rank:
    """A process of a job of two."""

    def __init__(self, rank: int, port: int, request: dict, path: list[Path], variables: dict[str, str]) -> None:
        launcher = ("MINDSPEED_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), "OMP_NUM_THREADS": "1"}
        environment |= {"MINDSPEED_AGREEMENT_TIMEOUT": "60"} | variables
        python = [sys.executable] if path else warm_python()  # what is installed is found once in a process
        command = [*python, str(JOB), json.dumps(request)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def done(self) -> Rank:
        self.out, self.err = self.process.communicate(timeout=120)
        self.ended = time.time()
        first, _, self.said = self.out.partition("\n")
        assert first.startswith("activating at "), self.err
        self.activated = float(first.removeprefix("activating at "))
        return self


@pytest.fixture
def job():
    """Run two ranks: ``job(first, second)``, each ``(request, search path, variables)``; gives the ranks that have ended."""
    started: list[Rank] = []

    def run(*ranks: tuple[dict, list[Path], dict[str, str]], port: int | None = None) -> list[Rank]:
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        new = [Rank(number, port, *rank) for number, rank in enumerate(ranks)]
        started.extend(new)
        return [rank.done() for rank in new]

    yield run
    for rank in started:
        rank.process.kill()


@pytest.fixture
def launcher_store():
    """A store as torchrun's agent keeps it, and the variables with which it says so."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}


def acme(folder: Path, version: str, glue: str) -> Path:
    """A package with one feature, as an installer lays it out."""
    folder.mkdir()
    (folder / "acme_glue.py").write_text(glue)
    (folder / "acme_feature.py").write_text(
        "from mindspeed.plugins import *\n"
        "class Acme(Feature):\n"
        '    spec = FeatureSpec("acme", Category.TOOL)\n'
        "    @hookimpl\n"
        "    def patches(self):\n"
        '        return [Wrap("megatron.core.utils:divide", "acme_glue:wrap", reason="made up")]\n'
    )
    info = folder / f"acme_ms-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-ms\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme = acme_feature:Acme\n")
    return folder


def megatron(folder: Path, patch: int) -> Path:
    """The installed megatron under another version number: links to its files, and a package_info.py of its own."""
    (folder / "megatron" / "core").mkdir(parents=True)
    installed = Path(find_spec("megatron").submodule_search_locations[0]) / "core"
    for entry in installed.iterdir():
        if entry.name not in ("package_info.py", "__pycache__"):
            (folder / "megatron" / "core" / entry.name).symlink_to(entry)
    info = f"MAJOR = 0\nMINOR = 16\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    (folder / "megatron" / "core" / "package_info.py").write_text(info)
    return folder


PLAIN = "def wrap(original):\n    return original\n"
RECOMPUTE = {"granularity": "full", "method": "uniform"}


def request(layers=1, **more):
    return {"features": ["recompute"], "settings": {"recompute": {**RECOMPUTE, "num_layers": layers}}, **more}


def pair(difference, folder):
    """Two ranks that differ in one thing, and how the message begins."""
    if difference == "setting":
        return (request(1), [], {}), (request(2), [], {}), "rank 1 has recompute.num_layers=2, rank 0 1"
    if difference == "version of a feature's package":
        packages = [acme(folder / version, version, PLAIN) for version in ("1.0", "1.1")]
        ranks = [({"features": ["acme"]}, [package], {}) for package in packages]
        return *ranks, "rank 1 has acme of acme-ms 1.1, rank 0 acme-ms 1.0"
    if difference == "content of a patch's file":
        packages = [acme(folder / name, "1.0", PLAIN + line) for name, line in (("a", ""), ("b", "# another line\n"))]
        ranks = [({"features": ["acme"]}, [package], {}) for package in packages]
        return *ranks, "rank 1 has acme_glue with content "
    if difference == "environment variable":
        ranks = [({}, [], {"CUDA_DEVICE_MAX_CONNECTIONS": value}) for value in ("8", "1")]
        return *ranks, "rank 1 has CUDA_DEVICE_MAX_CONNECTIONS=1, rank 0 8"
    trees = [megatron(folder / str(patch), patch) for patch in (2, 3)]
    return *(({}, [tree], {}) for tree in trees), "rank 1 has megatron 0.16.3, rank 0 0.16.2"


@pytest.mark.budget(12)
@pytest.mark.guards(52, processes=True)
@pytest.mark.parametrize(
    "difference",
    [
        "setting",
        pytest.param("version of a feature's package", marks=pytest.mark.long),
        pytest.param("content of a patch's file", marks=pytest.mark.long),
        pytest.param("environment variable", marks=pytest.mark.long),
        pytest.param("megatron", marks=pytest.mark.long),
    ],
)
def test_two_ranks_that_differ_in_one_thing_stop_and_say_what(job, tmp_path, launcher_store, difference):
    *ranks, told = pair(difference, tmp_path)
    store, variables = launcher_store
    ended = job(*((asked, path, {**own, **variables}) for asked, path, own in ranks), port=store.port)
    assert max(rank.ended for rank in ended) - max(rank.activated for rank in ended) < 5
    for rank in ended:
        assert (rank.process.returncode, rank.err) == (1, "")
        first, *more = rank.said.splitlines()
        assert first.startswith(f"MS610 the ranks have different plans: {told}")
        assert more[-2:] == [f"  because: rank 1 runs on {HERE}", FIX]
    assert ended[0].said == ended[1].said


@pytest.mark.long
def test_without_a_launcher_they_stop_when_they_make_their_process_group(job):
    ended = job((request(1), [], {}), (request(2), [], {}))
    assert max(rank.ended for rank in ended) - max(rank.activated for rank in ended) < 5
    for rank in ended:
        assert (rank.process.returncode, rank.err) == (1, "")
        assert rank.said == (
            "MS610 the ranks have different plans: rank 1 has recompute.num_layers=2, rank 0 1\n"
            "  because: rank 1 has recompute_num_layers=2, rank 0 1\n"
            "  because: rank 1 has Megatron argument recompute_num_layers=2, rank 0 1\n"
            f"  because: rank 1 runs on {HERE}\n"
            f"{FIX}\n"
        )


@pytest.mark.guards(38, processes=True)
@pytest.mark.long
@pytest.mark.parametrize("fails", [0, 1])
def test_a_failure_before_the_process_group_reaches_the_other_rank_as_text(job, fails):
    ranks = [(request(fail="no compiler" if rank == fails else ""), [], {}) for rank in range(2)]
    ended = job(*ranks)
    assert max(rank.ended for rank in ended) - max(rank.activated for rank in ended) < 10
    assert ended[fails].err.endswith("OSError: no compiler\n")
    assert ended[1 - fails].said == (
        f"MS612 rank {fails} failed during the setup of the job: OSError: no compiler\n  because: rank {fails} runs on {HERE}\n"
        f"  fix: check the log of rank {fails}\n"
    )


@pytest.mark.budget(12)
@pytest.mark.guards(38, processes=True)
def test_a_failure_reaches_ranks_that_wait_for_the_process_group(job, launcher_store):
    store, variables = launcher_store
    healthy, failing = job((request(), [], variables), (request(fail="no compiler"), [], variables), port=store.port)
    assert failing.err.endswith("OSError: no compiler\n")
    assert healthy.process.returncode == 1
    assert healthy.ended - failing.ended < 5
    assert healthy.err == (
        f"rank 0: MS612 rank 1 failed during the setup of the job: OSError: no compiler\n  because: rank 1 runs on {HERE}\n"
        "  fix: check the log of rank 1\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_that_ends_without_a_word_while_it_starts_is_named_by_the_other(job, launcher_store, ends):
    store, variables = launcher_store
    ranks = [(request(end=3 if rank == ends else None), [], variables) for rank in range(2)]
    ended = job(*ranks, port=store.port)
    assert [rank.process.returncode for rank in ended] == [3 if rank == ends else 1 for rank in range(2)]
    assert ended[1 - ends].ended - ended[ends].ended < 5
    assert ended[1 - ends].err == (
        f"rank {1 - ends}: MS612 rank {ends} ended during the setup of the job without an error message\n"
        f"  fix: check the log of rank {ends}; after a SIGKILL, see the kernel log of the node\n"
    )


@pytest.mark.long
def test_problems_of_all_ranks_are_printed_by_one_of_them(job, launcher_store):
    store, variables = launcher_store
    ended = job(*((request(layers, caught=False), [], variables) for layers in (1, 2)), port=store.port)
    first, other = sorted((rank.err for rank in ended), key=len, reverse=True)
    text = "MS610 the ranks have different plans: rank 1 has recompute.num_layers=2, rank 0 1"
    printed = 0 if first == ended[0].err else 1
    assert other == f"rank {1 - printed}: {text}; rank {printed} prints the details\n"
    assert first.splitlines()[0] == f"rank {printed}: {text}"
    assert first.splitlines()[-2:] == [f"  because: rank 1 runs on {HERE}", FIX]


@pytest.mark.long
def test_equal_ranks_go_on(job, launcher_store):
    store, variables = launcher_store
    ended = job((request(), [], variables), (request(), [], variables), port=store.port)
    assert [(rank.said, rank.err) for rank in ended] == [("rank 0 is ready\n", ""), ("rank 1 is ready\n", "")]


@pytest.mark.budget(12)
@pytest.mark.guards(52, processes=True)
@pytest.mark.parametrize("counts", [("0", "1"), ("1", "0")])
def test_ranks_of_a_later_start_meet_whatever_their_agents_count(job, launcher_store, counts):
    """After a failure on one node its agent counts a restart, and the other agent counts none."""
    store, variables = launcher_store
    variables |= {"TORCHELASTIC_MAX_RESTARTS": "3"}
    for first, second in (("0", "0"), counts):
        ranks = [(request(group=False), [], variables | {"TORCHELASTIC_RESTART_COUNT": count}) for count in (first, second)]
        ended = job(*ranks, port=store.port)
        assert [(rank.said, rank.err) for rank in ended] == [("rank 0 is ready\n", ""), ("rank 1 is ready\n", "")]


def test_a_rank_of_a_later_start_waits_for_its_rank_0(store):
    """The agreement of an earlier start says nothing of this one, and a meeting that rank 0 left is left by the others."""
    none = timedelta(milliseconds=1)
    assert (open_meeting(store), find_meeting(store, none, none)) == (0, 0)
    meeting(store, 0).set(VERDICT, AGREED)
    with pytest.raises(RuntimeError):
        find_meeting(store, none, none)
    assert (open_meeting(store), find_meeting(store, none, none)) == (1, 1)
    rank_of(meeting(store, 1), 1, {})
    assert open_meeting(store) == 2
    with pytest.raises(MovedError):
        agreement.agree(meeting(store, 1), 1, 2, {})
    assert find_meeting(store, none, none) == 2


def test_a_failure_before_rank_0_came_is_that_of_its_meeting(store):
    none = timedelta(milliseconds=1)
    agreement.publish_failure(meeting(store, newest(store)), Problem("MS612", "rank 1 failed"), 2, serving=False)
    assert (open_meeting(store), find_meeting(store, none, none)) == (0, 0)


@pytest.fixture
def store():
    from torch.distributed import HashStore

    return HashStore()


def rank_of(store, rank, facts, host="node"):
    """What another rank writes."""
    digest = fingerprint.digest_of(facts)
    store.set(f"content/{digest}", json.dumps(facts))
    store.set(f"rank/{rank}", f"{digest} {host}-{rank}")


def met(store, rank, size, facts):
    with pytest.raises(RunError) as caught:
        agreement.agree(store, rank, size, facts)
    return str(caught.value)


def test_the_minority_is_odd_and_each_group_is_told_once(store, monkeypatch):
    monkeypatch.setattr(agreement, "TOLD", 0.0)
    usual = {"setting ring-attention.window": "1", "feature ring-attention": "mindspeed 0.2.0"}
    for rank in range(1, 8):
        rank_of(store, rank, usual)
    for rank in (3, 5):
        rank_of(store, rank, usual | {"setting ring-attention.window": "2"})
    rank_of(store, 6, {})
    assert met(store, 0, 8, usual) == (
        (
            "MS610 the ranks have different plans: ranks 3, 5 have ring-attention.window=2, the others 1\n"
            "  because: rank 6 has no feature ring-attention, the others have ring-attention of mindspeed 0.2.0\n"
            "  because: rank 6 has no setting ring-attention.window, the others have ring-attention.window=1\n"
            "  because: rank 3 runs on node-3\n"
            "  because: rank 5 runs on node-5\n"
            "  because: rank 6 runs on node-6\n"
        )
        + FIX
    )


@pytest.mark.guards(52)
def test_a_thousand_ranks_agree_in_a_second(store):
    facts = {f"source module{number}": "0123456789abcdef" for number in range(100)}
    for rank in range(1, 1000):
        rank_of(store, rank, facts)
    start = time.monotonic()
    agreement.agree(store, 0, 1000, facts)
    assert time.monotonic() - start < 1
    agreement.agree(store, 999, 1000, facts)


def test_ranks_that_do_not_come_are_named(store, monkeypatch):
    monkeypatch.setenv(agreement.TIMEOUT, "0.2")
    monkeypatch.setattr(agreement, "TOLD", 0.0)
    rank_of(store, 2, {})
    told = (
        "MS611 ranks 1, 3-4 of 5 did not activate a plan within 0 s\n"
        "  fix: check the log of ranks 1, 3-4; set MINDSPEED_AGREEMENT_TIMEOUT=SECONDS to wait longer"
    )
    assert met(store, 0, 5, {}) == told
    assert met(store, 2, 5, {}) == told


@pytest.mark.parametrize(("restarts", "named"), [("0", False), ("2", True)])
def test_after_a_restart_with_a_store_of_each_agent_the_variable_is_named(store, monkeypatch, restarts, named):
    monkeypatch.setenv(agreement.TIMEOUT, "0.1")
    monkeypatch.setattr(agreement, "SLACK", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    assert ("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in met(store, 1, 2, {})) is named


def test_after_a_while_rank_0_prints_for_whom_it_is_waiting(store, monkeypatch, capsys):
    monkeypatch.setenv(agreement.TIMEOUT, "0.3")
    for name in ("TOLD", "REPORTED"):
        monkeypatch.setattr(agreement, name, 0.0)
    rank_of(store, 2, {})
    met(store, 0, 5, {})
    assert capsys.readouterr().err == "mindspeed: waiting for ranks 1, 3-4 of 5 to activate a plan, for at most 0 s\n"


def test_the_first_rank_that_has_problems_prints_them(store):
    assert [agreement.reporter(store, rank, text) for rank, text in ((3, "a"), (0, "a"), (0, "b"))] == [3, 3, 0]


def test_a_rank_that_does_not_print_the_problems_has_one_line():
    problems = [Problem("MS301", "a setting does not exist", fix=Fix.give_setting("other", 1)), Problem("MS302", "another")]
    rank = {"RANK": "2", "WORLD_SIZE": "4"}
    whole = "MS301 a setting does not exist\n  fix: --set other=1"
    lines = rendezvous.problem_lines
    assert lines(MindSpeedError(problems[:1]), 2, rank) == f"rank 2: {whole}"
    assert lines(MindSpeedError(problems[:1]), None, {"RANK": "0", "WORLD_SIZE": "1"}) == whole
    one = "rank 2: MS301 a setting does not exist and 1 more problem; rank 0 prints the details"
    assert lines(MindSpeedError(problems), 0, rank) == one


def test_without_rank_0_the_others_name_it(store, monkeypatch):
    monkeypatch.setenv(agreement.TIMEOUT, "0.1")
    monkeypatch.setattr(agreement, "SLACK", 0.1)
    assert met(store, 1, 2, {}).startswith("MS611 rank 0 of 2 did not activate a plan within 0 s\n")


def test_a_problem_of_another_rank_keeps_its_text_and_its_fix():
    error = MindSpeedError([Problem("MS301", "a setting does not exist", fix=Fix.give_setting("other", 1))])
    assert str(agreement.failed_rank(7, error)) == (
        "MS612 rank 7 failed during the setup of the job: MS301 a setting does not exist\n"
        "  because: fix: --set other=1\n"
        f"  because: rank 7 runs on {HERE}\n"
        "  fix: check the log of rank 7"
    )


def test_helpers_of_a_rank_agree_with_nobody(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    kept = {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.setenv(rendezvous.JOINED, f"{rendezvous.place_in(kept).name} {os.getpid() + 1}")
    asked = []
    rendezvous.begin(lambda: asked.append(1) or {}, kept)
    assert asked == []


def test_what_a_plan_is_made_of_names_no_folder(tmp_path):
    environment = made_up("cuda", "0.16.1", "2.13.0")
    plan = registry.plan(["swiglu"], world={"activation": "silu", "gated_linear_unit": True}, environment=environment)
    facts = registry.content_of(plan, {"NCCL_ALGO": "Ring", "HOME": "/root", "MINDSPEED_PLAN": "/tmp/plan"})
    assert facts["feature swiglu"].startswith("mindspeed ")
    assert facts["variable NCCL_ALGO"] == "Ring"
    assert facts["source mindspeed.features.swiglu.layers"] == facts["source mindspeed.features.swiglu.layers"].lower()
    assert not [value for value in (*facts, *facts.values()) if "/" in value]


def test_ranks_with_one_digest_are_compared_on_the_facts_of_their_machines():
    plan = registry.plan(["swiglu"], world={"activation": "silu", "gated_linear_unit": True}, platform="cpu")
    here = registry.content_of(plan, {}) | {"version torch": "2.13.0", "operator swiglu": "C++"}
    contents = {"a": here, "b": here | {"version torch": "2.12.0", "operator swiglu": "reference"}}
    problem = agreement.compare(contents, {"a": [0, 1, 3], "b": [2]}, dict.fromkeys(range(4), HERE))
    assert len({content["plan"] for content in contents.values()}) == 1
    assert str(problem) == (
        "MS610 the ranks have different plans: rank 2 has torch 2.12.0, the others 2.13.0\n"
        "  because: rank 2 has the operator swiglu as reference, the others C++\n"
        f"  because: rank 2 runs on {HERE}\n"
        f"{FIX}, or where measured times of operators differ, run mindspeed ops build on every machine or name the features"
    )


def test_ranks_that_measured_other_times_are_told_to_measure_them_or_to_name_the_features(monkeypatch):
    monkeypatch.setattr(availability, "variant", lambda op, platform: "C++")
    monkeypatch.setattr(availability._Machine, "built", frozenset({"swiglu"}))
    monkeypatch.setattr(variants, "variants", lambda platform: {"swiglu"})
    contents = []
    for without in (2.0, 0.5):
        monkeypatch.setattr(availability._Machine, "speeds", (Speed("swiglu", "bf16", 1.0, None, without, "a product"),))
        world = {"activation": "silu", "gated_linear_unit": True, "dtype": "bf16"}
        contents.append(registry.content_of(registry.plan([], world=world, platform="cpu"), {}))
    added, left_out = contents
    products = added | {"operator swiglu": "C++, torch's products in bf16"}
    for other in (left_out, products):
        problem = agreement.compare({"a": added, "b": other}, {"a": [0], "b": [1]}, dict.fromkeys(range(2), HERE))
        assert "run mindspeed ops build on every machine or name the features" in problem.fix_text
    assert problem.message == (
        "the ranks have different plans: rank 1 has the operator swiglu as C++, torch's products in bf16, rank 0 C++"
    )


def test_a_rank_whose_operators_are_not_built_is_odd(monkeypatch):
    plan = registry.plan(features=["swiglu"], platform="cpu")
    monkeypatch.setattr(availability, "variant", lambda op, platform: "C++")
    monkeypatch.setattr(availability._Machine, "built", frozenset({"swiglu"}))
    built = registry.content_of(plan, {})
    monkeypatch.setenv("MINDSPEED_OPS", "reference")
    bare = registry.content_of(plan, {})
    (key,) = [key for key in fingerprint.diff(built, bare) if key == "operator swiglu"]
    assert fingerprint.describe(key, bare[key]) == "the operator swiglu as reference"
    assert fingerprint.describe_value(key, built[key]) == "C++"
