"""The ``train`` section of a job file: one model is the source of its keys, its flags and their help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed.engine.planning.fingerprint import text_of
from mindspeed.engine.resolution.setting_validation import accepted_value, flag
from mindspeed.problems import Fix, Problem, advice, near_names, suggestion

JOB_FILE: Final = "job file"


class TrainConfig(BaseModel):
    """Settings of training. Sizes, the model's shape and the precision are values of the world and stand there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # model
    style: Literal["llama", "gpt2"] = Field(
        "llama", description="Architecture: llama = RMSNorm, SwiGLU, rotary positions and GQA; gpt2 = that of GPT-2"
    )
    rotary_base: int = Field(10000, ge=1, description="Base of the rotary position embedding")
    norm_epsilon: float = Field(1e-5, gt=0, description="Epsilon of the norms")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of initial weights")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention and of both residual branches")
    aux_loss_coeff: float = Field(1e-2, ge=0, description="Weight of the load-balancing loss of a MoE model")

    # data
    data: str | None = Field(
        None, description="Prefix of Megatron's indexed data (default: the sources of Python's standard library)"
    )
    tokenizer: str | None = Field(
        None,
        description="Tokenizer of --data: 'bytes' or the path of a tokenizer.json. Not needed if mindspeed data prepare wrote "
        "the data",
    )
    held_out: float = Field(0.02, gt=0, lt=1, description="Fraction of the data that is used for evaluation only")
    seed: int = Field(1234, ge=0, description="Random seed of weights, dropout and data order")

    # schedule
    train_iters: int = Field(300, ge=1, description="Total number of optimizer steps, including those before a resume")
    lr: float = Field(3e-3, gt=0, description="Maximum learning rate")
    min_lr: float = Field(1e-4, ge=0, description="Learning rate at the end of the decay")
    warmup_iters: int = Field(20, ge=0, description="Number of steps over which the learning rate rises from 0")
    decay_iters: int | None = Field(
        None, ge=1, description="Number of steps after which the learning-rate decay ends (default: all steps)"
    )
    decay: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the learning-rate decay")

    # losses that are not usable
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="Policy for losses and gradients that are not finite: stop = end the run, skip = change no weights, "
        "rollback = return to the newest checkpoint. The samples of the step are not read again",
    )
    on_spike: Literal["off", "skip", "rollback"] = Field(
        "off", description="Policy for a loss spike, as for --on-nan; off = loss spikes are not looked for"
    )
    spike_factor: float = Field(
        2.0, gt=1, description="A loss is a spike if it exceeds this many times the mean loss of the last 100 steps"
    )

    # optimizer
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of Adam's second moment")
    adam_eps: float = Field(1e-8, gt=0, description="Epsilon of Adam")
    clip_grad: float = Field(1.0, ge=0, description="Maximum gradient norm; 0 = no clipping")

    # run
    run: str | None = Field(None, description="Run folder (default: runs/DATE-TIME)")
    log_interval: int = Field(10, ge=1, description="Number of steps between two lines of progress")
    save_interval: int | None = Field(
        None, ge=1, description="Number of steps between two checkpoints (default: only one at the end)"
    )
    async_save: bool = Field(False, description="Continue training while a checkpoint is written from copies of the tensors")
    keep: int = Field(2, ge=1, description="Number of checkpoints to keep, newest first")
    local_save: str | None = Field(
        None,
        description="Folder on a disk of each node for further checkpoints, of which the newest is kept. --auto-resume "
        "continues from it on the same ranks (needs nvidia-resiliency-ext)",
    )
    local_save_interval: int = Field(10, ge=1, description="Number of steps between two checkpoints in the --local-save folder")
    remote: str | None = Field(
        None,
        description="Folder in object storage, such as s3://bucket/job, to which each checkpoint is copied. --auto-resume "
        "fetches the newest one if the run folder does not have it",
    )
    eval_interval: int | None = Field(
        None, ge=1, description="Number of steps between two evaluations (default: only one at the end)"
    )
    eval_iters: int = Field(20, ge=1, description="Number of held-out batches per evaluation")
    prompt: str = Field("def ", description="Start of the text that is generated at the end of training")
    sample_tokens: int = Field(64, ge=0, description="Number of tokens to generate at the end of training; 0 = none")
    top_k: int = Field(
        1,
        ge=1,
        description="Number of most likely tokens from which the next one is drawn, for the text at the end of training. "
        "With 1 it is always the most likely (greedy)",
    )


OPERATION: Final = frozenset(
    {
        *("run", "log_interval", "save_interval", "async_save", "keep", "eval_interval", "eval_iters"),
        *("local_save", "local_save_interval", "remote", "prompt", "sample_tokens", "top_k"),
    }
)
"""Fields that change no number of the training."""
_PATHS: Final = frozenset({"run", "data", "tokenizer", "local_save"})
"""Fields that may differ between nodes; the content of the data counts instead."""


def training_facts(config: TrainConfig, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the fields of a configuration as facts, but paths and the fields in ``without``."""
    values = config.model_dump(exclude=set(_PATHS | without))
    return {f"training {name}": text_of(value) for name, value in values.items()}


def train_config(sources: Mapping[str, Mapping[str, Any]]) -> tuple[TrainConfig, list[Problem]]:
    """Merge sources, low to high (``{"job file": {...}, "command line": {...}}``), into a configuration.

    Also returns every problem: MS305 for an unknown key, MS301 for a wrong value; the key then has its default.
    """
    values = {str(key): value for section in sources.values() for key, value in section.items()}
    origin = {str(key): source for source, section in sources.items() for key in section}
    problems = []
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as error:
        problems = [_explain(detail, origin) for detail in error.errors()]
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
        config = TrainConfig.model_validate({key: value for key, value in values.items() if key not in wrong})
    return config, problems + _disagreements(config, origin)


def _explain(detail: Any, origin: Mapping[str, str]) -> Problem:
    key = str(detail["loc"][0])
    where = origin.get(key, "")
    fields = TrainConfig.model_fields
    if detail["type"] == "extra_forbidden":
        fix = suggestion(near_names(key, fields), f"use one of the keys {', '.join(fields)}")
        return Problem("MS305", f"unknown key {key!r} in train", where=where, fix=advice(fix))
    text = f"train.{key} is {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    given = flag(key) if fields[key].annotation is bool else f"{flag(key)} {accepted_value(fields[key])}"
    return Problem("MS301", text, where=where, fix=Fix.advise(given))


def _disagreements(config: TrainConfig, origin: Mapping[str, str]) -> list[Problem]:
    problems = []
    if config.min_lr > config.lr:
        text = f"train.min_lr is {config.min_lr}, which is greater than train.lr, {config.lr}"
        fix = Fix.advise(f"--min-lr {config.lr / 10:g}")
        problems.append(Problem("MS301", text, where=origin.get("min_lr", "default"), fix=fix))
    last = config.decay_iters or config.train_iters
    if config.warmup_iters >= last and "warmup_iters" in origin:
        text = (
            f"train.warmup_iters is {config.warmup_iters}, but warm-up must end before step {last}, where the learning-rate "
            "decay ends"
        )
        problems.append(Problem("MS301", text, where=origin["warmup_iters"], fix=Fix.give_option("--warmup-iters", last // 10)))
    return problems
