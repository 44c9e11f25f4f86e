"""The shared mask against stock Megatron that is given the same mask with every micro-batch."""

from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from torch import Tensor

import mindspeed
from mindspeed.context_parallel import attention_mask
from mindspeed.context_parallel.attention_mask import mask_of
from mindspeed.context_parallel.mask_rules import MaskRule
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.features.shared_attention_mask.feature import one_rank_has_the_sequence
from mindspeed.job.world import World
from mindspeed.problems import MindSpeedError
from mindspeed.registry import catalog
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT, Recipe
from tests.conftest import Prove

pytestmark = pytest.mark.long

NAME = "shared-attention-mask"
DILATED = "dilated"
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"kind": "causal"},
    "window": {"kind": "sliding-window", "width": 5},
    "prefix": {"kind": "prefix", "prefix": 7},
    "dilated": {"kind": DILATED},
}


def brute(kind: str, tokens: int) -> Tensor:
    """Each mask by its definition, pair by pair."""
    sees = {
        "causal": lambda q, k: k <= q,
        "window": lambda q, k: q - 5 < k <= q,
        "prefix": lambda q, k: k <= q or k < 7,
        "dilated": lambda q, k: k <= q and (q - k) % 2 == 0,
    }[kind]
    return torch.tensor([[not sees(q, k) for k in range(tokens)] for q in range(tokens)])


@pytest.mark.parametrize("tokens", [1, 7, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_what_they_say_and_are_made_once(kind: str, tokens: int) -> None:
    rule = MaskRule(**KINDS[kind])
    mask = mask_of(rule, tokens, torch.device("cpu"))
    assert torch.equal(mask, brute(kind, tokens))
    assert mask_of(rule, tokens, torch.device("cpu")) is mask


def test_a_mask_first_made_in_inference_mode_can_be_trained_with() -> None:
    mask_of.cache_clear()
    with torch.inference_mode():
        mask = mask_of(MaskRule(), 3, torch.device("cpu"))
    assert not mask.is_inference()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("without-shape", "returned torch.bool (4,)"),
        ("numbers", "returned torch.float32 (4, 4)"),
        ("text", "returned str"),
    ],
)
def test_a_function_that_gives_no_mask_is_refused(kind: str, sentence: str) -> None:
    with pytest.raises(MindSpeedError) as caught:
        mask_of(MaskRule(kind), 4, torch.device("cpu"))
    assert str(caught.value) == (
        f"MS332 shared attention mask: {kind} {sentence}, but a mask of type torch.bool and shape (4, 4) is expected, "
        "True where hidden\n"
        "  fix: name a function of the number of tokens in the entry-point group mindspeed.masks"
    )


def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(MindSpeedError, match="MS101 absent of masks-of-tests cannot be imported: ModuleNotFoundError"):
        mask_of(MaskRule("absent"), 4, torch.device("cpu"))


def planned(*features: str, kind: str = "causal") -> ActivationPlan:
    """These features and none that the level would add."""
    level_1 = [name for name, spec in catalog().specs.items() if spec.level == 1 and name not in features]
    settings = {NAME: KINDS[kind]} if NAME in features else {}
    return mindspeed.plan(features=features, settings=settings, without=level_1, platform="cpu")


def trained(given: Tensor | None, length: int) -> tuple[list[Tensor], int]:
    """Loss and gradients of a tiny model under the mask that each micro-batch brings, and how often one was made here."""
    from dataclasses import replace

    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed.workbench.verification.model import build_chunks

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    recipe = Recipe(replace(GPT, seq_length=length, num_layers=2))
    (model,) = build_chunks(recipe)
    generator = torch.Generator().manual_seed(4)
    mask_of.cache_clear()
    for _ in range(2):
        tokens = torch.randint(recipe.shape.vocab_size, (2, length + 1), generator=generator)
        positions = torch.arange(length).expand(2, -1)
        mask = None if given is None else given.expand(2, 1, length, length).clone()
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
    weights = [parameter.main_grad for _, parameter in sorted(model.named_parameters())]
    return [loss.detach(), *(x.clone() for x in weights)], attention_mask.mask_of.cache_info().misses


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_stock_megatron_with_that_mask_to_the_bit_and_made_once(pool: WorkerPool, kind: str) -> None:
    length = 12
    ours, stock = planned(NAME, kind=kind), planned()
    ((found, made),) = pool.call(trained, 1, None, length, plan=ours)
    ((expected, _),) = pool.call(trained, 1, brute(kind, length), length, plan=stock)
    assert made == 1  # in two micro-batches of two layers
    assert [torch.equal(x, y) for x, y in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_attention_operator_a_causal_mask_and_a_window_need_no_tensor(pool: WorkerPool, kind: str) -> None:
    length = 12
    ours, stock = planned(NAME, "flash-attention", kind=kind), planned()
    ((found, made),) = pool.call(trained, 1, None, length, plan=ours)
    ((expected, _),) = pool.call(trained, 1, brute(kind, length), length, plan=stock)
    assert made == (0 if kind in ("causal", "window") else 1)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * max(1.0, float(y.abs().max())))


@pytest.mark.parametrize("also", [[], ["tensor-parallel"]], ids=str)
def test_training_is_that_of_megatron(prove: Prove, also: list[str]) -> None:
    assert prove(NAME, also=also).problems == []


@pytest.mark.parametrize("also", ["flash-attention", "pipeline-parallel", "recompute"])
def test_it_is_beside_other_features(prove: Prove, also: str) -> None:
    assert prove(NAME, also=[also]).problems == []


@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention"])
def test_it_has_nothing_to_do_beside_an_algorithm_that_implies_the_causal_mask(prove: Prove, algorithm: str) -> None:
    (problem,) = prove(NAME, also=[algorithm]).problems
    text = one_rank_has_the_sequence.message.format(world=World({"cp": 2}))
    assert problem.message == f"effect of {NAME}: {text}"


def test_the_data_loader_spares_a_byte_for_each_pair_of_tokens_of_each_sample() -> None:
    """What Megatron's dataset makes for a sample, with and without."""
    data, made = torch.arange(512), []
    for create in (True, False):
        mask = _get_ltor_masks_and_position_ids(data, 0, False, False, False, create)[0]
        made.append(0 if mask is None else mask.nbytes)
    assert made == [512 * 512, 0]
