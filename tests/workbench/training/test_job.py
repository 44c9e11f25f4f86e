import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import mindspeed
from mindspeed.cli import main
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.diagnostics import doctor
from mindspeed.workbench.training.config import train_config
from mindspeed.workbench.training.job import Job
from mindspeed.workbench.training.request_text import job_file
from mindspeed.workbench.training.shape import trainer_layer


@pytest.fixture
def refuse(monkeypatch, tmp_path):
    """Run ``mindspeed pretrain`` where it must refuse before it starts anything, and give its problems."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MINDSPEED_FEATURES", "MINDSPEED_SET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments):
        done = CliRunner().invoke(main, ["pretrain", *map(str, arguments), "--json"], catch_exceptions=False)
        assert done.exit_code in (1, 3)
        assert not (tmp_path / "runs").exists()
        return {problem["message"]: problem for problem in json.loads(done.stdout)["problems"]}

    return refuse


def test_everything_that_is_wrong_is_reported_at_once(refuse, tmp_path):
    (tmp_path / "job.yaml").write_text(
        "world: {hidden_size: 30, micro_batch_size: 3}\ntrain: {train_iter: 3, lr: fast, data: none}\n"
    )
    problems = refuse(
        "-f",
        "job.yaml",
        "--features",
        "tensor-paralel",
        "--dtype",
        "fp8",
        "--resume",
        "gone",
        "--mtp-num-layers",
        "2",
        "--recompute-granularity",
        "full",
    )
    assert {(problem["code"], message) for message, problem in problems.items()} == {
        ("MS305", "the job file cannot be opened: [Errno 2] No such file or directory: 'gone/job.yaml'"),
        ("MS305", "unknown key 'train_iter' in train"),
        ("MS301", "train.lr is 'fast': input should be a valid number, unable to parse string as a number"),
        ("MS601", "there is no none.idx and no none.bin"),
        ("MS301", "dtype is 'fp8', which is not one of fp32, bf16, fp16"),
        ("MS301", "mtp_num_layers is 2, but mindspeed pretrain does not build such a model"),
        ("MS301", "recompute_granularity is full, but mindspeed pretrain does not build such a model"),
        ("MS302", "hidden size 30 is not a multiple of the 4 attention heads"),
        ("MS302", "global batch size 8 is not a multiple of micro batch size 3"),
        ("MS201", "the feature 'tensor-paralel' does not exist"),
        ("MS602", "the run gone does not exist"),
    }


def test_a_hybrid_model_that_the_trainer_does_not_build_is_refused(refuse):
    version = "a HybridModel needs megatron-core >=0.19, but the version is 0.16.1"
    layers = "mindspeed pretrain supports only * - E (attention, MLP, experts) in a hybrid layer pattern\n    *-+-\n      ^"
    assert [*refuse("--hybrid-layer-pattern", "*-+-", "--megatron", "0.16.1")][:2] == [version, layers]
    newer = refuse("--hybrid-layer-pattern", "*-+-", "--megatron", "0.19.1")
    assert layers in newer
    assert version not in newer


def test_a_missing_megatron_says_how_to_get_it(refuse, monkeypatch, text):
    monkeypatch.setattr(doctor, "megatron_copies", lambda: ())
    (problem,) = refuse("--data", text).values()
    assert problem["code"] == "MS502"
    assert problem["message"] == "megatron-core: not installed"
    assert problem["fix"] == "pip install 'mindspeed[train]'"


def test_too_little_text_is_told_before_training(refuse, text):
    problems = refuse("--data", text, "--seq-length", 8192)
    (message,) = problems
    assert message.startswith(f"the held-out part of {text} has ")
    assert message.endswith(" tokens, but a sample needs 8193")


def test_a_vocabulary_that_is_smaller_than_the_data_needs_is_refused(refuse, text):
    assert "vocab_size is 128, but the tokenizer of the data has 257 tokens" in refuse("--data", text, "--vocab-size", 128)


def test_a_folder_with_a_run_is_not_overwritten(refuse, make_run, text):
    run = make_run(Layer("job file"))
    problem = refuse("--data", text, "--run", run)[f"the folder {run} already contains a run with checkpoints"]
    assert problem["fix"] == f"--resume {run} continues that run; use another --run for a new one"


def test_a_dry_run_says_what_a_resume_would_do_and_writes_nothing(make_run, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    run = make_run(Layer("job file"))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    arguments = ["pretrain", "--resume", str(run), "--train-iters", "40", "--dry-run"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.endswith(f"would train up to step 40 in {run}; nothing was started or written\n")
    assert "the learning rate keeps its schedule, whose decay ends at step 20" in done.stdout
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert (found["run"], found["train"]["decay_iters"]) == (str(run), 20)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_length_belongs_to_a_model_that_has_a_table_of_positions_and_to_no_other():
    def model_of(*features, rotary):
        world = {"world_size": 1, "rotary": rotary, "seq_length": 64}
        chosen = mindspeed.plan(features, platform="cpu", world=world)
        return Job(chosen, train_config({})[0], run="", data="").model

    assert model_of(rotary=False)["seq_length"] == 64
    assert model_of(rotary=True)["rotary_base"] == 10000
    assert {"seq_length", "rotary_base"}.isdisjoint(model_of("alibi", rotary=False))


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(refuse, make_run):
    run = make_run(Layer("job file"))
    problem = refuse("--resume", run, "--hidden-size", 64, "--dtype", "bf16")[
        "the checkpoint and this job have different models"
    ]
    assert problem["code"] == "MS602"
    assert problem["chain"] == [
        "hidden_size is 32 in the checkpoint, but 64 in this job",
        "ffn_hidden_size is 96 in the checkpoint, but 192 in this job",
        "kv_channels is 8 in the checkpoint, but 16 in this job",
        "dtype is fp32 in the checkpoint, but bf16 in this job",
    ]


def test_a_damaged_data_file_is_refused(refuse, text, tmp_path):
    for suffix in (".idx", ".bin", ".json"):
        content = Path(text + suffix).read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(content[:-1] if suffix == ".idx" else content)
    (message,) = refuse("--data", tmp_path / "cut")
    assert message.startswith(f"{tmp_path / 'cut'}.idx cannot be read: the file has ")


def test_a_job_file_asks_for_what_its_layers_asked_together():
    layers = [
        Layer("job file", ("tensor-parallel",), {"tensor-parallel": {"size": 2}}, {"num_layers": 2, "world_size": 2}),
        Layer("command line", ("sequence-parallel",), {}, {"num_layers": 4}, strict=True),
    ]
    train = {"job file": {"lr": 0.1, "run": "here"}, "command line": {"lr": 0.2}}
    assert yaml.safe_load(job_file(layers, train)) == {
        "features": ["tensor-parallel", "sequence-parallel"],
        "settings": {"tensor-parallel": {"size": 2}},
        "world": {"num_layers": 4},
        "train": {"lr": 0.2},
        "strict": True,
    }


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("llama", {"normalization": "RMSNorm", "gated_linear_unit": True, "num_query_groups": 4, "ffn_hidden_size": 192}),
        ("gpt2", {"normalization": "LayerNorm", "gated_linear_unit": False, "num_query_groups": 8, "ffn_hidden_size": 256}),
    ],
)
def test_the_trainer_chooses_what_nobody_gave_by_the_style(style, expected):
    config, _ = train_config({"job file": {"style": style}})
    given = Layer("job file", world={"hidden_size": 64, "num_attention_heads": 8})
    world = trainer_layer(config, [given], "cpu", 257).world
    assert expected.items() <= world.items()
    assert (world["vocab_size"], world["dtype"]) == (320, "fp32")
