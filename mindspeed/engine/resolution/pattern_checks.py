"""Checks of the pattern that lists the layers of a hybrid model: each mistake quotes it, with a mark under the place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from mindspeed.engine.resolution.resolution_state import ResolutionState
from mindspeed.job.hybrid_pattern import ATTENTION, EXPERTS, KINDS, RECURRENT
from mindspeed.job.world import World
from mindspeed.plugins.fixes import Advice, DropField, FixStep, GiveField

PATTERN: Final = "hybrid_layer_pattern"
_KERNELS: Final = {"M": "mamba_ssm", "G": "flash-linear-attention"}
_OTHER_SPLITS: Final = ("first_stage_layers", "last_stage_layers", "pipeline_layout", "embedding_is_layer", "loss_is_layer")


class PatternMistake(NamedTuple):
    """Describe a mistake at one character of a pattern, the fix, and the other fields of the job at fault."""

    at: int
    text: str
    fix: tuple[FixStep, ...]
    fields: tuple[str, ...] = ()


def check_pattern(state: ResolutionState) -> None:
    """Report every mistake of the pattern: MS301 for the pattern itself, MS302 for what does not fit the job."""
    for mistakes, jobs in state.values(PATTERN, _mistakes_of):
        for mistake in mistakes:
            code = "MS302" if mistake.fields else "MS301"
            text = f"{mistake.text}\n{state.world.pattern.marked(mistake.at)}"
            state.problem(code, text, (), mistake.fix, jobs, (PATTERN, *mistake.fields))


def _mistakes_of(world: World) -> tuple[PatternMistake, ...]:
    if not world.is_hybrid:
        return ()
    own = [PatternMistake(at, text, (Advice("correct the pattern"),)) for at, text in world.pattern.mistakes()]
    return tuple(own or (*_stages(world), *_experts(world), *_predictions(world), *_layers(world)))


def _stages(world: World) -> Iterator[PatternMistake]:
    """Check that segments, or equal shares of the layers, are as many as pipeline stages and their chunks."""
    pattern, pp, vpp = world.pattern, world.pp, world.vpp
    count, layers = len(pattern.segments), len(pattern.layers)
    separated = Advice("separate the layers of stages with |")
    if count == 1 and vpp > 1:
        text = f"vpp is {vpp}, but the pattern has no segments for {pp * vpp} model chunks"
        yield PatternMistake(layers // (pp * vpp), text, (separated, DropField("vpp")), ("vpp",))
    elif count == 1:
        shared, stages = world.equal_share
        if shared % max(1, stages) and world.num_layers == layers:
            text = f"{shared} layers are not divisible by {stages} pipeline stages"
            yield PatternMistake(world.first_stage_layers or shared // stages, text, (separated, GiveField("pp", 1)), ("pp",))
    elif pp == 1:
        text = f"the pattern has {count} segments, but there is only one pipeline stage"
        yield PatternMistake(_start(world, 1) - 1, text, (Advice("remove |"), GiveField("pp", count)), ("pp",))
    elif count % pp:
        text = f"{count} segments are not divisible by {pp} pipeline stages"
        yield PatternMistake(_start(world, count // pp * pp), text, (GiveField("pp", note=f"a divisor of {count}"),), ("pp",))
    elif count != pp * vpp:
        text = f"{count} segments on {pp} pipeline stages give vpp={count // pp}, but vpp is {vpp}"
        yield PatternMistake(_start(world, min(pp * vpp, count - 1)), text, (GiveField("vpp", count // pp),), ("pp", "vpp"))
    for field in _OTHER_SPLITS:
        if count > 1 and world.is_set(field):
            text = f"segments and {field} both assign layers to pipeline stages"
            yield PatternMistake(_start(world, 1) - 1, text, (DropField(field),), (field,))


def _start(world: World, segment: int) -> int:
    """Return the place of the first character of a segment."""
    return sum(len(part) + 1 for part in world.pattern.segments[:segment])


def _experts(world: World) -> Iterator[PatternMistake]:
    """Check that layers with experts and the number of experts go together, and attention with its kind."""
    pattern = world.pattern
    if EXPERTS in pattern.text and world.knows("num_experts") and not world.num_experts:
        text = "a layer has experts (E), but num_experts is 0"
        yield PatternMistake(pattern.text.index(EXPERTS), text, (GiveField("num_experts"),), ("num_experts",))
    if EXPERTS not in pattern.text and world.is_set("num_experts"):
        text = f"num_experts is {world.num_experts}, but no layer of the pattern has experts (E)"
        place = max(pattern.text.find("-"), 0)
        yield PatternMistake(place, text, (Advice("write E for -"), DropField("num_experts")), ("num_experts",))
    if "*" in pattern.text and world.is_set("multi_latent_attention"):
        text = f"attention is multi-latent, but * is {KINDS['*']} with separate keys"
        fix = (Advice("write + for *"), DropField("multi_latent_attention"))
        yield PatternMistake(pattern.text.index("*"), text, fix, ("multi_latent_attention",))
    for layer in RECURRENT:
        if layer in pattern.text and world.platform != "cuda":
            kernels = f"{KINDS[layer]}, whose kernels ({_KERNELS[layer]})"
            text = f"{layer} is {kernels} are available only on cuda, but the platform is {world.platform}"
            other = Advice(f"remove {layer}; this platform supports {' '.join(ATTENTION)} - E")
            yield PatternMistake(pattern.text.index(layer), text, (other,), ("platform",))


def _predictions(world: World) -> Iterator[PatternMistake]:
    """Check that the pattern has the layers of multi-token prediction."""
    pattern, end = world.pattern, len(world.pattern.text)
    if world.knows("mtp_num_layers") and world.mtp_num_layers != len(pattern.predictions):
        text = f"mtp_num_layers is {world.mtp_num_layers}, but the number of depths after / is {len(pattern.predictions)}"
        place = pattern.text.find("/") if pattern.predictions else end
        yield PatternMistake(place, text, (GiveField("mtp_num_layers", len(pattern.predictions)),), ("mtp_num_layers",))


def _layers(world: World) -> Iterator[PatternMistake]:
    """Check that a given number of layers is that of the pattern."""
    layers = world.pattern.layers
    if world.num_layers != len(layers):
        text = f"num_layers is {world.num_layers}, but the pattern has {len(layers)} layers"
        places = [at for at, layer in enumerate(world.pattern.text.partition("/")[0]) if layer != "|"]
        place = places[min(world.num_layers, len(places) - 1)]
        yield PatternMistake(place, text, (DropField("num_layers"),), ("num_layers",))
