"""A checkpoint knows its features: what becomes of it in a job that has others, and what features declare about that."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.engine.planning import checkpoint_state as states
from mindspeed.engine.planning import fingerprint
from mindspeed.engine.planning.checkpoint_layers import conversion
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlannedFeature, Value
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.world import World
from mindspeed.plugins import Category, CheckpointState, Feature, FeatureSpec, hookimpl
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from mindspeed.problems import RunError
from mindspeed.workbench.training.checkpoints import checkpoint_path, find_checkpoint
from tests.workbench.training.conftest import TINY, Run, losses


def made_up(name, **state):
    class MadeUp(Feature):
        spec = FeatureSpec(name, Category.TOOL, state=CheckpointState(**state))

    return DiscoveredFeature(name, "acme", "1.0", "acme:MadeUp", MadeUp)


class Secret(Feature):
    """Saves data and does not say so."""

    spec = FeatureSpec("secret", Category.TOOL)

    @hookimpl
    def save_extra(self, state):
        return {}


CATALOG = Catalog(
    [
        made_up("plain"),
        made_up("cut", kind="resharded", settings={"words": "safe"}),
        made_up("counted", kind="own", reason="it counts", changed="safe", settings={"groups": "refused"}),
        made_up("averages", kind="own", reason="it keeps averages of the weights", added="safe"),
        made_up("strict", added="refused", removed="refused", reason="its weights have other names"),
        DiscoveredFeature("secret", "acme", "1.0", "acme:Secret", Secret),
    ]
)


def plan(*features, version="1.0", **settings):
    """A plan of features; ``cut={"size": 2}`` are the settings of one."""
    planned = (
        PlannedFeature(name, "acme", version, (), {k: Value(v, "test") for k, v in settings.get(name, {}).items()})
        for name in features
    )
    return ActivationPlan(tuple(planned), World({}), environment={"platform": "cpu"})


def classes(plan, catalog):
    return {name: catalog.feature(name) for name in plan.names if name in catalog.usable}


def content_of(plan, catalog):
    return fingerprint.content_of(plan, catalog, lambda operators, platform: {})


def record_of(plan, catalog=CATALOG):
    return states.record_of(plan, classes(plan, catalog), content_of(plan, catalog))


def changes(record, plan, catalog=CATALOG, folder=Path("run")):
    return states.changes(record, plan, classes(plan, catalog), content_of(plan, catalog), folder)


def told(saved, now):
    """What is said of a checkpoint of one plan that a job with another plan resumes."""
    found = changes(record_of(saved), now, CATALOG)
    return [str(change) for change in found]


DENSE = b"decoder.layers.mlp.linear_fc1.layer_norm_weight "
ROUTER = b"decoder.layers.mlp.router.weight "
ROUTED = ROUTER + b"decoder.layers.pre_mlp_layernorm.weight "
LATENT = b"decoder.layers.self_attention.linear_kv_up_proj.weight "
ENGINE = b"decoder.final_layernorm._extra_state"
ON_ENGINE = {"transformer_engine_layers": True, "engine_over_local": True}
ON_REAL_ENGINE = {"transformer_engine_layers": True}
ON_LOCAL = {"transformer_engine_layers": False}


@pytest.mark.parametrize(
    ("index", "world", "refused"),
    [
        (DENSE, ON_ENGINE, "Transformer Engine's"),
        (DENSE, ON_REAL_ENGINE, None),  # its version decides
        (DENSE + ROUTER, ON_REAL_ENGINE, "Transformer Engine's"),
        (ROUTED, ON_REAL_ENGINE, None),
        (LATENT + ROUTED, ON_REAL_ENGINE, None),
        (LATENT + ROUTED + b"self_attention.kv_layernorm.weight", ON_REAL_ENGINE, "Transformer Engine's"),
        (DENSE, ON_LOCAL, None),
        (DENSE + ENGINE, ON_ENGINE, None),
        (DENSE + ENGINE, ON_LOCAL, None),
        (ROUTED + ENGINE, ON_LOCAL, "Megatron's local"),
        (ROUTED + ENGINE, {}, None),
        (LATENT + ROUTED + ENGINE, ON_LOCAL, None),
        (LATENT + DENSE + ENGINE, ON_LOCAL, "Megatron's local"),
        (LATENT + b"_up_proj.layer_norm_weight" + ENGINE, ON_LOCAL, "Megatron's local"),
        (b"weight", ON_ENGINE, None),
    ],
)
def test_a_checkpoint_with_the_names_of_other_layers_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, index: bytes, world: dict[str, bool], refused: str | None
) -> None:
    folder = checkpoint_path(tmp_path / "run", 2)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(index)
    plan = ActivationPlan((), World(world), environment={"platform": "cpu"})
    record = states.CheckpointManifest((), "", {})
    found = states.refusals(states.changes(record, plan, {}, {}, folder), str(folder))
    kind, other = "transformer-engine", "Megatron's local"
    if refused == other:
        kind, other = "local", "Transformer Engine's"
    assert [str(problem) for problem in found] == [
        (
            f"MS613 the checkpoint contains {other} layers, but the job builds {refused} layers: their parameters have "
            "different names\n"
            f"  where: {folder}\n"
            f"  fix: mindspeed checkpoint convert {tmp_path}/run {tmp_path}/run-{kind} --to {kind}"
        )
    ] * (refused is not None)


def test_a_checkpoint_of_megatron_lm_is_converted_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "iter_0000010"
    assert conversion(folder, "local") == f"mindspeed checkpoint convert {folder} {folder}-local --to local"
    folder.mkdir(parents=True)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("10")
    where = tmp_path / "saved"
    assert conversion(folder, "local") == f"mindspeed checkpoint convert {where} {where}-local --to local"


def test_an_equal_plan_has_nothing_to_tell():
    assert told(plan("plain", "averages"), plan("plain", "averages")) == []


@pytest.mark.parametrize(
    ("saved", "now", "verdict"),
    [
        (plan("plain"), plan(), "safe         plain was removed: it adds no data to checkpoints"),
        (plan(), plan("plain"), "safe         plain was added: it adds no data to checkpoints"),
        (plan("cut"), plan(), "convertible  cut was removed: Megatron's distributed checkpoints can be resharded"),
        (plan(), plan("averages"), "safe         averages was added: it keeps averages of the weights"),
        (plan("averages"), plan(), "refused      averages was removed: it keeps averages of the weights"),
        (plan(), plan("strict"), "refused      strict was added: its weights have other names"),
        (plan("secret"), plan(), "refused      secret was removed: it stores separate data"),
        (
            plan("cut", cut={"size": 2}),
            plan("cut", cut={"size": 4}),
            "convertible  cut.size changed from 2 to 4: Megatron's distributed checkpoints can be resharded",
        ),
        (
            plan("cut", cut={"words": "a"}),
            plan("cut", cut={"words": "b"}),
            "safe         cut.words changed from a to b: Megatron's distributed checkpoints can be resharded",
        ),
        (
            plan("counted", counted={"groups": 4}),
            plan("counted", counted={"groups": 2}),
            "refused      counted.groups changed from 4 to 2: it counts",
        ),
        (
            plan("counted", counted={"groups": None}),
            plan("counted", counted={"groups": 2}),
            "safe         counted.groups changed from null to 2: it counts",
        ),
        (
            plan("averages", version="1.0"),
            plan("averages", version="1.1"),
            "convertible  averages changed from acme 1.0 to acme 1.1: it keeps averages of the weights",
        ),
    ],
)
@pytest.mark.guards(41)
def test_each_difference_is_safe_convertible_or_refused_by_what_the_feature_declares(saved, now, verdict):
    assert told(saved, now) == [verdict]


def test_a_parallel_size_of_one_is_the_same_as_no_feature():
    class Sized(Feature):
        spec = FeatureSpec("sized", Category.TOOL, sizes={"ep": "size"}, state=CheckpointState("resharded", removed="refused"))

    catalog = Catalog([DiscoveredFeature("sized", "acme", "1.0", "acme:Sized", Sized)])
    one, two, four = (plan("sized", sized={"size": size}) for size in (1, 2, 4))
    reason = "Megatron's distributed checkpoints can be resharded"
    assert [str(change) for change in changes(record_of(two, catalog), one, catalog)] == [
        f"refused      sized was removed: {reason}"
    ]
    assert [str(change) for change in changes(record_of(two, catalog), four, catalog)] == [
        f"convertible  sized.size changed from 2 to 4: {reason}"
    ]
    assert changes(record_of(one, catalog), plan(), catalog) == []


def test_refused_differences_come_first_and_say_how_to_go_back():
    saved, now = plan("averages", "cut", averages={"decay": 0.9}, cut={"size": 2}), plan("cut", cut={"size": 4})
    found = changes(record_of(saved), now, CATALOG)
    assert [change.verdict for change in found] == ["refused", "convertible"]
    assert [str(problem) for problem in states.refusals(found, "run/checkpoints/step-2")] == [
        "MS613 averages was removed: it keeps averages of the weights\n  where: run/checkpoints/step-2\n"
        "  fix: --features averages --set averages.decay=0.9"
    ]
    (problem,) = states.refusals(found, "run/checkpoints/step-2", "--no-load-optim to keep this job")
    assert problem.fix_text == "--features averages --set averages.decay=0.9, or --no-load-optim to keep this job"


def test_a_checkpoint_with_a_file_per_rank_is_not_convertible(tmp_path):
    """It is what Megatron-LM saves with --ckpt-format torch."""
    saved, now = plan("cut", cut={"size": 2}), plan("cut", cut={"size": 4})
    (tmp_path / "mp_rank_00").mkdir()
    (change,) = changes(record_of(saved), now, folder=tmp_path)
    reason = "the checkpoint stores the weights of each rank in a file (format torch), which no other layout can load"
    assert (change.verdict, change.reason, change.fix) == ("refused", reason, "--set cut.size=2")
    assert changes(record_of(saved), saved, folder=tmp_path) == []


@pytest.mark.guards(40)
def test_a_feature_that_is_gone_is_judged_by_what_it_declared_when_it_was_saved(tmp_path):
    record_of(plan("averages")).write(tmp_path)
    record = states.read_record(tmp_path)
    (change,) = changes(record, plan(), Catalog([]))
    assert (change.feature, change.verdict) == ("averages", "refused")


def test_versions_and_files_of_the_software_are_told_and_safe():
    record = record_of(plan("plain"))
    older = replace(record, content={**record.content, "version megatron": "0.15.3"})
    (change,) = changes(older, plan("plain"), CATALOG)
    assert (change.verdict, change.what) == ("safe", f"megatron changed from 0.15.3 to {record.content['version megatron']}")


FEATURE = {"name": "a", "distribution": "acme", "version": "1", "settings": {}, "state": {}}
RECORD = {"format": 1, "features": [FEATURE], "plan": "digest", "content": {}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "Input should be an object"),
        ("{}", "features: Field required; plan: Field required; format: Field required"),
        (json.dumps(RECORD | {"format": 2}), "format: Input should be 1"),
        (json.dumps(RECORD | {"features": 5}), "features: Input should be a valid array"),
        (json.dumps(RECORD | {"features": [FEATURE | {"settings": 5}]}), "features.0.settings: Input should be an object"),
        (
            json.dumps(RECORD | {"features": [FEATURE | {"state": {"kind": "?"}}]}),
            "features.0.state.kind: Input should be 'none', 'resharded' or 'own'",
        ),
        (json.dumps(RECORD | {"content": {"a": []}}), "content.a: Input should be a valid string"),
        ("[" * 100_000, "Invalid JSON: recursion limit exceeded at line 1 column 202"),
    ],
)
def test_a_damaged_record_is_a_problem_that_names_the_part(tmp_path, text, why):
    path = tmp_path / states.FILE
    path.write_text(text)
    with pytest.raises(RunError) as caught:
        states.read_record(tmp_path)
    assert str(caught.value) == (
        f"MS602 the features of the checkpoint cannot be read: {why}\n  where: {path}\n"
        "  fix: resume an earlier checkpoint of the run, or copy this one again"
    )


def test_a_checkpoint_may_have_no_record(tmp_path):
    assert states.read_record(tmp_path) is None


def test_what_is_written_is_read(tmp_path):
    record = record_of(plan("averages", cut={"size": 2}))
    record.write(tmp_path)
    assert states.read_record(tmp_path) == record


@pytest.mark.parametrize("text", ["5", "null", "[]", "[" * 100_000, "{", '{"sharded_backend": 1, "common_backend": 1}'])
def test_metadata_of_a_wrong_type_is_that_of_a_checkpoint_with_a_common_file(tmp_path, text):
    (tmp_path / "metadata.json").write_text(text)
    assert states.keeps_common_file(tmp_path)


def diff(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "diff", *map(str, arguments)], catch_exceptions=False)


def test_a_checkpoint_is_compared_before_anything_is_launched(make_run):
    run = make_run(Layer("job file"))
    tiny = ("--platform", "cpu", "--world-size", 2)
    done = diff(run, *tiny, "--features", "distributed-optimizer")
    assert done.exit_code == 1
    reason = "Megatron saves sharded and replicated optimizers in formats that cannot load each other"
    assert done.stdout.splitlines()[:2] == [
        f"refused      distributed-optimizer was added: {reason}",
        "               fix: --without distributed-optimizer",
    ]
    done = diff(run, *tiny, "--tp", 2, "--json")
    data = json.loads(done.stdout)
    assert (done.exit_code, data["checkpoint"]) == (0, str(find_checkpoint(run)))
    (change,) = [change for change in data["changes"] if change["feature"] == "tensor-parallel"]
    assert change == {
        "feature": "tensor-parallel",
        "what": "tensor-parallel was added",
        "verdict": "convertible",
        "reason": "weights are saved whole, as slices that any other layout can load",
        "saved": "",
        "now": change["now"],
        "fix": "--without tensor-parallel",
    }


def test_resuming_with_an_optimizer_of_another_format_is_refused_before_a_process_starts(make_run):
    run = make_run(Layer("job file"))
    added = ["--nproc", "2", "--features", "distributed-optimizer"]
    done = CliRunner().invoke(main, ["pretrain", "--resume", str(run), *added])
    reason = "Megatron saves sharded and replicated optimizers in formats that cannot load each other"
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"MS613 distributed-optimizer was added: {reason}\n  where: {find_checkpoint(run)}\n"
        "  fix: --without distributed-optimizer\n"
    )


ACME = '''
from mindspeed.plugins import *


class Acme(Feature):
    """Counts the steps of all runs."""

    spec = FeatureSpec("acme", Category.TOOL, state=CheckpointState("own", "it counts steps"{more}))
    count = 0

    @hookimpl
    def around_train_step(self, state):
        from contextlib import nullcontext
        self.count += 1
        return nullcontext()

    @hookimpl
    def save_extra(self, state):
        return {{"count": self.count}}

    @hookimpl
    def load_extra(self, state, data):
        self.count = data["count"]
'''


@pytest.fixture
def acme(tmp_path):
    """Environment of a process that has the package; ``acme(more)`` writes it with more of a declaration."""

    def write(more=""):
        folder = tmp_path / "packages"
        (folder / "acme-1.0.dist-info").mkdir(parents=True, exist_ok=True)
        (folder / "acme-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (folder / "acme-1.0.dist-info" / "entry_points.txt").write_text("[mindspeed.features]\nacme = acme_feature:Acme\n")
        (folder / "acme_feature.py").write_text(ACME.format(more=more))
        launcher = ("MINDSPEED_", "SLURM_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}

    return write


@pytest.mark.long
@pytest.mark.guards(41, processes=True)
def test_data_of_a_feature_comes_back_and_is_never_dropped_silently(tmp_path, text, acme):
    run = tmp_path / "run"
    steps = ("--data", text, "--run", run, "--train-iters", 2)
    Run(*TINY, *steps, "--features", "acme", cold=True, env=acme()).done()
    done = Run("--resume", run, "--train-iters", 4, "--without", "acme", cold=True, env=acme()).done(status=1)
    assert done.err == (f"MS613 acme was removed: it counts steps\n  where: {find_checkpoint(run)}\n  fix: --features acme\n")
    Run("--resume", run, "--train-iters", 4, cold=True, env=acme()).done()
    import torch

    common = torch.load(checkpoint_path(run, 4) / "common.pt", weights_only=False)
    assert common["extra"] == {"acme": {"count": 4}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "nproc", "converted"),
    [
        ("--pp 2", "--pp 2 --vpp 2 --global-batch-size 8", 2, "virtual-pipeline was added"),
        ("--pp 2 --vpp 2 --global-batch-size 8", "--pp 2 --vpp 1", 2, "virtual-pipeline was removed"),
        ("--tp 2", "--tp 1", 2, "tensor-parallel was removed"),
        ("--num-experts 4 --ep 2 --global-batch-size 8", "--ep 4", 4, "expert-parallel.size changed from 2 to 4"),
    ],
)
def test_what_is_declared_convertible_is_converted(tmp_path, text, before, after, nproc, converted):
    run, rest = tmp_path / "run", tmp_path / "rest"
    train = ("--train-iters", 6, "--save-interval", 3)
    Run(*TINY, "--nproc", nproc, *before.split(), *train, "--data", text, "--run", run).done()
    shutil.rmtree(checkpoint_path(run, 6))
    done = Run("--resume", run, "--run", rest, "--nproc", nproc, *after.split()).done()
    assert f"  convertible  {converted}: " in done.out
    whole, resumed = losses(run), losses(rest)
    if "batch" not in after:  # the same samples
        assert [resumed[step] for step in (4, 5, 6)] == pytest.approx([whole[step] for step in (4, 5, 6)], rel=1e-4)
    assert resumed[4] < whole[1] - 0.2


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--features distributed-optimizer", "--without distributed-optimizer"),
        ("", "--features distributed-optimizer"),
        ("--num-experts 4 --ep 2", "--ep 1"),
        ("--num-experts 4", "--ep 2"),
    ],
)
def test_what_is_declared_refused_is_what_megatron_cannot_load(tmp_path, text, before, after):
    """The refusal is taken out of the checkpoint, and Megatron then fails by itself."""
    run = tmp_path / "run"
    Run(*TINY, "--nproc", 2, *before.split(), "--train-iters", 2, "--data", text, "--run", run).done()
    refused = Run("--resume", run, "--nproc", 2, *after.split(), "--train-iters", 4).done(status=1)
    assert refused.err.startswith("MS613 ")
    checkpoint = find_checkpoint(run)
    (checkpoint / states.FILE).unlink()
    manifest = json.loads((checkpoint / "mindspeed.json").read_text())
    optimizer = "distributed" if "--features" in after else "plain"
    (checkpoint / "mindspeed.json").write_text(json.dumps({**manifest, "optimizer": optimizer}))
    failed = Run("--resume", run, "--nproc", 2, *after.split(), "--train-iters", 4).done(status=1)
    assert failed.err.startswith(("MS602 ", "MS604 "))


def test_every_built_in_feature_that_cuts_the_checkpoint_says_so():
    from mindspeed import registry

    kinds = {name: spec.state.kind for name, spec in registry.catalog().specs.items()}
    cutting = {name for name, kind in kinds.items() if kind == "resharded"}
    sizes = {name for name, spec in registry.catalog().specs.items() if set(spec.sizes) & {"tp", "pp", "vpp", "cp", "ep"}}
    others = {"distributed-optimizer", "dualpipev", "moe-grouped-gemm", "noop-layers", "tensor-parallel-2d", "zero-bubble"}
    assert cutting == {*sizes, *others}
    assert [name for name, kind in kinds.items() if kind == "own"] == ["deepspeed-moe"]


@pytest.fixture
def checkpoint(tmp_path):
    """Make a folder as Megatron writes it: ``checkpoint("torch")`` has a file for the common state."""

    def make(common):
        backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backends |= {"common_backend": common} if common else {}
        (tmp_path / "metadata.json").write_text(json.dumps(backends))
        if common:
            (tmp_path / "common.pt").write_bytes(b"")
        return tmp_path

    return make


@pytest.mark.parametrize("version", ["0.14.0", "0.16.1", "0.18.2"])
def test_a_format_that_an_older_megatron_cannot_read_is_named(checkpoint, version):
    folder = checkpoint("")
    assert str(states.unreadable_format(folder, version)) == (
        "MS602 the checkpoint uses the torch_dist format of megatron-core 0.19 and newer, without common.pt, which "
        f"megatron-core {version} cannot read\n"
        f"  where: {folder}\n"
        "  fix: resume it with megatron-core 0.19 or newer, which reads both formats"
    )
    assert states.unreadable_format(folder, "0.19.1") is None


def test_shards_of_an_optimizer_that_megatron_014_cannot_read_are_named(checkpoint):
    folder = checkpoint("torch")
    (folder / ".metadata").write_bytes(b"pickled: state_dict_metadata")
    assert str(states.unreadable_format(folder, "0.14.0", shards_optimizer=True)) == (
        "MS602 the checkpoint uses distributed optimizer state in the shapes of the parameters, as saved by "
        "megatron-core 0.15 and newer, which megatron-core 0.14.0 cannot read\n"
        f"  where: {folder}\n"
        "  fix: resume it with megatron-core 0.15 or newer, which reads this format"
    )
    assert states.unreadable_format(folder, "0.14.0") is None
    assert states.unreadable_format(folder, "0.15.0", shards_optimizer=True) is None
    (folder / ".metadata").write_bytes(b"pickled: nd_reformulated_orig_global_shape")
    assert states.unreadable_format(folder, "0.14.0", shards_optimizer=True) is None


def test_a_checkpoint_with_its_common_file_is_read_by_every_megatron(checkpoint, tmp_path):
    assert states.unreadable_format(tmp_path / "absent", "0.16.1") is None
    folder = checkpoint("torch")
    assert [states.unreadable_format(folder, version) for version in ("0.16.1", "0.19.1", "0.20.0", None)] == [None] * 4
