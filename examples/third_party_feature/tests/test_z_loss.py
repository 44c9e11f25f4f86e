from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from acme_mindspeed.feature import ZLoss
from acme_mindspeed.loss import log_normalizer, with_z_loss

import mindspeed
from mindspeed.conformance.testing import conformance
from mindspeed.plugins import MindSpeedError

SITE = "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"

test_conformance = conformance("acme-mindspeed")


def logits(dtype=torch.float32):
    torch.manual_seed(1)
    return (10 * torch.randn(3, 2, 8, dtype=dtype)).requires_grad_()


def test_the_normalizer_and_its_gradient_are_those_of_logsumexp():
    ours, reference = logits(), logits()
    log_normalizer(ours).square().sum().backward()
    reference.logsumexp(-1).square().sum().backward()
    torch.testing.assert_close(log_normalizer(ours), reference.logsumexp(-1))
    torch.testing.assert_close(ours.grad, reference.grad)


def split_vocabulary():
    """On each of two ranks: normalizer and gradient of its share of the vocabulary, and those of the whole."""
    rank = dist.get_rank()
    whole = logits()
    share = whole.detach().chunk(2, -1)[rank].clone().requires_grad_()
    z = log_normalizer(share, dist.group.WORLD)
    z.square().sum().backward()
    whole.logsumexp(-1).square().sum().backward()
    return [tensor.detach() for tensor in (z, share.grad, whole.logsumexp(-1), whole.grad.chunk(2, -1)[rank])]


def test_a_vocabulary_split_over_two_ranks_gives_the_same(on_ranks):
    for z, gradient, expected_z, expected_gradient in on_ranks(2, split_vocabulary):
        torch.testing.assert_close(z, expected_z)
        torch.testing.assert_close(gradient, expected_gradient)


def test_the_patch_goes_on_and_comes_off_without_megatron(fake_megatron):
    made_up = fake_megatron(SITE)
    model = made_up.module(SITE.partition(":")[0]).LanguageModule
    original = vars(model)["compute_language_model_loss"]
    with made_up.patched(ZLoss, {"coefficient": 0.01}):
        assert vars(model)["compute_language_model_loss"].__wrapped__ is original
    assert vars(model)["compute_language_model_loss"] is original
    assert with_z_loss(original).__name__ == "compute_language_model_loss"


def test_the_loss_of_a_megatron_model_has_the_term():
    plan = mindspeed.plan(["acme-z-loss"], settings={"acme-z-loss": {"coefficient": 0.01}}, platform="cpu")
    mindspeed.activate(plan)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, gradient_accumulation_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=8).eval()
    tokens, places = torch.arange(8)[None], torch.arange(8)[None]
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    loss = model(tokens, places, mask, labels=tokens)
    with mindspeed.suspended(SITE):
        without = model(tokens, places, mask, labels=tokens)
    term = 0.01 * model(tokens, places, mask).logsumexp(-1).square()
    torch.testing.assert_close(loss, without + term)
    assert term.min() > 0.1
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    mindspeed.deactivate()


def test_the_plan_has_one_patch_of_ours():
    plan = mindspeed.plan(["acme-z-loss"], settings={"acme-z-loss": {"coefficient": 0.01}})
    (patch,) = [planned.patch for planned in plan.patches if planned.owner == "acme-z-loss"]
    assert patch.target == SITE


def test_a_coefficient_that_drowns_the_cross_entropy_is_refused():
    with pytest.raises(MindSpeedError) as caught:
        mindspeed.plan(["acme-z-loss"], settings={"acme-z-loss": {"coefficient": 1.0}}, world={"vocab_size": 256})
    (problem,) = caught.value.problems
    assert problem.code == "MS304"
    assert problem.message == "acme-z-loss: a coefficient of 1.0 drowns the cross entropy of 256 words"
    assert problem.fix_text == "--set acme-z-loss.coefficient=0.0001"
