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
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SAME_EXPERTS = f"{SAME} --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 16"
LATENT = {
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "kv_lora_rank": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
}
SAME_LATENT = (
    f"{SAME} --multi-latent-attention --kv-lora-rank 12 --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 16 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 "
    "--moe-layer-freq [0]*1+[1]*1"
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


@pytest.mark.parametrize(("line", "changes"), [(SAME_EXPERTS, EXPERTS), (SAME_LATENT, LATENT)])
def test_the_same_model_with_experts_is_loaded(tmp_path, line, changes):
    assert read(f"{line} --load {model(tmp_path, **changes)}").loads_hugging_face
    assert read(f"{line} --padded-vocab-size 104 --load {tmp_path}").loads_hugging_face


@pytest.mark.parametrize(
    ("without", "text", "fix"),
    [
        ("--moe-router-topk 4", "--moe-router-topk is 2, but the model in {} has num_experts_per_tok 4", None),
        ("--num-experts 8", "--num-experts 8 is missing, but the model in {} has experts", "add --num-experts 8"),
        (
            "--moe-router-score-function sigmoid",
            "--moe-router-score-function is softmax, but the model in {} has scoring_func sigmoid",
            None,
        ),
        (
            "--moe-router-topk-scaling-factor 2.5",
            "--moe-router-topk-scaling-factor is 1.0, but the model in {} has routed_scaling_factor 2.5",
            None,
        ),
        ("--moe-router-num-groups 4", "--moe-router-num-groups is 1, but the model in {} has n_group 4", None),
        ("--moe-router-group-topk 2", "--moe-router-group-topk is 1, but the model in {} has topk_group 2", None),
        (
            "--moe-shared-expert-intermediate-size 32",
            "--moe-shared-expert-intermediate-size is 0, but the model in {} has n_shared_experts * moe_intermediate_size 32",
            None,
        ),
        (
            "--moe-router-enable-expert-bias",
            "--moe-router-enable-expert-bias is missing, but the model in {} has a bias per expert in its routers",
            "add --moe-router-enable-expert-bias",
        ),
        (
            "--moe-layer-freq [0]*1+[1]*1",
            "--moe-layer-freq is 1, but the layers with experts of the model in {} are [0]*1+[1]*1",
            "--moe-layer-freq '[0]*1+[1]*1'",
        ),
    ],
)
def test_each_part_of_experts_is_compared(tmp_path, without, text, fix):
    line = SAME_LATENT.replace(f" {without}", "")
    assert problems_of(f"{line} --load {model(tmp_path, **LATENT)}") == [("MS602", text.format(tmp_path), fix or without)]


def test_a_sigmoid_router_that_does_not_divide_by_the_sum_is_refused(tmp_path):
    line = f"{SAME_LATENT} --load {model(tmp_path, **LATENT, norm_topk_prob=False)}"
    text = f"the model in {tmp_path} has norm_topk_prob false, but Megatron's sigmoid router divides its weights by their sum"
    assert problems_of(line) == [("MS602", text, "load a model with norm_topk_prob true")]


def test_groups_of_one_are_no_groups(tmp_path):
    line = SAME_LATENT.replace(" --moe-router-num-groups 4 --moe-router-group-topk 2", "")
    assert read(f"{line} --load {model(tmp_path, **LATENT | {'n_group': 1, 'topk_group': 1})}").loads_hugging_face


@pytest.mark.parametrize(
    ("line", "changes", "text", "fix"),
    [
        (
            "--moe-router-pre-softmax",
            {},
            "--moe-router-pre-softmax is given, but the model in {} has norm_topk_prob true",
            "remove --moe-router-pre-softmax",
        ),
        (
            "",
            {"norm_topk_prob": False},
            "--moe-router-pre-softmax is missing, but the model in {} has norm_topk_prob false",
            "add --moe-router-pre-softmax",
        ),
        (
            "",
            {"mlp_only_layers": [0]},
            "--moe-layer-freq is 1, but the layers with experts of the model in {} are [0]*1+[1]*1",
            "--moe-layer-freq '[0]*1+[1]*1'",
        ),
        (
            "--moe-shared-expert-intermediate-size 16",
            {},
            "--moe-shared-expert-intermediate-size is 16, but the model in {} has n_shared_experts * moe_intermediate_size 0",
            "--moe-shared-expert-intermediate-size 0",
        ),
    ],
)
def test_routers_and_layers_of_qwen_are_compared(tmp_path, line, changes, text, fix):
    line = f"{SAME_EXPERTS} {line} --load {model(tmp_path, **EXPERTS | changes)}"
    assert problems_of(line) == [("MS602", text.format(tmp_path), fix)]


def test_a_smaller_vocabulary_is_refused(tmp_path):
    line = f"{SAME} --padded-vocab-size 96 --tensor-model-parallel-size 8 --load {model(tmp_path, vocab_size=100)}"
    text = f"--padded-vocab-size is 96, but the model in {tmp_path} has vocab_size 100"
    assert problems_of(line) == [("MS602", text, "--padded-vocab-size 104")]


@pytest.mark.parametrize(("line", "changes"), [(SAME, {}), (SAME_LATENT, LATENT)])
def test_predictions_without_known_names_are_refused(tmp_path, line, changes):
    model(tmp_path, **changes)
    text = (
        "--mtp-num-layers is 1, but weights of multi-token prediction are loaded only for one depth of a deepseek_v3 model "
        f"with 61 layers, and the model in {tmp_path} is another one"
    )
    assert problems_of(f"{line} --mtp-num-layers 1 --load {tmp_path}") == [("MS602", text, "remove --mtp-num-layers")]


def test_the_prediction_of_deepseek_v3_is_loaded(tmp_path):
    line = SAME_LATENT.replace("--num-layers 2", "--num-layers 61").replace("[1]*1", "[1]*60")
    assert read(f"{line} --mtp-num-layers 1 --load {model(tmp_path, **LATENT, num_hidden_layers=61)}").loads_hugging_face


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
