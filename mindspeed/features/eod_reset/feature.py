"""Documents packed into one sequence do not see one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.context_parallel.conditions import softmax_is_vanilla
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS


class EodResetArgs(ms.FeatureArgs):
    reset_position_ids: bool = ms.Field(
        True, description="Restart position ids at 0 with every document (true), or count on through the sample (false)"
    )
    fixed_document_length: int | None = ms.Field(
        None,
        ge=1,
        description="If set: split every sample into documents of this number of tokens, instead of at the document ends in "
        "the data. The last document may be shorter",
    )


def _has_length(args: EodResetArgs, world: ms.World) -> bool:
    """Return whether all documents have one length."""
    return args.fixed_document_length is not None


@ms.condition(
    "fixed_document_length={args.fixed_document_length} is greater than seq_length={world.seq_length}",
    fix=(ms.Fix.give_setting("fixed_document_length", note="at most {world.seq_length}"),),
    when=_has_length,
)
def documents_fit(args: EodResetArgs, world: ms.World) -> bool:
    """Check that a document is not longer than the sequence."""
    return bool((args.fixed_document_length or 0) <= world.seq_length)


def _sees_a_window(args: EodResetArgs, world: ms.World) -> bool:
    """Return whether attention has a sliding window and cp is 1."""
    return bool(world.cp == 1 and world.windowed_attention)


CONDITIONS: Final = (
    documents_fit,
    softmax_is_vanilla,
    NO_CUDA_GRAPHS,  # the ends of documents are read on the host
    ms.Requires(
        "flash-attention",
        reason="with a sliding window, only flash-attention can separate packed documents in attention. Jobs without a sliding "
        "window do not need flash-attention",
        when=_sees_a_window,
    ),
    ms.ModelCondition(
        "mindspeed.features.eod_reset.layers:attention_without_documents",
        "every core attention of the model supports packed documents",
        subject="spec",
    ),
)


_LAYERS = "mindspeed.features.eod_reset.layers"
_BATCHES = "mindspeed.features.eod_reset.batches"
_DATASET = "megatron.core.datasets.gpt_dataset"
_TRAINING = "megatron.training.utils"
_MODELS = (("gpt.gpt_model:GPTModel", ""), ("hybrid.hybrid_model:HybridModel", ">=0.19"))
_STAGES = "every pipeline stage reads the document ends, so only activations are sent between stages"


class EodReset(ms.Feature[EodResetArgs]):
    """Separate packed documents in attention.

    Tokens attend only to tokens of the same document, also under context parallelism. Attention receives the ends of
    the documents, which are read from the position ids of each batch. No mask is created.
    """

    spec = ms.FeatureSpec(
        name="eod-reset",
        category=ms.Category.SCENARIO,
        constraints=(
            *CONDITIONS,
            ms.RequiresCapability(
                ms.Slot.CONTEXT_PARALLEL,
                ms.Capability.DOCUMENTS,
                reason="attention must know where documents end. ring-attention, ulysses-attention, hybrid-attention and "
                "kv-allgather-cp have this capability",
            ),
            ms.Conflicts(
                "shared-attention-mask", reason="attention receives the document ends of each batch instead of a mask"
            ),
            ms.After("flash-attention"),
            ms.After("alibi"),
            ms.After(ms.Slot.CONTEXT_PARALLEL),
        ),
        megatron_flags=(
            ms.MegatronFlag("reset_attention_mask", switch="on"),
            ms.MegatronFlag("reset_position_ids", "reset_position_ids", follows_default=True),
        ),
        numerics=ms.Numerics.reordered(
            reason="the softmax is summed over the keys of one document instead of over all keys with a mask"
        ),
        own_trainer="from mindspeed.nn import Attention  # ends=...",
    )

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        return {"packed_samples": True}

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride("reset_attention_mask", True, "tokens of different documents must not attend to each other"),
            ms.ArgOverride(
                "reset_position_ids",
                self.args.reset_position_ids,
                "eod-reset.reset_position_ids sets whether position ids restart with every document",
            ),
            ms.ArgOverride(
                "create_attention_mask_in_dataloader", False, "attention receives the ends of documents instead of a mask"
            ),
        ]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.eod_reset.layers import with_documents

        return with_documents(spec, self)

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        patches: list[ms.Patch] = [
            ms.Wrap(
                f"{_DATASET}:GPTDatasetConfig.__post_init__",
                f"{_BATCHES}:with_documents_kept",
                "makes the dataset create position ids that mark where documents begin, instead of an attention mask",
                phase="build",
                optional=True,
            ),
            ms.Wrap(
                f"{_DATASET}:_get_ltor_masks_and_position_ids",
                f"{_BATCHES}:with_positions_anew",
                "restarts the position ids of a sample at 0 with every document",
                optional=True,
            ),
            ms.Wrap(
                "megatron.core.utils:get_batch_on_this_cp_rank",
                f"{_BATCHES}:with_documents",
                "reads the ends of documents from the position ids of a whole row, before the row is split over "
                "context-parallel ranks",
                optional=True,
            ),
            *(
                ms.Wrap(
                    f"megatron.core.models.{model}.forward",
                    f"{_LAYERS}:with_documents_required",
                    "stops with an error when a batch has no document ends, because attention would mix documents",
                    when=ms.When(megatron=versions),
                    optional=True,
                )
                for model, versions in _MODELS
            ),
        ]
        if self.world.pp > 1:
            patches += [
                *(
                    ms.Wrap(
                        f"{module}:get_batch_on_this_tp_rank",
                        f"{_BATCHES}:with_positions_everywhere",
                        _STAGES,
                        when=ms.When(megatron=versions),
                        optional=True,
                    )
                    for module, versions in ((_TRAINING, "<0.18"), ("megatron.core.utils", ">=0.18"))
                ),
                ms.Replace(
                    f"{_TRAINING}:is_first_or_last_pipeline_stage",
                    f"{_BATCHES}:every_stage",
                    _STAGES,
                    when=ms.When(megatron=">=0.15"),
                    optional=True,
                ),
            ]
        return patches
