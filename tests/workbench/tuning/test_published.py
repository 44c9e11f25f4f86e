"""Orders of layouts that studies have published, by the speeds that the tuner assumes without measurements.

Narayanan et al., SC21 (arXiv 2104.04473): figures 13 and 16. Llama 3 (arXiv 2407.21783): table 4. MindSpeed: both tables of its
page on grouped products of experts.
"""

from typing import Any

import pytest

from mindspeed.job.arithmetic import model_flops, shape_of_world
from mindspeed.job.world import World
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.search import Question, Scores
from mindspeed.workbench.tuning.space import SIZES, Choice, Layouts
from mindspeed.workbench.tuning.time import DEFAULTS, Machine
from tests.features.resolving import CATALOG

GPT: dict[str, Any] = {
    "ranks_per_node": 8,
    "num_layers": 32,
    "hidden_size": 20480,
    "ffn_hidden_size": 4 * 20480,
    "num_attention_heads": 128,
    "num_query_groups": 128,
    "kv_channels": 160,
    "num_experts": 0,
    "vocab_size": 51200,
    "seq_length": 2048,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "rotary": False,
    "tied_embeddings": True,
    "dtype": "bf16",
    "platform": "cuda",
    "world_size": 64,
}
"""The GPT of 162.2 billion parameters."""
SMALLER = GPT | {
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 32,
    "num_query_groups": 32,
    "kv_channels": 128,
}
"""The GPT of 5.9 billion parameters."""
LLAMA = GPT | {
    "num_layers": 128,  # 126, of which the first and the last stage have one less
    "hidden_size": 16384,
    "ffn_hidden_size": 53248,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 128256,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "rotary": True,
    "tied_embeddings": False,
}
"""Llama 3 405B."""


def seconds(model: dict[str, Any], platform: str = "cuda", features: tuple[str, ...] = (), **sizes: int) -> float:
    """Return the predicted seconds of a step of one layout."""
    layout = {name: [sizes.pop(name, 1)] for name in SIZES}
    question = Question(Layouts(model | sizes, layout), [Choice(features)], FixedRequest(), Machine(DEFAULTS[platform]))
    return float(Scores(question, CATALOG).seconds(Choice(features))[0])


@pytest.mark.parametrize("batch", [32, 128])
def test_tensor_parallelism_up_to_a_node_and_pipelines_beyond_is_fastest(batch: int) -> None:
    layouts = [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2)]
    found = [seconds(GPT, tp=tp, pp=pp, global_batch_size=batch, micro_batch_size=1) for tp, pp in layouts]
    assert found.index(min(found)) == layouts.index((8, 8))
    assert found[:3] == sorted(found[:3], reverse=True)
    assert found[2:] == sorted(found[2:])


def test_larger_micro_batches_make_products_faster_by_up_to_a_third() -> None:
    one_gpu = SMALLER | {
        "num_layers": 4,
        "num_attention_heads": 128,
        "num_query_groups": 128,
        "kv_channels": 32,
        "world_size": 1,
    }
    rates = [16 / seconds(one_gpu, global_batch_size=16, micro_batch_size=size) for size in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates)
    assert 1.08 < rates[-1] / rates[0] < 1.35


def test_the_layouts_of_llama_3_come_in_the_order_of_their_rates() -> None:
    layouts: list[dict[str, int]] = [
        {"world_size": 8192, "seq_length": 8192, "global_batch_size": 2048},  # 430 TFLOP/s per GPU
        {"world_size": 16384, "seq_length": 8192, "global_batch_size": 2048},  # 400
        {"world_size": 16384, "seq_length": 131072, "global_batch_size": 128, "cp": 16},  # 380
    ]
    rates = []
    for layout in layouts:
        taken = seconds(LLAMA, features=("distributed-optimizer", "async-ddp", "async-param-gather"), tp=8, pp=16, **layout)
        shape = shape_of_world(World(LLAMA | layout))
        rates.append(model_flops(shape, layout["global_batch_size"]) / taken / layout["world_size"])
    assert rates == sorted(rates, reverse=True)


MIXTRAL = LLAMA | {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "seq_length": 4096,
    "world_size": 8,
    "global_batch_size": 16,
    "platform": "npu",
    "router_topk": 2,
}


def gain(model: dict[str, Any], **sizes: int) -> float:
    """Return how many times as long a step takes without grouped products."""
    one_by_one, grouped = (seconds(model | {"grouped_experts": way}, "npu", **sizes) for way in (False, True))
    return one_by_one / grouped


def test_grouped_products_gain_more_with_more_and_narrower_experts_on_a_rank() -> None:
    layouts = [(4, 2, 16), (4, 2, 8), (2, 4, 16), (2, 4, 8)]
    gains = [gain(MIXTRAL | {"num_experts": experts}, tp=tp, ep=ep) for tp, ep, experts in layouts]
    assert gains == sorted(gains, reverse=True)
    widths = [32768, 16384, 8192, 4096]
    of_width = [gain(MIXTRAL | {"num_experts": 8, "moe_ffn_hidden_size": width, "hidden_size": 6144}, ep=8) for width in widths]
    assert of_width == sorted(of_width)
