"""No token is dropped, whatever the layout: against the layer with a capacity that drops none."""

from tests.features.parity import Given, given, trains


def roomy(*features: str, nproc: int = 2, padding: bool | None = None, **world: int) -> Given:
    own = {} if padding is None else {"deepspeed-moe-dropless": {"padding": padding}}
    settings = {"deepspeed-moe": {"capacity_factor": 8.0}, **own}
    return given("expert-parallel", *features, also=["deepspeed-moe"], settings=settings, nproc=nproc, ep=2, **world)


test_it_is_the_layer_that_drops_nothing = trains(
    "deepspeed-moe-dropless",
    {f"padding {padding}": roomy(padding=padding) for padding in (False, True)}
    | {f"by index, padding {padding}": roomy("deepspeed-moe-rearrange", padding=padding) for padding in (False, True)}
    | {"stages with maxima of their own": roomy("pipeline-parallel", nproc=4, pp=2)},
)
