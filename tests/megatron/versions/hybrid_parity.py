"""Trains a GPTModel and the HybridModel of the same layers and weights; prints the largest differences on the last line.

Arguments: cases of `CASES`, all when there are none. Printed: ``{case: {kind of value: difference}}``.
Both models are unmodified Megatron's in the same layout, with layers in the roles of Transformer Engine's.
"""

import json
import sys
from dataclasses import replace
from typing import Any, Final

from mindspeed.engine.resolution.request import Layer
from mindspeed.registry import resolve
from mindspeed.workbench.verification.comparison import Tolerances, compare
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, MOE, GptShape, Recipe

_MLA: Final = replace(LLAMA, name="mla", num_query_groups=4, multi_latent_attention=True)
_MTP: Final = replace(LLAMA, name="mtp", mtp_num_layers=1)
_ENGINE: Final = ("transformer-engine-layers",)
CASES: Final[dict[str, tuple[GptShape, dict[str, int]]]] = {
    "dense": (LLAMA, {}),
    "dense tp2": (LLAMA, {"tp": 2, "world_size": 2}),
    "dense tp2 pp2": (LLAMA, {"tp": 2, "pp": 2, "world_size": 4}),
    "moe": (replace(MOE, grouped_experts=True), {}),
    "moe ep2": (replace(MOE, grouped_experts=True), {"ep": 2, "world_size": 2}),
    "mla": (_MLA, {}),
    "mla tp2 sp": (_MLA, {"tp": 2, "world_size": 2}),
    "mla tp2 pp2 sp": (_MLA, {"tp": 2, "pp": 2, "world_size": 4}),
    "mtp": (_MTP, {}),
    "mtp pp2": (_MTP, {"pp": 2, "world_size": 2}),
    "mtp tp2 pp2": (_MTP, {"tp": 2, "pp": 2, "world_size": 4}),
    "moe ep2 pp2": (replace(MOE, grouped_experts=True), {"ep": 2, "pp": 2, "world_size": 4}),
}
"""Latent attention is tensor-parallel with the sequence split too. Without, Megatron does not add the gradients of the rotary
keys over the ranks (NVIDIA/Megatron-LM #1699): replicas of one weight differ, in both models alike."""


def differences(name: str, pool: WorkerPool) -> dict[str, float]:
    """Return the largest difference of each kind between both models."""
    shape, sizes = CASES[name]
    layout = {"world_size": 1, **sizes}
    features = ("sequence-parallel", *_ENGINE) if name.endswith(" sp") else _ENGINE
    records = []
    for model in (shape, shape.as_hybrid()):
        recipe = Recipe(model)
        layer = Layer("test", features=features, world=recipe.world() | layout, platform="cpu", level=0)
        records.append(pool.run(resolve([layer]), recipe, layout["world_size"]))
    largest: dict[str, float] = {}
    for check in compare(*records, Tolerances(1e-6, 1e-6, 1e-6)):
        kind = check.what.partition(" of ")[0]
        found = float("inf") if check.largest_difference is None else check.largest_difference
        largest[kind] = max(largest.get(kind, 0.0), found)
    return largest


def main() -> None:
    with WorkerPool() as pool:
        found: dict[str, Any] = {name: differences(name, pool) for name in sys.argv[1:] or CASES}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
