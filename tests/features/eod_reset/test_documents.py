"""Where documents end, from Megatron's data set to the batch: position ids say it, and its own mask agrees."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as stock
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import mindspeed
from mindspeed.context_parallel.documents import are_documents, ends_of_rows
from mindspeed.features.eod_reset import batches, layers
from mindspeed.features.eod_reset.batches import ends_of_positions
from mindspeed.features.eod_reset.feature import EodReset, EodResetArgs
from mindspeed.features.flash_attention.feature import FlashAttentionArgs
from mindspeed.features.flash_attention.layers import with_flash_attention
from mindspeed.plugins import World
from mindspeed.problems import MindSpeedError, ResolutionError

EOD = 9
FEATURE = EodReset(EodResetArgs(), World({}))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of the feature for one test."""
    return lambda **settings: monkeypatch.setattr(batches, "_args", lambda: EodResetArgs(**settings))


def hidden(ends: tuple[int, ...]) -> Tensor:
    """What a token does not see, [tokens, tokens]."""
    places = torch.arange(ends[-1])
    number = torch.bucketize(places, torch.tensor(ends), right=True)
    return (number[:, None] != number) | (places[:, None] < places)


rows = st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=20)


@given(rows)
def test_the_ends_are_those_of_megatrons_dense_mask(row: list[int]) -> None:
    mask, _, positions = stock(torch.tensor(row), EOD, True, True, False, True)
    (ends,) = ends_of_rows(ends_of_positions(positions[None]))
    assert torch.equal(hidden(ends), mask[0])


@pytest.mark.parametrize(
    ("row", "ends"),
    [
        ([1, 2, 3, 4], (4,)),
        ([1, 2, 3, EOD], (4,)),
        ([EOD, 2, EOD, EOD], (1, 3, 4)),
        ([1, EOD, 2, 3], (2, 4)),
    ],
)
def test_a_document_ends_behind_its_last_token_and_at_the_end_of_the_row(row: list[int], ends: tuple[int, ...]) -> None:
    positions = stock(torch.tensor(row), EOD, True, True, False, False)[2]
    assert ends_of_rows(ends_of_positions(positions[None])) == (ends,)


@given(st.lists(rows.map(lambda row: (row + [1] * 20)[:20]), min_size=1, max_size=4))
def test_rows_have_documents_of_their_own_and_they_travel_as_one_tensor(batch: list[list[int]]) -> None:
    positions = [stock(torch.tensor(row), EOD, True, True, False, False)[2] for row in batch]
    documents = ends_of_positions(torch.stack(positions))
    alone = [ends_of_rows(ends_of_positions(row[None]))[0] for row in positions]
    assert are_documents(documents)
    assert ends_of_rows(documents) == tuple(alone)


def test_masks_are_no_documents() -> None:
    assert not are_documents(None)
    assert not are_documents(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert not are_documents(torch.ones(1, 1, 4, 4, dtype=torch.int64))


def test_a_row_that_begins_elsewhere_is_refused() -> None:
    with pytest.raises(MindSpeedError) as refused:
        ends_of_positions(torch.tensor([[0, 1, 2], [4, 5, 0]]))
    assert str(refused.value) == (
        "MS335 a row of position ids does not begin with 0, but every document must begin at position 0\n"
        "  fix: give the position ids of whole rows, before they are split for context parallelism"
    )


def test_a_sample_says_where_its_documents_begin_whatever_the_settings_of_the_data_set(chosen: Any) -> None:
    made = batches.with_positions_anew(stock)
    row = torch.tensor([1, EOD, 2, 3, EOD, 4, 5])
    for restart in (True, False):
        chosen(reset_position_ids=restart)
        mask, loss_mask, positions = made(row, EOD, False, False, True, True)
        assert mask is None
        assert loss_mask.tolist() == [1, 0, 1, 1, 0, 1, 1]
        assert positions.tolist() == [0, 1, 0, 1, 2, 0, 1]


def test_documents_of_one_length_take_the_place_of_those_in_the_data(chosen: Any) -> None:
    chosen(fixed_document_length=3)
    _, _, positions = batches.with_positions_anew(stock)(torch.tensor([1, EOD, 2, 3, 4, 5, 6]), EOD, False, False, False, True)
    assert ends_of_rows(ends_of_positions(positions[None])) == ((3, 6, 7),)


def cut_in_two(batch: dict[str, Any]) -> dict[str, Any]:
    """As Megatron's function on the second of two ranks."""
    return {name: value if value is None else value[:, value.shape[1] // 2 :] for name, value in batch.items()}


@pytest.mark.parametrize("restart", [True, False])
def test_the_ends_are_read_before_a_row_is_cut(chosen: Any, restart: bool) -> None:
    chosen(reset_position_ids=restart)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    dense = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    batch = batches.with_documents(cut_in_two)({"tokens": positions, "position_ids": positions, "attention_mask": dense})
    assert ends_of_rows(batch["attention_mask"]) == ((2, 5, 6), (6,))
    assert batch["position_ids"].tolist() == ([[1, 2, 0], [3, 4, 5]] if restart else [[3, 4, 5], [3, 4, 5]])
    assert batch["tokens"].tolist() == [[1, 2, 0], [3, 4, 5]]


def test_a_batch_that_has_nothing_to_say_is_cut_as_ever() -> None:
    batch = {"tokens": torch.arange(6)[None]}
    assert batches.with_documents(cut_in_two)(batch)["tokens"].tolist() == [[3, 4, 5]]


def refusal(*features: str, **settings: Any) -> str:
    with pytest.raises(ResolutionError) as refused:
        mindspeed.plan(
            [*features, "eod-reset"], settings={"eod-reset": settings}, platform="cpu", world={"seq_length": 8, "world_size": 2}
        )
    return str(refused.value)


def test_a_document_longer_than_the_sequence_is_refused() -> None:
    assert refusal(fixed_document_length=9).startswith(
        "MS304 eod-reset: fixed_document_length=9 is greater than seq_length=8\n"
    )


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        ("adaptive-cp", "adaptive-cp does not support documents, which eod-reset needs"),
        ("shared-attention-mask", "attention receives the document ends of each batch instead of a mask"),
    ],
)
def test_features_with_one_mask_for_all_batches_are_refused(feature: str, reason: str) -> None:
    assert reason in refusal(feature)


def test_every_stage_reads_the_data_where_there_is_a_pipeline() -> None:
    world = {"world_size": 2, "pp": 2}
    settings = {"pipeline-parallel": {"size": 2}}
    sites = {patch.site for patch in mindspeed.plan(["eod-reset"], settings=settings, platform="cpu", world=world).patches}
    alone = {patch.site for patch in mindspeed.plan(["eod-reset"], platform="cpu").patches}
    reading = {"megatron.training.utils:get_batch_on_this_tp_rank", "megatron.training.utils:is_first_or_last_pipeline_stage"}
    assert reading <= sites
    assert reading.isdisjoint(alone)


def core_of(spec: Any) -> Any:
    return spec.submodules.self_attention.submodules.core_attention


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_ranks", lambda: 1)


@pytest.mark.usefixtures("one_rank")
def test_megatrons_own_core_attention_is_exchanged_and_one_that_knows_documents_stays() -> None:
    spec = get_gpt_layer_local_spec()
    assert core_of(layers.with_documents(spec, FEATURE)).module is layers.DocumentAttention
    flash = with_flash_attention(spec, FlashAttentionArgs())
    assert core_of(layers.with_documents(flash, FEATURE)) is core_of(flash)


@pytest.mark.usefixtures("one_rank")
def test_a_core_attention_that_ignores_documents_is_named() -> None:
    def found(spec: Any, **values: Any) -> list[str]:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **values)
        return [*layers.attention_without_documents(FEATURE, spec, config)]

    other = get_gpt_layer_local_spec()
    other.submodules.self_attention.submodules.core_attention = IdentityOp
    assert found(get_gpt_layer_local_spec()) == []
    assert found(other) == ["the core attention IdentityOp of the model ignores document ends"]
    assert found(get_gpt_layer_local_spec(), window_size=(4, 0)) == [
        "window_size is set, but packed documents with a sliding window need flash-attention"
    ]


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (
            {"softmax_type": "off-by-one"},
            (
                "MS304 eod-reset: softmax_type is off-by-one, but eod-reset computes only the vanilla softmax\n"
                "  because: eod-reset: requested\n"
            ),
        ),
        (
            {"cuda_graphs": True},
            "MS304 eod-reset: layers are captured as CUDA graphs, which eod-reset does not support\n"
            "  because: eod-reset: requested\n",
        ),
    ],
)
def test_a_job_in_which_documents_would_be_ignored_is_refused(world: dict[str, Any], expected: str) -> None:
    with pytest.raises(ResolutionError) as refused:
        mindspeed.plan(["eod-reset"], platform="cpu", world={"seq_length": 8, "world_size": 2, **world})
    assert expected in str(refused.value)


def test_documents_in_a_window_of_keys_bring_flash_attention() -> None:
    world = {"seq_length": 8, "world_size": 2}
    assert "flash-attention" in mindspeed.plan(["eod-reset"], platform="cpu", world=world | {"windowed_attention": True}).names
