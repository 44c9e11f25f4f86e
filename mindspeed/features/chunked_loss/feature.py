"""The output layer and its cross-entropy in chunks of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.features.chunked_loss.chunks import default_chunks
from mindspeed.job.arithmetic import BYTES
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, leave
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS, NO_FSDP, NO_OVERLAPPED_MICRO_BATCHES

_LAYERS = "mindspeed.features.chunked_loss.layers"
_LOGITS = "loss: logits"
_TARGETS = "loss: targets"
_HIDDEN = "final norm: output"
_GRADIENTS = "gradients of a layer"
"""Tensors of the memory planner."""

_SINCE_0_19 = ms.When(">=0.19")
_RECOMPUTE = (ms.Fix.give_setting("mode", "recompute"), ms.Fix.remove_feature())


class ChunkedLossArgs(ms.FeatureArgs):
    chunks: int | None = ms.Field(
        None,
        ge=1,
        description="Number of chunks of the tokens of a micro-batch. By default, it is the smallest number with which the "
        "logits of a chunk have no more elements than the hidden states",
    )
    chunk_size: int | None = ms.Field(None, ge=1, description="Tokens of a chunk on a rank, instead of a number of chunks")
    mode: Literal["recompute", "accumulate"] = ms.Field(
        "recompute",
        description="recompute: backward computes the logits of each chunk again. accumulate: forward computes the gradients "
        "of hidden states and output weight, which saves one matrix product and needs memory for both gradients",
    )

    @model_validator(mode="after")
    def _one_size_is_given(self) -> ChunkedLossArgs:
        if self.chunks is not None and self.chunk_size is not None:
            text = f"chunks={self.chunks} and chunk_size={self.chunk_size} both set the size of a chunk"
            raise ms.SettingsError(text, ms.Fix.drop_setting("chunk_size"), ms.Fix.drop_setting("chunks"))
        return self

    def chunks_of(self, tokens: int) -> int | None:
        """Return the number of chunks of so many tokens, or None where it follows from the sizes of the model."""
        return max(1, -(-tokens // self.chunk_size)) if self.chunk_size is not None else self.chunks


@ms.condition(
    "nano-pipe defers the weight gradient of the output layer (its setting output_layer), but {feature} computes it in chunks",
    fix=(ms.Fix.give_setting("nano-pipe.output_layer", False), ms.Fix.remove_feature()),
    of="nano-pipe",
)
def nano_pipe_leaves_output_layer(args: ChunkedLossArgs, world: ms.World, schedule: Any) -> bool:
    """Check that the weight gradient of the output layer is computed in nano-pipe's backward pass."""
    return not schedule.output_layer


@ms.condition(
    "zero-bubble defers the weight gradient of the output layer (its setting output_layer), but {feature} computes it in "
    "chunks",
    fix=(ms.Fix.give_setting("zero-bubble.output_layer", False), ms.Fix.remove_feature()),
    of="zero-bubble",
)
def zero_bubble_leaves_output_layer(args: ChunkedLossArgs, world: ms.World, schedule: Any) -> bool:
    """Check that the weight gradient of the output layer is computed in zero-bubble's backward pass."""
    return not schedule.output_layer


def _accumulates(args: ChunkedLossArgs, world: ms.World) -> bool:
    """Return whether gradients are computed in forward."""
    return args.mode == "accumulate"


class ChunkedLoss(ms.Feature[ChunkedLossArgs]):
    """Compute logits and loss in chunks of tokens.

    Neither the logits of a whole micro-batch nor their softmax are in memory. Each depth of multi-token prediction is
    computed in chunks too.
    """

    spec = ms.FeatureSpec(
        name="chunked-loss",
        category=ms.Category.MEMORY,
        megatron=">=0.14",
        ops=("logit_statistics",),
        constraints=(
            NO_FSDP,
            NO_OVERLAPPED_MICRO_BATCHES,
            nano_pipe_leaves_output_layer,
            zero_bubble_leaves_output_layer,
            ms.Condition.unset(
                "deferred_embedding_gradients",
                "Megatron defers the weight gradient of the output layer (defer_embedding_wgrad_compute), which needs the "
                "gradients of all logits",
            ),
            ms.Condition.unset(
                "mtp_num_layers",
                "mode=accumulate does not support multi-token prediction, because each depth has another loss mask",
                fix=_RECOMPUTE,
                when=_accumulates,
            ),
            replace(NO_CUDA_GRAPHS, fix=_RECOMPUTE, when=_accumulates),
        ),
        numerics=ms.Numerics.reordered(
            reason="the gradient of the output weight is a sum over chunks, and the sum over the vocabulary is combined from "
            "those of each rank"
        ),
        verify_with=ms.VerifyWith(settings={"chunked-loss": {"chunks": 4}}),
        own_trainer="from mindspeed.nn import LinearCrossEntropyLoss",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        models = {
            "megatron.core.models.gpt.gpt_model:GPTModel": None,
            "megatron.core.models.hybrid.hybrid_model:HybridModel": _SINCE_0_19,
        }
        return [
            *(
                ms.Wrap(
                    f"{model}.forward",
                    f"{_LAYERS}:with_deferred_logits",
                    reason="hands hidden states and output weight to the loss, where the model computes one, instead of logits",
                    when=when,
                    optional=True,
                )
                for model, when in models.items()
            ),
            ms.Wrap(
                "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
                f"{_LAYERS}:with_chunked_loss",
                reason="computes logits and cross-entropy in chunks of tokens",
            ),
            ms.Wrap(
                "megatron.core.transformer.multi_token_prediction:_compute_mtp_acceptance_counts",
                f"{_LAYERS}:with_predictions_of_loss",
                reason="counts the predicted tokens of a depth from its loss, which has no logits of all tokens",
                when=_SINCE_0_19,
                optional=True,
            ),
        ]

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        tokens, chunks = self._tokens(), self._chunks()
        chosen = "" if self.args.chunks or self.args.chunk_size else ", chosen from the sizes of vocabulary and hidden states"
        yield f"the loss is computed in {chunks} chunks of at most {-(-tokens // chunks):,} tokens{chosen}"

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        if not any(tensor.name == _LOGITS for tensor in tensors):
            return tensors
        hidden = sum(t.bytes for t in tensors if t.name == _HIDDEN and not t.prediction)
        changed = [self._with_targets(t) if t.name == _TARGETS else t for t in tensors]
        if self.args.mode == "recompute":
            changed = [*leave(changed, {_LOGITS}, "recomputed", self.spec.name, prediction=True)]
            passing = self._passing(hidden)
        else:
            weight, _ = self._summed_and_converted(BYTES[self.world.dtype])
            changed = [t for t in changed if t.name != _LOGITS]
            changed.append(SavedTensor("loss: gradients", hidden + weight, 1, by=self.spec.name))
            passing = max(self._passing(hidden) - hidden - weight, hidden + sum(self._summed_and_converted(4)))
        if passing > sum(t.bytes for t in tensors if t.name == _GRADIENTS):  # the larger of both exists at the peak
            changed = [t for t in changed if t.name != _GRADIENTS]
            changed.append(SavedTensor("loss: chunk", passing, 1, "in backward", self.spec.name, once=True))
        return tuple(changed)

    def _passing(self, hidden: int) -> int:
        """Return the most bytes that exist while gradients are computed, with this rank's hidden states of so many bytes.

        These are the gradients of all hidden states and of the weight, with the logits of a chunk or, behind the last chunk,
        with the weight's gradient in its own type. Under sequence parallelism the hidden states of all ranks exist too.
        """
        size, tokens, chunks = BYTES[self.world.dtype], self._tokens(), self._chunks()
        gathered = tokens * self.world.hidden_size * size
        logits = -(-tokens // chunks) * (self.world.vocab_size // self.world.tp) * size
        summed, converted = self._summed_and_converted(4 if chunks > 1 else size)
        if hidden == gathered:
            return gathered + summed + max(logits, converted)
        return 2 * gathered + summed + max(logits, converted + hidden)

    def _summed_and_converted(self, size_of_sum: int) -> tuple[int, int]:
        """Return the bytes of the weight's gradient, and of its copy in the type of the weight, 0 if it has that already."""
        size = BYTES[self.world.dtype]
        weight = self.world.vocab_size // self.world.tp * self.world.hidden_size
        return weight * size_of_sum, weight * size * (size != size_of_sum)

    def _with_targets(self, tensor: SavedTensor) -> SavedTensor:
        """Return what is kept of each token: its loss, and for recomputation its largest logit and log-sum.

        Megatron keeps 13 bytes. The label is a copy if micro-batches have several rows, and at each depth of prediction.
        """
        tokens = self._tokens()
        label = 8 * (tensor.prediction or self.world.micro_batch_size > 1)
        return replace(tensor, bytes=tensor.bytes + tokens * (4 + label + 8 * (self.args.mode == "recompute") - 13))

    def _tokens(self) -> int:
        """Return the tokens of a micro-batch on a rank that computes their loss."""
        return self.world.seq_length * self.world.micro_batch_size // self.world.cp

    def _chunks(self) -> int:
        """Return the number of chunks of a micro-batch."""
        tokens = self._tokens()
        chunks = self.args.chunks_of(tokens) or default_chunks(self.world.vocab_size // self.world.tp, self.world.hidden_size)
        return min(chunks, max(1, tokens))
