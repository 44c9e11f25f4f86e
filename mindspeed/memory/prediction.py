"""The parameters and saved tensors of multi-token prediction, which is behind the decoder on the last stage. Light, no torch.

Each depth joins the hidden states of the depth before with the embeddings of the next tokens. It has layers, a norm and a loss.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed.job.arithmetic import BYTES, Parameters, embedding_parameters, prediction_parameters, shape_of_world
from mindspeed.job.world import World
from mindspeed.memory.layer_tensors import JobOptions, hidden_elements, layer_tensors, norm_tensors
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors


def parameters_behind_decoder(world: World) -> Parameters:
    """Return the parameters of all depths, with the embedding where the first stage is another one."""
    shape = shape_of_world(world)
    if not shape.mtp_num_layers:
        return Parameters()
    return prediction_parameters(shape) + (embedding_parameters(shape) if world.pp > 1 else Parameters())


def prediction_tensors(world: World, options: JobOptions) -> SavedTensors:
    """Return what all depths of a job keep for one micro-batch."""
    shape = shape_of_world(world)
    depths = shape.mtp_num_layers
    if not depths:
        return ()
    hidden, size = hidden_elements(world, options), BYTES[world.dtype]
    tokens = world.seq_length * world.micro_batch_size // world.cp
    has_rotary = world.rotary or shape.latent is not None
    norms = norm_tensors("prediction norms", world, options, hidden)
    norms.pop("prediction norms: output")  # joined instead
    made = {
        "prediction: embedding dropout mask": hidden * (size if options.on_cpu else 1) * options.dropout,
        "prediction norms: input": 2 * hidden * size,
        **{name: 2 * bytes for name, bytes in norms.items()},
        "prediction: joined": 2 * hidden * size,
        "prediction: gathered": hidden * size * (world.tp - 1) * options.sequence_parallel,  # the own rows are a view
        "final norm: input": hidden * size,
        **norm_tensors("final norm", world, options, hidden),
        **loss_tensors(world),
        "prediction: next tokens": (16 if has_rotary else 24)
        * tokens,  # with their labels, and the positions that are looked up
    }
    layers = layer_tensors(world, options, shape.prediction, prediction=True)
    each = (replace(t, layers=t.layers * depths) for t in layers if not t.once)
    ends = (SavedTensor(name, bytes, depths, prediction=True) for name, bytes in made.items() if bytes)
    return (*each, *ends)


def loss_tensors(world: World) -> dict[str, int]:
    """Return what one loss of each token keeps."""
    tokens = world.seq_length * world.micro_batch_size // world.cp
    # index, mask and loss of each token; with the vocabulary in parts its index in the own one and whether it is there
    targets = tokens * (13 + 9 * (world.tp > 1))
    return {"loss: logits": tokens * world.vocab_size // world.tp * 4, "loss: targets": targets}
