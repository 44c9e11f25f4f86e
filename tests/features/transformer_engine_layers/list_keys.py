"""Print the keys that models of local layers save, or of Megatron's own wrappers over an engine with the real parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

import mindspeed
from tests.features.transformer_engine_layers.saved_keys import MODELS, build, saved
from tests.features.transformer_engine_layers.single_rank import single_rank


def main(layers: str) -> None:
    """Print one of the lists of saved_keys.yaml."""
    if layers == "engine":
        sys.path.insert(0, str(Path(__file__).with_name("named_engine")))
    mindspeed.activate(mindspeed.plan([], platform="cpu", level=0))
    with single_rank():
        lists = {name: saved(build(name, layers == "engine")) for name in MODELS}
    print(yaml.safe_dump(lists, sort_keys=False))


if __name__ == "__main__":
    main(sys.argv[1])
