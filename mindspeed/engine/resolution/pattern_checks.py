"""Checks of the pattern that lists the layers of a hybrid model: each mistake quotes it, with a mark under the place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.resolution_state import ResolutionState
from mindspeed.job.hybrid_pattern import ATTENTION, EXPERTS, KINDS, LATENT, RECURRENT
from mindspeed.job.world import World
from mindspeed.problems import Fix

PATTERN: Final = "hybrid_layer_pattern"
_KERNELS: Final = {"M": "mamba_ssm", "G": "flash-linear-attention"}
_ALL: Final = "".join(KINDS)
_COUNTED: Final[tuple[tuple[str, str, str, Fix], ...]] = (
    ("num_layers", _ALL, "layers", Fix.drop_field("num_layers")),
    ("moe_layers", EXPERTS, f"layers with experts ({EXPERTS})", Fix.advise("remove moe_layers, which the pattern gives")),
)
"""Fields that count layers of a pattern, the characters of these layers, their name, and the fix."""
_ALWAYS: Final = (
    ("transformer_engine_layers", _ALL, "the layers of a HybridModel are always Transformer Engine's"),
    ("multi_latent_attention", LATENT, f"{LATENT[0]} is {KINDS[LATENT[0]]}"),
)
"""Fields that are true of every model with one of these characters, and the reason."""
_ENDS: Final = ("first_stage_layers", "last_stage_layers")
_OTHER_SPLITS: Final = ("pipeline_layout", "embedding_is_layer", "loss_is_layer")
"""Fields that Megatron refuses with every pattern, those of the ends only with segments."""
_NO_SEGMENTS: Final = "<0.17"
"""Releases of Megatron whose patterns have no segments, and which do not refuse these fields."""
_SUPPORTED: Final = ">=0.19"


class PatternMistake(NamedTuple):
    """Describe a mistake at one character of a pattern, the fix, and the other fields of the job at fault."""

    at: int
    text: str
    fix: tuple[Fix, ...]
    fields: tuple[str, ...] = ()


def check_pattern(state: ResolutionState) -> None:
    """Report every mistake of the pattern: MS301 for the pattern itself, MS302 for what does not fit the job."""
    for mistakes, jobs in state.values(PATTERN, _mistakes_of):
        for mistake in mistakes:
            code = "MS302" if mistake.fields else "MS301"
            text = f"{mistake.text}\n{state.world.pattern.marked(mistake.at)}"
            state.problem(code, text, (), mistake.fix, jobs, (PATTERN, *mistake.fields))
    world = state.world
    if world.is_hybrid and world.knows("megatron") and not version_in(world.megatron, _SUPPORTED):
        text = f"HybridModel is supported with megatron-core {_SUPPORTED}, but the version is {world.megatron}"
        state.note("warning", "HybridModel", f"{text}; features are not tested on it")


def _mistakes_of(world: World) -> tuple[PatternMistake, ...]:
    if not world.is_hybrid:
        return ()
    own = [PatternMistake(at, text, (Fix.advise("correct the pattern"),)) for at, text in world.pattern.mistakes()]
    return tuple(own or (*_stages(world), *_experts(world), *_predictions(world), *_facts(world)))


def _stages(world: World) -> Iterator[PatternMistake]:
    """Check that segments, or equal shares of the layers, are as many as pipeline stages and their chunks."""
    pattern, pp, vpp = world.pattern, world.pp, world.vpp
    count, layers = len(pattern.segments), len(pattern.layers)
    separated = Fix.advise("separate the layers of stages with |")
    others = [field for field in _OTHER_SPLITS if world.is_set(field)] if count > 1 or _has_segments(world) else []
    if count == 1 and vpp > 1:
        text = f"vpp is {vpp}, but the pattern has no segments for {pp * vpp} model chunks"
        yield PatternMistake(layers // (pp * vpp), text, (separated, Fix.drop_field("vpp")), ("vpp",))
    elif count == 1:
        yield from () if others else _shares(world, (separated, Fix.give_field("pp", 1)))
    elif pp == 1:
        text = f"the pattern has {count} segments, but there is only one pipeline stage"
        yield PatternMistake(_start(world, 1) - 1, text, (Fix.advise("remove |"), Fix.give_field("pp", count)), ("pp",))
    elif count % pp:
        text = f"{count} segments are not divisible by {pp} pipeline stages"
        yield PatternMistake(
            _start(world, count // pp * pp), text, (Fix.give_field("pp", note=f"a divisor of {count}"),), ("pp",)
        )
    elif count != pp * vpp:
        text = f"{count} segments on {pp} pipeline stages give vpp={count // pp}, but vpp is {vpp}"
        yield PatternMistake(
            _start(world, min(pp * vpp, count - 1)), text, (Fix.give_field("vpp", count // pp),), ("pp", "vpp")
        )
    for field in others:
        text = f"{field} is set, but only the pattern assigns layers to pipeline stages"
        place = _start(world, 1) - 1 if count > 1 else layers // pp % layers
        yield PatternMistake(place, text, (Fix.drop_field(field),), (field,))
    for field in (field for field in _ENDS if count > 1 and world.is_set(field)):
        text = f"segments and {field} both assign layers to pipeline stages"
        yield PatternMistake(_start(world, 1) - 1, text, (Fix.drop_field(field),), (field,))


def _shares(world: World, fix: tuple[Fix, ...]) -> Iterator[PatternMistake]:
    """Check that stages share the layers of a pattern without segments, except the layers of the first and the last stage."""
    shared, stages = world.equal_share
    layers = len(world.pattern.layers)
    if world.num_layers != layers:
        return
    if stages and shared % stages:
        text = f"{shared} layers are not divisible by {stages} pipeline stages"
        yield PatternMistake(world.first_stage_layers or shared // stages, text, fix, ("pp",))
    elif shared and not stages and _has_segments(world):
        ends = layers - shared
        text = f"the first and the last stage have {ends} layers, but the pattern has {layers} layers"
        given = tuple(Fix.drop_field(field) for field in _ENDS if world.is_set(field))
        yield PatternMistake(min(ends, layers - 1), text, given, ("pp", *_ENDS))


def _has_segments(world: World) -> bool:
    return not (world.knows("megatron") and version_in(world.megatron, _NO_SEGMENTS))


def _start(world: World, segment: int) -> int:
    """Return the place of the first character of a segment."""
    return sum(len(part) + 1 for part in world.pattern.segments[:segment])


def _experts(world: World) -> Iterator[PatternMistake]:
    """Check that layers with experts and the number of experts go together, and attention with its kind."""
    pattern = world.pattern
    if EXPERTS in pattern.text and world.knows("num_experts") and not world.num_experts:
        text = "a layer has experts (E), but num_experts is 0"
        yield PatternMistake(pattern.text.index(EXPERTS), text, (Fix.give_field("num_experts"),), ("num_experts",))
    if EXPERTS not in pattern.text and world.is_set("num_experts"):
        text = f"num_experts is {world.num_experts}, but no layer of the pattern has experts (E)"
        place = max(pattern.text.find("-"), 0)
        yield PatternMistake(place, text, (Fix.advise("write E for -"), Fix.drop_field("num_experts")), ("num_experts",))
    if "*" in pattern.text and world.is_set("multi_latent_attention"):
        text = f"attention is multi-latent, but * is {KINDS['*']} with separate keys"
        fix = (Fix.advise("write + for *"), Fix.drop_field("multi_latent_attention"))
        yield PatternMistake(pattern.text.index("*"), text, fix, ("multi_latent_attention",))
    for layer in RECURRENT:
        if layer in pattern.text and world.platform != "cuda":
            kernels = f"{KINDS[layer]}, whose kernels ({_KERNELS[layer]})"
            text = f"{layer} is {kernels} are available only on cuda, but the platform is {world.platform}"
            other = Fix.advise(f"remove {layer}; this platform supports {' '.join(ATTENTION)} - E")
            yield PatternMistake(pattern.text.index(layer), text, (other,), ("platform",))


def _predictions(world: World) -> Iterator[PatternMistake]:
    """Check that the pattern has the layers of multi-token prediction."""
    pattern, end = world.pattern, len(world.pattern.text)
    if world.knows("mtp_num_layers") and world.mtp_num_layers != len(pattern.predictions):
        text = f"mtp_num_layers is {world.mtp_num_layers}, but the number of depths after / is {len(pattern.predictions)}"
        place = pattern.text.find("/") if pattern.predictions else end
        yield PatternMistake(place, text, (Fix.give_field("mtp_num_layers", len(pattern.predictions)),), ("mtp_num_layers",))


def _facts(world: World) -> Iterator[PatternMistake]:
    """Check that what is given of the model agrees with its pattern."""
    decoder = world.pattern.text.partition("/")[0]
    for field, kinds, what, fix in _COUNTED:
        places = [at for at, layer in enumerate(decoder) if layer in kinds]
        if world.knows(field) and (given := getattr(world, field)) != len(places):
            text = f"{field} is {given}, but the pattern has {len(places)} {what}"
            place = places[min(given, len(places) - 1)] if places else len(decoder) - 1
            yield PatternMistake(place, text, (fix,), (field,))
    for field, kinds, reason in _ALWAYS:
        place = next((at for at, layer in enumerate(decoder) if layer in kinds), -1)
        if place >= 0 and world.knows(field) and not getattr(world, field):
            yield PatternMistake(place, f"{field} is False, but {reason}", (Fix.give_field(field, True),), (field,))
