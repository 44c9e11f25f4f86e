"""Features on top of the layer with a capacity, in every layout, against that layer alone in one process with equal groups."""

from typing import Any

from tests.features.parity import BUCKETS, FULL, TENSOR, Given, given, trains

GROUPS = {"groups": 2}
"""Those of all tokens of a micro-batch."""


def around(own: dict[str, Any] | None = None, **gate: Any) -> dict[str, Given]:
    """A feature with these settings of its own and of the gate, in every layout."""

    def case(nproc: int, *features: str, more: dict[str, Any] | None = None, **world: Any) -> Given:
        settings = {"deepspeed-moe": GROUPS | gate, **(own or {}), **(more or {})}
        return given("expert-parallel", *features, settings=settings, nproc=nproc, **{"ep": 2, **world})

    return {
        "ep4": case(4, ep=4),
        "ep2, bf16": case(2, dtype="bf16"),
        "ep2 tp2, whole experts": case(2, *TENSOR, more={"expert-parallel": {"expert_tensor_size": 1}}, tp=2),
        "ep2 tp2, shared experts": case(4, *TENSOR, more={"expert-parallel": {"expert_tensor_size": 2}}, tp=2),
        "ep2 pp2": case(4, "pipeline-parallel", pp=2),
        "ep2 pp2 vpp2": case(4, "pipeline-parallel", "virtual-pipeline", pp=2, vpp=2),
        "ep2 with buckets": case(4, *BUCKETS),
        "ep2, layers recomputed": case(2, "recompute", more=FULL),
        "ep2, experts recomputed": case(2, "recompute", more={"recompute": {"modules": ("moe",)}}),
    }


ALL = {"pipe-experts": {"parts": 2}, "ampipe": {"parts": 2}, "deepspeed-moe": {"capacity_factor": 8.0, **GROUPS}}
STREAMS = around({"pipe-experts": {"parts": 2, "streams": True}})["ep2 tp2, shared experts"]
test_rows_by_index_give_what_the_layer_gives = trains("deepspeed-moe-rearrange", around())
test_what_drops_nothing_gives_what_a_roomy_layer_gives = trains("deepspeed-moe-dropless", around(capacity_factor=8.0))
test_units_give_what_the_layer_gives = trains(
    "pipe-experts",
    around({"pipe-experts": {"parts": 2}})
    | {
        "streams of tensor ranks apart": STREAMS,
        "all of them on four ranks": given(
            *("deepspeed-moe-rearrange", "deepspeed-moe-dropless", "ampipe", "expert-parallel"), settings=ALL, nproc=4, ep=4
        ),
    },
)
