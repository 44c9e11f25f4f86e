"""Are layers in Transformer Engine's roles as fast as Megatron's local ones? Steps of one layer of each, in turns.

``python -m benchmarks.engine_layers``. Both layers have the features of level 1 and the same weights, and one thread. A turn is
forward and backward of both; the measured ratio is that of the medians of CPU time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.table import Row, main

COMMAND: Final = "python -m benchmarks.engine_layers"
TURNS: Final = 41
SEQUENCE, BATCH, HIDDEN, HEADS = 256, 2, 512, 4
LEVEL_1: Final = ("rms-norm", "swiglu", "rotary-embedding", "flash-attention")
WORLD: Final = {"normalization": "RMSNorm", "activation": "silu", "gated_linear_unit": True, "rotary": True}


def steps(dtype: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a step of a layer in Transformer Engine's roles, and one of a local layer."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
    )

    def step_of(spec: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model = GPTModel(config, spec, 64, SEQUENCE, position_embedding_type="rope").to(dtype)
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=dtype, requires_grad=True)
        angles = model.rotary_pos_emb(SEQUENCE)

        def step() -> None:
            model.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=angles).float().square().mean().backward()

        return step

    return step_of(get_gpt_layer_with_transformer_engine_spec()), step_of(get_gpt_layer_local_spec(normalization="RMSNorm"))


def ratio(dtype: Any) -> float:
    """Return CPU time of a layer in Transformer Engine's roles over that of a local one."""
    both = steps(dtype)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS):
        pairs = list(zip(both, seconds, strict=True))
        for step, spent in pairs if turn % 2 else reversed(pairs):
            start = time.process_time()
            step()
            spent.append(time.process_time() - start)
    return statistics.median(seconds[0][3:]) / statistics.median(seconds[1][3:])


def rows() -> Iterator[Row]:
    """Yield the ratio in each type."""
    import torch

    import mindspeed
    from tests.features.transformer_engine_layers.single_rank import single_rank

    torch.set_num_threads(1)
    mindspeed.activate(mindspeed.plan(["transformer-engine-layers", *LEVEL_1], world=WORLD, platform="cpu"))
    with single_rank():
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            yield Row(f"layer of Transformer Engine's roles against local, {name}", 1.02, ratio(dtype), "x", COMMAND)
    mindspeed.deactivate()


if __name__ == "__main__":
    main(lambda: list(rows()))
