"""Plans of masks that come with batches: one for each content, and never one of another mask."""

import pytest
import torch

from mindspeed.features.adaptive_cp import plans as module
from mindspeed.features.adaptive_cp.plans import Plans
from mindspeed.problems import MindSpeedError
from tests.context_parallel.shards import causal
from tests.features.adaptive_cp.masks import interleaved, window


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ranks of each plan that is made."""
    made: list[int] = []
    plan_mask = module.plan_mask
    monkeypatch.setattr(module, "plan_mask", lambda mask, ranks: (made.append(ranks), plan_mask(mask, ranks))[1])
    return made


def test_an_equal_mask_of_another_batch_has_the_plan_agreement(made: list[int]) -> None:
    plans, first = Plans(), causal(8)
    plan = plans.of(first, 8, 2)
    assert plans.of(first, 8, 2) is plan
    assert plans.of(first[None, None].expand(3, 1, 8, 8), 8, 2) is plan
    assert plans.of(causal(8), 8, 2) is plan
    assert made == [2]


def test_a_mask_that_was_changed_in_its_place_has_a_new_plan(made: list[int]) -> None:
    plans, mask = Plans(), causal(8)
    before = plans.of(mask, 8, 2)
    mask[4:, :4] = True
    after = plans.of(mask, 8, 2)
    assert [len(turn) for turn in before.rounds] != [len(turn) for turn in after.rounds]
    assert made == [2, 2]
    assert torch.equal(plans.of(causal(8), 8, 2).mask.hidden, causal(8))


def test_a_new_mask_in_the_memory_of_one_that_is_gone_has_a_plan_of_its_own() -> None:
    plans = Plans()
    for width in range(1, 30):
        mask = window(32, width)
        plan = plans.of(mask, 32, 4)
        del mask
        assert torch.equal(plan.mask.hidden, window(32, width))


def test_few_masks_are_kept(made: list[int]) -> None:
    plans = Plans()
    for width in range(1, 9):
        plans.of(window(8, width), 8, 2)
    plans.of(window(8, 8), 8, 2)
    assert len(made) == 8
    plans.of(window(8, 1), 8, 2)
    assert len(made) == 9
    assert (len(plans._by_place), len(plans._by_content)) == (4, 4)


def test_masks_in_inference_mode_are_planned() -> None:
    with torch.inference_mode():
        assert Plans().of(interleaved(8), 8, 2).ranks == 2


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            causal(6),
            (
                "MS333 adaptive-cp: the mask of a batch has shape (6, 6), but (8, 8) or ('batch', 1, 8, 8) is expected\n"
                "  fix: give the mask of all tokens"
            ),
        ),
        (
            torch.stack([causal(8), window(8, 2)])[:, None],
            (
                "MS333 adaptive-cp: the samples of a batch have different masks\n"
                "  fix: --micro-batch-size 1, or use ring-attention instead"
            ),
        ),
    ],
    ids=["shape", "samples"],
)
def test_a_mask_that_is_not_one_for_all_is_refused(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(MindSpeedError) as caught:
        Plans().of(mask, 8, 2)
    assert str(caught.value) == message
