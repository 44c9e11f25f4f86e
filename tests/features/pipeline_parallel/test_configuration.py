import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.pipeline_parallel.configuration import with_pipeline_dtype


def config(**values):
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "pipeline_model_parallel_size": 2}
    return TransformerConfig(**shape | values)


@pytest.fixture
def _wrapped(monkeypatch):
    monkeypatch.setattr(ModelParallelConfig, "__post_init__", with_pipeline_dtype(ModelParallelConfig.__post_init__))


def test_megatron_alone_refuses_stages_without_a_type():
    with pytest.raises(ValueError, match="pipeline_dtype must be specified"):
        config()


@pytest.mark.usefixtures("_wrapped")
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({}, torch.float32),
        ({"params_dtype": torch.bfloat16}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True, "params_dtype": torch.float16}, torch.float16),
        ({"bf16": True, "pipeline_dtype": torch.float32}, torch.float32),
    ],
)
def test_stages_send_what_the_model_computes_with(values, dtype):
    assert config(**values).pipeline_dtype is dtype
