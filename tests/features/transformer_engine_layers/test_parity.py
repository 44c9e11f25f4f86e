"""Layers in the roles of Transformer Engine's against Megatron's local layers, with the same weights."""

from __future__ import annotations

import pytest

from mindspeed.workbench.conformance.testing import conformance
from tests.features.parity import LLAMA, cp, given, trains

test_conformance = pytest.mark.long(conformance("transformer-engine-layers"))


MOE = {**LLAMA, "num_experts": 4}
GROUPED = {**MOE, "grouped_experts": True}
LATENT = {"normalization": "RMSNorm", "multi_latent_attention": True}
TENSOR = ("tensor-parallel", "sequence-parallel")
LEVEL_1 = ("rms-norm", "swiglu", "rotary-embedding", "flash-attention")

test_every_layout_and_model_trains_as_local_layers_do = trains(
    "transformer-engine-layers",
    {
        "gpt in bf16": given(dtype="bf16"),
        "llama": given(**LLAMA),
        "llama in bf16": given(**LLAMA, dtype="bf16"),
        "tensor-parallel": given("tensor-parallel", nproc=2, **LLAMA),
        "sequence-parallel": given(*TENSOR, nproc=2, **LLAMA),
        "gpt sequence-parallel": given(*TENSOR, nproc=2),
        "pipeline": given("pipeline-parallel", nproc=2, **LLAMA),
        "tensor and pipeline": given(*TENSOR, "pipeline-parallel", nproc=4, **LLAMA),
        "ring": given("ring-attention", settings=cp(2), nproc=2, **LLAMA),
        "sequential experts": given(**MOE),
        "sequential experts over ranks": given("expert-parallel", nproc=2, **MOE),
        "grouped experts": given(**GROUPED, nproc=1),
        "grouped experts over ranks": given("expert-parallel", nproc=2, **GROUPED),
        "grouped experts split": given(*TENSOR, "expert-parallel", nproc=4, **GROUPED),
        "shared experts": given(**MOE, shared_expert_hidden_size=32),
        "latent attention": given(**LATENT),
        "latent attention, tensor-parallel": given(*TENSOR, nproc=2, **LATENT),
        "multi-token prediction": given(**LLAMA, mtp_num_layers=1),
        "level 1": given(*LEVEL_1, **LLAMA, rotary=True),
    },
)
