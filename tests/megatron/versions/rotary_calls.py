"""Prints the largest difference between the rotary embedding and Megatron's own, for every option of the Megatron at hand."""

import inspect
import itertools
import json

import torch

from mindspeed.engine.resolution.environment import made_up
from mindspeed.registry import activate, plan

OPTIONS = {
    "rotary_interleaved": True,
    "mla_rotary_interleaved": True,
    "multi_latent_attention": True,
    "mscale": 1.3,
    "inverse": True,
    "mla_output_remove_interleaving": True,
}


def main() -> None:
    from mindspeed.engine.inspection.megatron_copies import megatron_version

    activate(plan(environment=made_up("cpu", megatron_version())))
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from mindspeed.features.rotary_embedding.layers import apply_rotary

    known = [name for name in OPTIONS if name in inspect.signature(_apply_rotary_pos_emb_bshd).parameters]
    if "mla_rotary_interleaved" in known:
        known.remove("multi_latent_attention")  # the former name
    x, freqs = torch.randn(6, 2, 3, 12, dtype=torch.double), torch.randn(6, 1, 1, 4, dtype=torch.double).repeat(1, 1, 1, 2)
    largest = {}
    for names in itertools.chain.from_iterable(itertools.combinations(known, size) for size in range(len(known) + 1)):
        options = {name: OPTIONS[name] for name in names}
        ours, theirs = (function(x, freqs, **options) for function in (apply_rotary, _apply_rotary_pos_emb_bshd))
        largest[" ".join(names)] = float((ours - theirs).abs().max())
    print(json.dumps(largest))


if __name__ == "__main__":
    main()
