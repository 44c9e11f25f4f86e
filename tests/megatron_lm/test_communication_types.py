"""Megatron-LM's own script with a sequence spread over ranks by Megatron's own flags alone."""

import pytest

TYPES = {"p2p": "ring-attention", "a2a": "ulysses-attention", "all_gather": "kv-allgather-cp"}


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES)
def test_megatrons_communication_type_trains_as_one_process(warm, initial, stock, kind):
    flags = [*initial("llama"), "--train-iters", "4"]
    run = warm.adapted(2, *flags, "--context-parallel-size", "2", "--cp-comm-type", kind).ended_well()
    assert TYPES[kind] in {feature["name"] for feature in run.report["features"]}
    assert run.losses == pytest.approx(stock("llama").losses, rel=1e-5)
