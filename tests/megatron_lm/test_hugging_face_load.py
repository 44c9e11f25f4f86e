"""--load with a model of Hugging Face: what a command needs, and what the ranks then load."""

import json
from shlex import split

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm import hugging_face_load
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.megatron_lm.training_request import read_command_line
from mindspeed.problems import ResolutionError

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000},
    "tie_word_embeddings": False,
}
SAME = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --norm-epsilon 1e-6 --rotary-base 1000000 "
    "--untie-embeddings-and-output-weights --qk-layernorm --seq-length 32 --micro-batch-size 1 --global-batch-size 8"
)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(hugging_face_load, "find_spec", lambda name: True)


def model(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").touch()
    return folder


def read(line):
    return read_command_line(split(line), {}, "0.16.1", registry.catalog_for)


def problems_of(line):
    with pytest.raises(ResolutionError) as caught:
        read(line)
    return [(problem.code, problem.message, problem.fix_text) for problem in caught.value.problems]


def test_the_same_model_is_loaded(tmp_path):
    request = read(f"{SAME} --load {model(tmp_path)}")
    assert request.loads_hugging_face
    assert [(row.kind, row.text) for row in request.notes if row.feature == "weights"] == [
        (
            "prepared-first",
            f"--load {tmp_path} is a Hugging Face model of type qwen3: mbridge loads its weights into the model when training "
            "starts",
        )
    ]


def test_its_plan_wraps_what_loads_a_checkpoint(tmp_path):
    environment = made_up("cpu", "0.16.1")
    for folder, wrapped in ((tmp_path / "other", False), (model(tmp_path), True)):
        _, plan = plan_training(split(f"{SAME} --transformer-impl local --load {folder}"), {}, environment)
        targets = [planned.patch.target for planned in plan.patches]
        assert targets.count("megatron.training.checkpointing:load_checkpoint") == wrapped


def test_a_megatron_checkpoint_is_left_to_megatron(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert not read(f"{SAME} --load {tmp_path}").loads_hugging_face
    assert not read(f"{SAME} --load {tmp_path}/none").loads_hugging_face


def test_another_model_is_refused(tmp_path):
    model(tmp_path)
    assert problems_of(f"{SAME.replace('--num-layers 2', '--num-layers 4')} --load {tmp_path}") == [
        ("MS602", f"--num-layers is 4, but the model in {tmp_path} has num_hidden_layers 2", "--num-layers 2")
    ]
    assert problems_of(f"{SAME.replace('1000000', '10000')} --load {tmp_path}")[0][2] == "--rotary-base 1000000"
    untied = "--untie-embeddings-and-output-weights"
    assert problems_of(f"{SAME.replace(untied, '')} --load {tmp_path}") == [
        ("MS602", f"{untied} is missing, but the model in {tmp_path} has an output layer with its own weights", f"add {untied}")
    ]
    model(tmp_path, tie_word_embeddings=True)
    text = f"{untied} is given, but the model in {tmp_path} shares the weights of embedding and output layer"
    assert problems_of(f"{SAME} --load {tmp_path}")[0][1] == text


@pytest.mark.parametrize(
    ("line", "changes", "text", "fix"),
    [
        ("--rotary-base 1000000", {}, "--rotary-base is 10000, but the model", "--rotary-base 1000000"),
        ("--norm-epsilon 1e-6", {}, "--norm-epsilon is 1e-05, but the model", "--norm-epsilon 1e-06"),
        ("--qk-layernorm", {}, "--qk-layernorm is missing, but the model", "add --qk-layernorm"),
        ("", {"attention_bias": True}, "--add-qkv-bias is missing, but the model", "add --add-qkv-bias"),
        ("", {"rope_scaling": {"rope_type": "yarn"}}, "scales its rotary embedding (yarn)", "add --use-rope-scaling"),
    ],
)
def test_what_no_shape_tells_is_compared_with_what_megatron_assumes(tmp_path, line, changes, text, fix):
    ((code, message, advice),) = problems_of(f"{SAME.replace(line, '')} --load {model(tmp_path, **changes)}")
    assert code == "MS602"
    assert text in message
    assert advice.startswith(fix)


def test_a_run_that_has_saved_does_not_begin_again(tmp_path):
    (tmp_path / "run").mkdir()
    line = f"{SAME} --load {model(tmp_path)} --save {tmp_path}/run --save-interval 10"
    assert read(line).loads_hugging_face
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    ((code, message, fix),) = problems_of(line)
    assert (code, fix) == ("MS602", f"--load {tmp_path}/run to go on with the run, or another folder for --save")
    assert f"{tmp_path}/run has a checkpoint of a run" in message


def test_a_model_that_is_not_known_is_refused(tmp_path):
    ((code, message, _),) = problems_of(f"{SAME} --load {model(tmp_path, model_type='mamba2')}")
    assert (code, message) == (
        "MS602",
        f"--load {tmp_path} is a Hugging Face model of type mamba2, whose weights cannot be loaded; known are deepseek_v3, "
        "llama, qwen2, qwen3, qwen3_moe",
    )


def test_packages_that_are_missing_are_named_for_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face_load, "find_spec", lambda name: None if name in ("mbridge", "einops") else True)
    assert problems_of(f"{SAME} --load {model(tmp_path)}") == [
        (
            "MS501",
            f"--load {tmp_path} is a Hugging Face model, which is loaded with mbridge and einops; not installed here",
            "pip install mbridge einops",
        )
    ]
