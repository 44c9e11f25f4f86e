"""Measured against predicted: steps of many configurations on two ranks, peaks of memory on one, two and four, and FLOPs."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np

from benchmarks.table import Row
from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.memory_planner.plans import peak_of
from mindspeed.ops.availability import running
from mindspeed.plugins import MindSpeedError
from mindspeed.plugins.discovery import discover
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.measure import telling
from mindspeed.workbench.tuning.search import Configuration, Question, Resolved, search
from mindspeed.workbench.tuning.space import Layouts, candidates, choices
from mindspeed.workbench.tuning.time import DEFAULTS, KINDS, Machine, fit, step_seconds
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, MOE, Recipe

COMMAND: Final = "python -m benchmarks.tuning --measure SECONDS"
LARGE: Final = {"hidden_size": 128, "ffn_hidden_size": 352, "num_attention_heads": 8, "seq_length": 128, "vocab_size": 512}
MODELS: Final = {
    "dense": replace(LLAMA, **LARGE, num_query_groups=8),
    "GQA": replace(LLAMA, **LARGE, num_query_groups=2),
    "MoE": replace(MOE, **LARGE | {"ffn_hidden_size": 128}, num_query_groups=2),
}
PER_MODEL, CALIBRATED = 14, 12
WARM_UP, STEPS, SECONDS = 2, 5, 1.2
"""A measurement has as many steps as take so long, but at least five. Others on the machine add to some steps a fifth, for
seconds: what counts is the quantile 0.2, which they rarely reach."""
DRIFT, TRIES = 5.0, 3
"""Percent that controls before and behind a measurement may lie apart, and how often it is tried in a round."""
BUCKETS: Final = {"async-ddp": {"bucket_size": 65536}}
"""With Megatron's own size these models are one bucket, and nothing overlaps."""
KEPT: Final = Path(__file__).parents[1] / "build" / "tuning-rounds.json"


@dataclass(frozen=True)
class Run:
    """One configuration of one model, with what a worker needs to train it."""

    model: str
    row: Configuration
    plan: ActivationPlan
    recipe: Recipe


def _started(recipe: Recipe) -> Any:
    """Return a run of this rank before its first step."""
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed.workbench.verification.record import RankResult
    from mindspeed.workbench.verification.training import _Run

    torch.manual_seed(recipe.seed)
    model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    return _Run(recipe, RankResult())


def timed(recipe: Recipe) -> float:
    """Train on this rank and return the seconds of a step behind the first ones that a fifth of them do not exceed."""
    run = _started(recipe)
    warm = [_timed_step(run, 1 + number) for number in range(WARM_UP)]  # step 0 records gradients
    steps = max(STEPS, math.ceil(SECONDS / _slowest(warm[-1])))
    return float(np.quantile([_timed_step(run, 1 + WARM_UP + number) for number in range(steps)], 0.2))


def _timed_step(run: Any, number: int) -> float:
    start = time.perf_counter()
    run.train_step(number)
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([seconds], device="cuda")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def runs() -> list[Run]:
    """The configurations of all models on two ranks that differ most in their work."""
    found = []
    for name, shape in MODELS.items():
        recipe = Recipe(shape, steps=1, global_batch_size=8)
        model = {**recipe.world(), "world_size": 2, "platform": "cpu", "megatron": registry.probe("cpu").megatron}
        model |= {"kv_channels": shape.hidden_size // shape.num_attention_heads}
        model |= {"moe_ffn_hidden_size": shape.ffn_hidden_size} if shape.num_experts else {}
        catalog = discover(only=())
        question = Question(
            Layouts(model, candidates(model, {})),
            choices(catalog, model, (), ()),
            FixedRequest(settings=BUCKETS),
            Machine(DEFAULTS["cpu"], os.cpu_count() or 1),
        )
        rows = search(question, catalog, running("cpu"), lambda choice, world: Resolved(), 400).rows
        taken = [made for row in _different(rows, PER_MODEL + 6) if (made := _run(name, recipe, row)) is not None]
        found += taken[:PER_MODEL]
    return found


def _different(rows: Sequence[Configuration], count: int) -> list[Configuration]:
    """Return configurations that differ most in their work: the fastest, then each time the one farthest from those chosen."""
    design = np.array([[row.work[kind] for kind in KINDS] for row in rows])
    scale = design.max(axis=0)
    design = np.log1p(10 * design / np.where(scale > 0, scale, 1))
    chosen = [0]
    distance = np.linalg.norm(design - design[0], axis=1)
    while len(chosen) < min(count, len(rows)) and distance.max() > 0:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(design - design[chosen[-1]], axis=1))
    return [rows[number] for number in chosen]


def _run(name: str, recipe: Recipe, row: Configuration) -> Run | None:
    recipe = replace(recipe, micro_batch_size=row.sizes["micro_batch_size"])
    world = {**recipe.world(), "world_size": 2, **row.sizes}
    try:
        settings = {name: dict(values) for name, values in row.choice.settings.items()}
        settings |= BUCKETS if any(name.startswith("async-") for name in row.choice.features) else {}
        plan = registry.plan(list(row.choice.features), settings, world=world)
    except MindSpeedError:
        return None
    return Run(name, row, plan, recipe)


@dataclass(frozen=True)
class Visit:
    """Seconds of a step, and by how many percent the controls before and behind it lie apart."""

    seconds: float
    drift: float


def measured_rounds(budget: float, chosen: Sequence[Run]) -> list[dict[int, Visit]]:
    """Measure all configurations in rounds of random order until ``budget`` seconds are spent, and keep each as it comes.

    A control runs between measurements. One whose controls lie more than `DRIFT` apart is made again, up to `TRIES` times.
    """
    kept = _kept_rounds(chosen)
    start = time.monotonic()
    with WorkerPool(search_path=[str(Path(__file__).parents[1])]) as pool:

        def seconds(run: Run) -> float:
            return max(pool.call(timed, 2, run.recipe, plan=run.plan))

        seconds(chosen[0])  # workers start
        control = seconds(chosen[0])
        while time.monotonic() - start < budget:
            if not kept or len(kept[-1]) == len(chosen):
                kept.append({})
            order = random.Random(len(kept)).sample(range(len(chosen)), len(chosen))
            number = next(number for number in order if number not in kept[-1])
            visits = []
            while len(visits) < TRIES and not (visits and visits[-1].drift <= DRIFT):
                before, spent, control = control, seconds(chosen[number]), seconds(chosen[0])
                visits.append(Visit(spent, 200 * abs(control - before) / (control + before)))
            kept[-1][number] = min(visits, key=lambda visit: visit.drift)
            _keep_rounds(chosen, kept)
            if len(kept[-1]) == len(chosen):
                quiet = sum(visit.drift <= DRIFT for visit in kept[-1].values())
                print(f"round {len(kept)}: {time.monotonic() - start:.0f} s, {quiet} of {len(chosen)} quiet", file=sys.stderr)
    return kept


def _kept_rounds(chosen: Sequence[Run]) -> list[dict[int, Visit]]:
    """The rounds that were measured of these configurations on this machine, the last of them maybe in part."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    rounds = kept["rounds"] if kept.get("of") == _measured_here(chosen) else []
    return [{int(number): Visit(*visit) for number, visit in one.items()} for one in rounds]


def _keep_rounds(chosen: Sequence[Run], rounds: Sequence[Mapping[int, Visit]]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    partial = KEPT.with_suffix(".part")
    plain = [{number: (visit.seconds, visit.drift) for number, visit in one.items()} for one in rounds]
    partial.write_text(json.dumps({"of": _measured_here(chosen), "rounds": plain}), encoding="utf-8")
    partial.replace(KEPT)


def _measured_here(chosen: Sequence[Run]) -> list[str]:
    return [version("torch"), str(os.cpu_count()), *(f"{run.plan.digest} {run.recipe}" for run in chosen)]


def accuracy_rows(budget: float) -> list[Row]:
    """Predict every step of the configurations from twelve of them; one that was never measured in quiet leaves no number."""
    chosen = runs()
    rounds = measured_rounds(budget, chosen)
    visits = [[one[number] for one in rounds if number in one] for number in range(len(chosen))]
    quiet = [[visit.seconds for visit in seen if visit.drift <= DRIFT] for seen in visits]
    loud = sum(not seconds for seconds in quiet)
    told = f"{sum(map(len, quiet))} of {sum(map(len, visits))} measurements between controls that lie {DRIFT:g} % apart at most"
    spreads = [100 * (max(seconds) / min(seconds) - 1) for seconds in quiet if len(seconds) > 1]
    if spreads:
        told += f"; those of one configuration {statistics.median(spreads):.0f} % (median), {max(spreads):.0f} % at most"
    known = all(visits)
    medians = [
        statistics.median(own or [visit.seconds for visit in seen]) for own, seen in zip(quiet, visits, strict=True) if seen
    ]
    table = _accuracy(chosen, np.array(medians)) if known else (float("nan"),) * 4
    rejected = f"rejected, {loud} configurations have none: " if loud else ""
    names = (
        ("C13: Spearman correlation of predicted and measured steps", 0.97, "", True),
        ("C13: regret of the fastest predicted one, worst model", 2.0, "%", False),
        ("C13: median error of a step", 5.0, "%", False),
        ("C13: worst error of a step", 15.0, "%", False),
    )
    rows = []
    for (what, target, unit, least), value in zip(names, table, strict=True):
        seen = f"{rejected}{len(chosen)} configurations of {len(MODELS)} models, {CALIBRATED} measured to fit; {told}"
        note = f"{seen}; seen {value:.3f} {unit}".rstrip()
        rows.append(Row(what, target, float("nan") if loud else value, unit, COMMAND, note, least=least))
    return rows


def _accuracy(chosen: Sequence[Run], measured: Any) -> tuple[float, float, float, float]:
    cores = os.cpu_count() or 1
    prior, crowd = Machine(DEFAULTS["cpu"], cores), max(1.0, 2 / cores)
    calibration = {id(row) for row in telling([run.row for run in chosen], CALIBRATED, prior)}
    fitted = [number for number, run in enumerate(chosen) if id(run.row) in calibration]
    machine = fit([dict(chosen[n].row.work) for n in fitted], [float(measured[n]) for n in fitted], prior, crowd)
    predicted = np.array([float(step_seconds(run.row.work, machine, crowd)) for run in chosen])
    errors = 100 * np.abs(predicted / measured - 1)
    order = np.argsort(np.argsort(predicted)), np.argsort(np.argsort(measured))
    regrets = []
    for name in MODELS:
        own = [number for number, run in enumerate(chosen) if run.model == name]
        best = min(own, key=lambda number: predicted[number])
        regrets.append(100 * (measured[best] / min(measured[own]) - 1))
    return float(np.corrcoef(*order)[0, 1]), float(max(regrets)), float(np.median(errors)), float(errors.max())


LAYOUTS: Final[tuple[tuple[str, str, tuple[str, ...], dict[str, int]], ...]] = (
    ("one rank", "GQA", (), {"world_size": 1}),
    ("one rank of MoE", "MoE", (), {"world_size": 1}),
    ("tp 2", "GQA", (), {"world_size": 2, "tp": 2}),
    ("pp 2", "GQA", (), {"world_size": 2, "pp": 2}),
    ("two replicas", "dense", ("distributed-optimizer",), {"world_size": 2}),
    ("ep 2", "MoE", (), {"world_size": 2, "ep": 2}),
    ("tp 2 and pp 2", "GQA", (), {"world_size": 4, "tp": 2, "pp": 2}),
    ("tp 2 with sequence parallelism, two replicas", "GQA", ("sequence-parallel",), {"world_size": 4, "tp": 2}),
)


def memory_rows() -> list[Row]:
    """Compare the planner's peak with the live bytes of a step, beside what Megatron's own report says of the job."""
    rows, report = [], _megatrons_report()
    with WorkerPool(search_path=[str(Path(__file__).parents[1])]) as pool:
        for name, model, features, world in LAYOUTS:
            recipe = Recipe(MODELS[model], dtype="bf16", steps=1, global_batch_size=8)
            plan = registry.plan(list(features), platform="cpu", world={**recipe.world(), **world})
            foretold = peak_of(plan, registry.catalog())
            measured = max(peak for _, peak in pool.measure(plan, recipe, world["world_size"]))
            theirs = f"; Megatron's own report {100 * (report(recipe, plan) / measured - 1):+.0f} %" if report else ""
            note = f"{foretold:,} bytes foretold, {measured:,} live at the peak{theirs}"
            rows.append(Row(f"error of the peak, {name}", 5, 100 * abs(foretold / measured - 1), "%", COMMAND, note))
    return rows


def counted(recipe: Recipe) -> int:
    """Return by how much the operations of a step differ between the feature's counter and torch's own, on this rank."""
    from torch.utils.flop_counter import FlopCounterMode

    from mindspeed.features.tflops.meter import OperationCounter

    run = _started(recipe)
    with FlopCounterMode(display=False) as theirs, OperationCounter() as ours:
        run.train_step(1)
    return int(ours.executed - theirs.get_total_flops())


def flops_rows() -> list[Row]:
    """Compare the counter of tflops with torch's on plain Megatron, whose operators torch knows."""
    latent = replace(MODELS["dense"], name="mla", multi_latent_attention=True)
    rows = []
    with WorkerPool(search_path=[str(Path(__file__).parents[1])]) as pool:
        for name, shape in {**MODELS, "MLA": latent}.items():
            recipe = Recipe(shape, steps=1, global_batch_size=2)
            plan = registry.plan(platform="cpu", level=0, world={**recipe.world(), "world_size": 1})
            (difference,) = pool.call(counted, 1, recipe, plan=plan)
            rows.append(Row(f"C15: FLOPs of a step apart from torch's counter, {name}", 0, abs(difference), "", COMMAND))
    return rows


def deterministic_rows() -> list[Row]:
    """Compare steps with and without deterministic algorithms, in turn."""
    recipe = Recipe(MODELS["GQA"], steps=1, global_batch_size=2)
    world = {**recipe.world(), "world_size": 1}
    plans = [registry.plan(list(names), platform="cpu", world=world) for names in ((), ("deterministic",))]
    seconds: list[list[float]] = [[], []]
    with WorkerPool(search_path=[str(Path(__file__).parents[1])]) as pool:
        for _ in range(7):
            for plan, found in zip(plans, seconds, strict=True):
                found += pool.call(timed, 1, recipe, plan=plan)
    plain, fixed = map(statistics.median, seconds)
    drift = 100 * (max(seconds[0]) - min(seconds[0])) / plain
    note = f"medians of 7 runs in turn; those without it lie {drift:.0f} % apart"
    return [Row("a deterministic step over another", 1.1, fixed / plain, "", COMMAND, note)]


def _megatrons_report() -> Any:
    """Return ``(recipe, plan) -> bytes`` of Megatron-LM's report, None without a checkout in MEGATRON_LM_PATH."""
    root = os.environ.get("MEGATRON_LM_PATH")
    if not root:
        return None
    source = (Path(root) / "megatron/training/theoretical_memory_usage.py").read_text(encoding="utf-8")
    module = ModuleType("theoretical_memory_usage")
    exec(source.replace("from .utils import print_rank_0", "print_rank_0 = print"), vars(module))

    def report(recipe: Recipe, plan: ActivationPlan) -> float:
        args = _arguments(recipe, plan.names, plan.world)
        activations = module.compute_activation_memory_without_sp(args, plan.world.num_micro_batches)
        return float(module.compute_weight_and_optimizer_memory(args) + activations)

    return report


def _arguments(recipe: Recipe, features: Sequence[str], world: Any) -> SimpleNamespace:
    """Megatron-LM's arguments of a job, as far as its report reads them."""
    shape, experts = recipe.shape, recipe.shape.num_experts or None
    sizes: Mapping[str, Any] = {
        "data_parallel_size": world.dp,
        "tensor_model_parallel_size": world.tp,
        "pipeline_model_parallel_size": world.pp,
        "virtual_pipeline_model_parallel_size": world.vpp if world.vpp > 1 else None,
        "expert_model_parallel_size": world.ep,
        "expert_tensor_parallel_size": 1,
        "context_parallel_size": world.cp,
    }
    return SimpleNamespace(
        **{name: getattr(shape, name) for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")},
        **{name: getattr(shape, name) for name in ("num_query_groups", "seq_length", "normalization")},
        kv_channels=shape.hidden_size // shape.num_attention_heads,
        group_query_attention=shape.num_query_groups != shape.num_attention_heads,
        multi_latent_attention=False,
        num_experts=experts,
        moe_layer_freq=1,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_shared_expert_intermediate_size=None,
        mtp_num_layers=None,
        swiglu=shape.gated_linear_unit,
        padded_vocab_size=shape.vocab_size,
        untie_embeddings_and_output_weights=not shape.tied_embeddings,
        use_distributed_optimizer="distributed-optimizer" in features,
        micro_batch_size=recipe.micro_batch_size,
        **sizes,
    )
