"""One checkout and one initial checkpoint per model for the whole matrix, and plans of command lines."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from shlex import split

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.training_plan import plan_training
from tests.megatron.conftest import activate  # noqa: F401
from tests.megatron_lm import stub
from tests.megatron_lm.checkout import LATENT, LLAMA, LOCAL, MOE, SHARED, Checkout, Run, path
from tests.megatron_lm.warm_ranks import WarmCheckout

MODELS = {
    "gpt": (),
    "llama": tuple(LLAMA),
    "moe": (*LLAMA, *MOE),
    "shared": (*LLAMA, *MOE, *SHARED),
    "latent": tuple(LATENT),
    "further": (*LLAMA, "--mtp-num-layers", "1"),
}


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="session")
def warm_ranks(tmp_path_factory) -> Iterator[WarmCheckout]:
    """A process with the modules of Megatron-LM imported, from which ranks are forked: they start in no time."""
    ranks = WarmCheckout(tmp_path_factory.mktemp("warm"), path())
    yield ranks
    ranks.close()


@pytest.fixture
def warm(tmp_path, warm_ranks) -> WarmCheckout:
    """The checkout with forked ranks, for tests of numbers; those of `checkout` start as a user's do."""
    return warm_ranks.at(tmp_path)


@pytest.fixture(scope="session")
def initial(warm_ranks, tmp_path_factory) -> Callable[[str], list[str]]:
    """The flags of a model that starts from one checkpoint, saved by one stock process: ``initial("llama")``."""
    made: dict[str, list[str]] = {}

    def flags(model: str) -> list[str]:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            saving = ["--train-iters", "1", "--save", str(folder / "initial"), "--save-interval", "1"]
            warm_ranks.at(folder).stock(1, *MODELS[model], *saving).ended_well()
            loading = ["--load", str(folder / "initial"), "--finetune", "--no-load-optim", "--no-load-rng"]
            made[model] = [*MODELS[model], *LOCAL, *loading]
        return made[model]

    return flags


@pytest.fixture(scope="session")
def stock(warm_ranks, initial, tmp_path_factory) -> Callable[..., Run]:
    """The stock run of a model in one process, with more flags, from its initial checkpoint."""
    runs: dict[tuple[str, ...], Run] = {}

    def run(model: str, *more: str) -> Run:
        asked = (model, *more)
        if asked not in runs:
            flags = [*initial(model), "--train-iters", "4", *more]
            runs[asked] = warm_ranks.at(tmp_path_factory.mktemp("stock")).stock(1, *flags).ended_well()
        return runs[asked]

    return run


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plan a command line of Megatron-LM for the CPU, without any variant of an operator, as level 1 would add its feature:
    ``plan("--features swiglu ...", world_size=2)``."""
    monkeypatch.setattr("mindspeed.ops.variants.has_variant", lambda op, platform: False)
    monkeypatch.syspath_prepend(str(stub.build(tmp_path)))
    monkeypatch.delenv("MINDSPEED_DISABLE", raising=False)

    def make(line, world_size=1, environ=None):
        environment = replace(made_up("cpu", "0.16.1"), world_size=world_size)
        return plan_training(split(line), environ or {}, environment)[1]

    return make
