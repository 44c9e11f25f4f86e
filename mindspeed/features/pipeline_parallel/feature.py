"""Stages of consecutive layers with the 1F1B schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import shares
from mindspeed.plugins.shared_conditions import NO_CPU_OFFLOADING
from mindspeed.problems.fixes import Fix

Shape = tuple[int, ...]


class ShapeCheck:
    """The shapes that a communicator has sent before it learns which one its stages expect, and that one."""

    def __init__(self) -> None:
        self._sent: list[Shape] = []
        self._expected: Shape | None = None

    def add(self, sent: Sequence[Shape], expected: Shape | None) -> None:
        """Compare all shapes that were sent with the expected one. Raises MindSpeedError with MS645."""
        self._sent += sent
        self._expected = expected or self._expected
        if self._expected is None:
            return
        for shape in self._sent:
            if shape != self._expected:
                raise ms.MindSpeedError([_problem(shape, self._expected)])
        self._sent.clear()


def _problem(shape: Shape, expected: Shape) -> ms.Problem:
    text = f"pipeline-parallel: a stage sends a tensor of shape {shape}, but its neighbour expects {expected}"
    return ms.Problem(
        "MS645", text, ("pipeline-parallel",), fix=Fix.advise("add dynamic-shapes, or give all micro-batches the same length")
    )


def with_checked_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``P2PCommunicator._communicate``: what is sent has the shape that is expected, where shapes are not exchanged."""
    checks: WeakKeyDictionary[Any, ShapeCheck] = WeakKeyDictionary()

    @functools.wraps(original)
    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if not (config.variable_seq_lengths or getattr(config, "mtp_standalone", False)):
            tensors = (kwargs.get("tensor_send_next"), kwargs.get("tensor_send_prev"))
            shape = kwargs.get("tensor_shape")
            sent = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
            checks.setdefault(self, ShapeCheck()).add(sent, None if shape is None else tuple(shape))
        return original(self, *args, **kwargs)

    return communicate


class PipelineParallelArgs(ms.FeatureArgs):
    size: int = ms.Field(
        1,
        ge=1,
        description="Number of pipeline stages (pipeline-parallel size), each with an equal share of the layers. In a "
        "HybridModel, | in the pattern separates the stages",
    )
    free_outputs: bool = ms.Field(
        False,
        description="Free the output of a stage as soon as it is sent to the next stage, as Megatron-LM does. Saves memory",
    )


@ms.condition(
    "{layers} layers are not divisible by {stages} pipeline stages",
    fix=(ms.Fix.give_field("pp", note="a divisor of {layers}"), ms.Fix.add_feature("noop-layers")),
    values=shares,
)
def stages_share_layers(args: PipelineParallelArgs, world: ms.World) -> bool:
    """Check that stages have equal shares of the layers, or a layout, a hybrid pattern or another feature deals them out."""
    layers, stages = world.equal_share
    return bool(world.layer_split or world.pipeline_layout or world.is_hybrid or layers % max(1, stages) == 0)


class PipelineParallel(ms.Feature[PipelineParallelArgs]):
    """Split layers into pipeline stages (1F1B).

    Each rank holds consecutive layers. Every stage alternates between the forward pass of one micro-batch and the
    backward pass of another (schedule 1F1B).
    """

    spec = ms.FeatureSpec(
        name="pipeline-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"pp": "size"},
        constraints=(stages_share_layers, NO_CPU_OFFLOADING),
        numerics=ms.Numerics.reordered(
            reason="the first and the last stage sum the gradient of tied embeddings, so the summation order differs from "
            "training in one process"
        ),
        state=ms.CheckpointState("resharded", "layers are saved under their number in the whole model"),
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride("pipeline_model_parallel_size", self.args.size, "pipeline-parallel.size sets the number of stages")
        ]
        if self.args.free_outputs:
            overrides.append(
                ms.ArgOverride(
                    "deallocate_pipeline_outputs",
                    True,
                    "pipeline-parallel.free_outputs=true frees the output of a stage after it was sent",
                )
            )
        return overrides

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.model_parallel_config:ModelParallelConfig.__post_init__",
                "mindspeed.features.pipeline_parallel.configuration:with_pipeline_dtype",
                reason="sets pipeline_dtype, which Megatron requires with pipeline stages, to the data type of the model",
                phase="build",
            ),
            ms.Wrap(
                "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
                "mindspeed.features.pipeline_parallel.feature:with_checked_shapes",
                reason="checks that a stage receives a tensor of the expected shape, because gloo accepts a shorter one "
                "without an error",
                optional=True,
            ),
        ]
