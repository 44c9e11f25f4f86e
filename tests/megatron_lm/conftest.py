"""One checkout and one initial checkpoint per model for the whole matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.megatron_lm.checkout import LATENT, LLAMA, MOE, Checkout, Run

MODELS = {
    "gpt": (),
    "llama": tuple(LLAMA),
    "moe": (*LLAMA, *MOE),
    "latent": tuple(LATENT),
    "further": (*LLAMA, "--mtp-num-layers", "1"),
}


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="session")
def initial(tmp_path_factory) -> Callable[[str], list[str]]:
    """The flags of a model that starts from one checkpoint, saved by one stock process: ``initial("llama")``."""
    made: dict[str, list[str]] = {}

    def flags(model: str) -> list[str]:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            saving = ["--train-iters", "1", "--save", str(folder / "initial"), "--save-interval", "1"]
            Checkout(folder).stock(1, *MODELS[model], *saving).ended_well()
            made[model] = [*MODELS[model], "--load", str(folder / "initial"), "--finetune", "--no-load-optim", "--no-load-rng"]
        return made[model]

    return flags


@pytest.fixture(scope="session")
def stock(initial, tmp_path_factory) -> Callable[..., Run]:
    """The stock run of a model in one process, with more flags, from its initial checkpoint."""
    runs: dict[tuple[str, ...], Run] = {}

    def run(model: str, *more: str) -> Run:
        asked = (model, *more)
        if asked not in runs:
            flags = [*initial(model), "--train-iters", "4", *more]
            runs[asked] = Checkout(tmp_path_factory.mktemp("stock")).stock(1, *flags).ended_well()
        return runs[asked]

    return run
