"""What a document cannot know: another document changes, and not one bit of its logits does."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mindspeed import plan
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, Recipe

LENGTH, FIRST = 24, 9
"""Two documents; the border of two ranks lies in the second, for three and four also in the first."""
FIX = (
    "call megatron.core.utils.get_batch_on_this_cp_rank(batch) on every stage. In batch, give position_ids, and None as "
    "attention_mask. The function returns the document ends as attention_mask; pass this attention_mask to the model"
)


def recipe() -> Recipe:
    return Recipe(replace(LLAMA, num_layers=2, seq_length=LENGTH), micro_batch_size=1)


def logits(recipe: Recipe, first: int) -> tuple[list[int], Tensor]:
    """Places of this rank's tokens in the sequence and their logits, with other tokens in the first document for each seed."""
    from megatron.core import tensor_parallel, utils

    from mindspeed.workbench.verification.model import build_chunks

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    (chunk,) = build_chunks(recipe)
    size = recipe.shape.vocab_size
    documents = [
        torch.randint(size, (length,), generator=torch.Generator().manual_seed(seed))
        for length, seed in ((FIRST, first), (LENGTH - FIRST, 0))
    ]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    whole = {"tokens": torch.cat(documents)[None], "position_ids": positions, "places": torch.arange(LENGTH)[None]}
    share = utils.get_batch_on_this_cp_rank({**whole, "attention_mask": None})
    with torch.no_grad():
        out = chunk(share["tokens"], share["position_ids"], share["attention_mask"])
    return share["places"][0].tolist(), out[0]


def differences(pool: WorkerPool, ranks: int, *features: str, settings: dict[str, dict[str, int]] | None = None) -> Tensor:
    """By place in the sequence, the largest difference that another first document makes."""
    world = {**recipe().world(), "world_size": ranks, "cp": ranks, "rotary": True}
    chosen = plan([*features], settings=settings, platform="cpu", world=world)
    found = torch.full((LENGTH,), torch.nan)
    before, after = (pool.call(logits, ranks, recipe(), seed, plan=chosen) for seed in (1, 2))
    for (places, one), (_, other) in zip(before, after, strict=True):
        found[places] = (one - other).abs().amax(-1)
    return found


ALONE = {(): 1, ("flash-attention",): 1, ("ring-attention",): 2}
LATER = [
    ("ulysses-attention", 2),
    ("kv-allgather-cp", 2),
    ("ring-attention", 3),
    ("ring-attention", 4),
    ("ulysses-attention", 4),
    ("hybrid-attention", 4),
    ("kv-allgather-cp", 4),
]


@pytest.mark.cover(1, because="test_parity.py has the algorithms on four ranks")
@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "ranks"),
    [*ALONE.items(), *(pytest.param((name,), ranks, marks=pytest.mark.long) for name, ranks in LATER)],
    ids=str,
)
def test_the_first_document_changes_no_bit_of_the_second(pool: WorkerPool, features: tuple[str, ...], ranks: int) -> None:
    settings = {"hybrid-attention": {"ulysses_degree": 2}} if "hybrid-attention" in features else None
    found = differences(pool, ranks, "eod-reset", *features, settings=settings)
    assert (found[:FIRST] > 0).all()
    assert (found[FIRST:] == 0).all()


@pytest.mark.long
def test_without_the_feature_it_does(pool: WorkerPool) -> None:
    assert (differences(pool, 2, "ring-attention")[FIRST:] > 0).all()


def unsaid(recipe: Recipe) -> str:
    """What a model says that is given a rank's share without the ends of documents."""
    from megatron.core import tensor_parallel

    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.verification.model import build_chunks

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    (chunk,) = build_chunks(recipe)
    tokens = torch.zeros(1, LENGTH // 2, dtype=torch.int64)
    try:
        chunk(tokens, tokens, None)
    except MindSpeedError as error:
        return str(error)
    return "nothing"


def test_a_share_that_does_not_say_where_documents_end_is_refused(pool: WorkerPool) -> None:
    world = {**recipe().world(), "world_size": 2, "cp": 2, "rotary": True}
    (one, other) = pool.call(unsaid, 2, recipe(), plan=plan(["eod-reset", "ring-attention"], platform="cpu", world=world))
    assert one == other == (f"MS335 the model received a batch without document ends\n  fix: {FIX}")
