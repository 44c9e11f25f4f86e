"""The ``train`` section of a job file: one model is the source of its keys, its flags and their help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed.engine.resolution.setting_validation import accepted_value, flag
from mindspeed.plugins.fixes import Advice, GiveOption, advice
from mindspeed.plugins.near_names import near_names, suggestion
from mindspeed.plugins.problems import Problem

JOB_FILE: Final = "job file"


class TrainConfig(BaseModel):
    """Settings of training. Sizes, the model's shape and the precision are values of the world and stand there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # model
    style: Literal["llama", "gpt2"] = Field(
        "llama", description="RMSNorm, SwiGLU, rotary positions and GQA, or GPT-2's choices"
    )
    rotary_base: int = Field(10000, ge=1, description="base of the rotary position embedding")
    norm_epsilon: float = Field(1e-5, gt=0, description="epsilon of the norms")
    init_std: float = Field(0.02, gt=0, description="standard deviation of new weights")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention and of both residual branches")
    aux_loss_coeff: float = Field(1e-2, ge=0, description="weight of the load-balancing loss of a MoE model")

    # data
    data: str | None = Field(None, description="prefix of Megatron's indexed data; without it Python's own sources are read")
    tokenizer: str | None = Field(None, description="'bytes' or a tokenizer.json, for data that mindspeed did not prepare")
    held_out: float = Field(0.02, gt=0, lt=1, description="share of the data that is never trained on")
    seed: int = Field(1234, ge=0, description="seed of weights, dropout and data order")

    # schedule
    train_iters: int = Field(300, ge=1, description="optimizer steps in all, those before a resume included")
    lr: float = Field(3e-3, gt=0, description="highest learning rate")
    min_lr: float = Field(1e-4, ge=0, description="learning rate at the end of the decay")
    warmup_iters: int = Field(20, ge=0, description="steps over which the learning rate rises from 0")
    decay_iters: int | None = Field(None, ge=1, description="steps after which the decay has ended; all steps if not given")
    decay: Literal["cosine", "linear", "constant"] = Field("cosine", description="how the learning rate falls")

    # optimizer
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of Adam's first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of Adam's second moment")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    clip_grad: float = Field(1.0, ge=0, description="largest norm of the gradient; 0 does not clip")

    # run
    run: str | None = Field(None, description="folder of the run; runs/DATE-TIME if not given")
    log_interval: int = Field(10, ge=1, description="steps between two lines of progress")
    save_interval: int | None = Field(None, ge=1, description="steps between two checkpoints; only one at the end if not given")
    keep: int = Field(2, ge=1, description="checkpoints that are kept, newest first")
    eval_interval: int | None = Field(None, ge=1, description="steps between two evaluations; only one at the end if not given")
    eval_iters: int = Field(20, ge=1, description="held-out batches of an evaluation")
    prompt: str = Field("def ", description="start of the text that is generated at the end")
    sample_tokens: int = Field(64, ge=0, description="tokens to generate at the end; 0 generates nothing")
    top_k: int = Field(1, ge=1, description="generation draws from the k likeliest tokens; 1 is greedy")


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
        fix = suggestion(near_names(key, fields), f"known keys: {', '.join(fields)}")
        return Problem("MS305", f"unknown key {key!r} in train", where=where, fix=advice(fix))
    text = f"train.{key} is {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    return Problem("MS301", text, where=where, fix=Advice(f"{flag(key)} {accepted_value(fields[key])}"))


def _disagreements(config: TrainConfig, origin: Mapping[str, str]) -> list[Problem]:
    problems = []
    if config.min_lr > config.lr:
        text = f"train.min_lr is {config.min_lr}, which is above train.lr, {config.lr}"
        fix = Advice(f"--min-lr {config.lr / 10:g}")
        problems.append(Problem("MS301", text, where=origin.get("min_lr", "default"), fix=fix))
    last = config.decay_iters or config.train_iters
    if config.warmup_iters >= last and "warmup_iters" in origin:
        text = f"train.warmup_iters is {config.warmup_iters}, and the decay ends at step {last}"
        problems.append(Problem("MS301", text, where=origin["warmup_iters"], fix=GiveOption("--warmup-iters", last // 10)))
    return problems
