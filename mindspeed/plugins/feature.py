"""Feature, FeatureSpec and FeatureArgs: what a feature is, in one class."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from mindspeed.job.world import FIELDS, PARALLEL_SIZES, PLATFORMS, World
from mindspeed.plugins.conditions import Condition
from mindspeed.plugins.constraints import SERVED_SIZES, Constraint
from mindspeed.plugins.declared_types import DeclarationError, require_types


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """An argument of Megatron-LM, by the attribute that its parser gives it (``recompute_method``).

    ``setting`` is the setting of the feature that has its value, after ``convert``; it counts where the feature is active. A
    value outside ``takes``, or a list with one, is left to Megatron. With ``follows_default`` Megatron's default counts too.
    ``switch`` is on for an argument that requests the feature and off for one that removes it; only with one of ``values``
    where these are given, and only where the parallel size ``size`` is above one. Features that are switched on by different
    values of one argument hold one slot, and a holder that is requested by name wins.
    """

    dest: str
    setting: str = ""
    switch: Literal["", "on", "off"] = ""
    values: tuple[Any, ...] = ()
    size: str = ""
    takes: tuple[Any, ...] = ()
    follows_default: bool = False
    convert: Callable[[Any], Any] | None = None

    @property
    def is_choice(self) -> bool:
        """Return whether the value of the argument decides which feature it switches on."""
        return self.switch == "on" and bool(self.values)


FLAGS: Final = tuple(name for name, declared in FIELDS.items() if declared.kind is bool)
"""Fields of a job that are true or false."""
_NAME: Final = re.compile(r"(?:compat:)?[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Lower-case words joined by dashes; features in MindSpeed's old form stand in a name space of their own."""


class FeatureArgs(BaseModel):
    """Base of a feature's argument model: frozen, unknown keys refused. Every field has a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Category(str, Enum):
    """Section of a feature in lists and in the documentation."""

    PLATFORM = "platform"
    MEGATRON = "megatron"
    PARALLEL = "parallel"
    CONTEXT_PARALLEL = "context-parallel"
    MEMORY = "memory"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MOE = "moe"
    DEEPSPEED_MOE = "deepspeed-moe"
    SCENARIO = "scenario"
    TOOL = "tool"


class Stability(str, Enum):
    """Maturity of a feature; stable needs a verification on the hardware it is for."""

    EXPERIMENTAL = "experimental"
    PROTOTYPE = "prototype"
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Numerics:
    """Claim of a feature about its results against the unmodified baseline.

    ``claim`` is exact (bit for bit), reordered (same maths, another order of summation) or
    approximate. ``loss`` bounds the relative difference of the loss, ``gradient`` the difference of each
    parameter gradient divided by its norm; both hold in fp32 and are 0 for exact.
    """

    claim: Literal["exact", "reordered", "approximate"] = "exact"
    loss: float = 0.0
    gradient: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        require_types(self)

    @classmethod
    def exact(cls) -> Numerics:
        return cls()

    @classmethod
    def reordered(cls, loss: float = 1e-6, gradient: float = 1e-5, reason: str = "") -> Numerics:
        return cls("reordered", loss, gradient, reason)

    @classmethod
    def approximate(cls, loss: float, gradient: float, reason: str) -> Numerics:
        return cls("approximate", loss, gradient, reason)


ResumeVerdict = Literal["safe", "convertible", "refused"]
_VERDICTS: Final[dict[str, tuple[ResumeVerdict, ResumeVerdict, ResumeVerdict, ResumeVerdict]]] = {
    # kind: verdict when the feature was added, was removed, has another setting, has another version
    "none": ("safe", "safe", "safe", "safe"),
    "resharded": ("convertible", "convertible", "convertible", "safe"),
    "own": ("refused", "refused", "refused", "convertible"),
}


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Data that a feature adds to checkpoints, and the verdict on one when the job that resumes it differs.

    ``kind`` is none (checkpoints are the same with and without the feature), resharded (the feature decides how
    Megatron's distributed checkpoint is cut, which any other cut can load) or own (``save_extra`` adds data that only
    this feature can load). The kind gives a verdict for a feature that was ``added`` or ``removed``, has a ``changed``
    setting, or was ``upgraded`` to another version: safe, convertible or refused. Each can be given instead, and
    ``settings`` has those of single settings; refused there is for two values, and where one of them is not given (None) the
    verdict of ``changed`` holds. ``reason`` is one clause for the reader of the message.
    """

    kind: Literal["none", "resharded", "own"] = "none"
    reason: str = ""
    added: ResumeVerdict | None = None
    removed: ResumeVerdict | None = None
    changed: ResumeVerdict | None = None
    upgraded: ResumeVerdict | None = None
    settings: Mapping[str, ResumeVerdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_types(self)

    def verdict(self, what: Literal["added", "removed", "changed", "upgraded"], setting: str = "") -> ResumeVerdict:
        """Return the verdict on a checkpoint after this difference."""
        of_kind = _VERDICTS[self.kind][("added", "removed", "changed", "upgraded").index(what)]
        given: ResumeVerdict | None = getattr(self, what)
        return self.settings.get(setting) or given or of_kind

    def __str__(self) -> str:
        words = {"none": "adds nothing", "resharded": "any other layout can load it", "own": "separate data"}[self.kind]
        return f"{words}: {self.reason}" if self.reason else words


@dataclass(frozen=True, slots=True)
class VerifyWith:
    """The smallest surroundings in which a feature does its work, for ``mindspeed features verify`` without options.

    ``features`` are in the baseline as well; ``settings`` and ``world`` hold values that the caller did not give.
    ``algorithm`` names the modules of which a function runs in each step, for a feature whose results are Megatron's also where
    it does nothing.
    """

    features: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    algorithm: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_types(self)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The declaration of a feature, as data; name and category are required.

    Its summary is the first line of the class docstring. What needs arguments and a job is a hook (`PlanHooks`,
    `PlannerHooks`). ``level`` is the optimization level that switches it on; ``slots`` the exclusive roles it holds;
    ``provides`` what it offers there to features that require it (`Capability`); ``constraints`` its relations to others and
    its conditions; ``platforms`` and ``megatron`` where it runs (empty means everywhere, any supported version);
    ``numerics`` its claim; ``sizes`` maps a parallel size of the job to the setting that is its other spelling
    (``{"tp": "size"}``; None for a size that is only derived), and a size greater than 1 adds the feature; ``follows`` names a
    flag of the job that adds it where it is true, and where it can run;
    ``megatron_flags`` the arguments of Megatron-LM that switch it on or out or are a setting of it; ``ops`` the operators it
    switches to; ``state`` what it adds to checkpoints; ``verify_with`` the surroundings in which verification finds it at
    work; ``reference`` the settings with which a feature that trains another model than Megatron takes Megatron's own means,
    as it does in the baseline that it is compared with; ``own_trainer`` the import line for a trainer without Megatron, or the
    reason why it needs Megatron.
    """

    name: str
    category: Category
    level: int = 2
    slots: frozenset[str] | set[str] = frozenset()
    provides: frozenset[str] | set[str] = frozenset()
    constraints: tuple[Constraint, ...] = ()
    platforms: frozenset[str] | set[str] = frozenset()
    megatron: str = ""
    numerics: Numerics = field(default_factory=Numerics.exact)
    stability: Stability = Stability.PROTOTYPE
    sizes: Mapping[str, str | None] = field(default_factory=dict)
    follows: str = ""
    megatron_flags: tuple[MegatronFlag, ...] = ()
    ops: tuple[str, ...] = ()
    state: CheckpointState = field(default_factory=CheckpointState)
    verify_with: VerifyWith = field(default_factory=VerifyWith)
    reference: Mapping[str, Any] | None = None
    own_trainer: str = ""

    def __post_init__(self) -> None:
        require_types(self)
        for constraint in self.constraints:
            require_types(constraint)
        names = Counter(c.name for c in self.constraints if isinstance(c, Condition))
        if twice := [name for name, count in names.items() if count > 1]:
            raise DeclarationError(f"FeatureSpec.constraints contains the condition {', '.join(twice)} twice")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the feature name {self.name!r} must consist of lower-case words joined by dashes")
        if self.level not in (0, 1, 2):
            raise ValueError(f"{self.name}: level {self.level} is not 0, 1 or 2")
        _require_known("platforms", self.platforms, PLATFORMS)
        _require_known("sizes", self.sizes, (*PARALLEL_SIZES, "dp"))
        _require_known("follows", [self.follows] if self.follows else [], FLAGS)
        served = next((SERVED_SIZES[slot] for slot in sorted(self.slots & SERVED_SIZES.keys())), "")
        constraints = [replace(c, served=served) if served and isinstance(c, Condition) else c for c in self.constraints]
        object.__setattr__(self, "constraints", tuple(constraints))
        object.__setattr__(self, "slots", frozenset(self.slots))
        object.__setattr__(self, "provides", frozenset(self.provides))
        object.__setattr__(self, "platforms", frozenset(self.platforms))

    def is_idle(self, world: World) -> bool:
        """Return whether the parallel size that the feature serves in its slot is 1, so that it has nothing to do."""
        return bool(self.slots) and not self.sizes and self.idle_size(world) is not None

    def idle_size(self, world: World) -> str | None:
        """Return the parallel size that the feature serves, by itself or in its slot, if it is 1: there is nothing to do."""
        if not (self.sizes or self.slots):
            return None
        served = (*self.sizes, *(SERVED_SIZES[slot] for slot in sorted(self.slots & SERVED_SIZES.keys())))
        return next((size for size in served if world.knows(size) and getattr(world, size) == 1), None)


def _require_known(field_name: str, given: Iterable[str], known: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise DeclarationError(
            f"FeatureSpec.{field_name} contains {', '.join(map(repr, unknown))}; allowed are {', '.join(known)}"
        )


ArgsT = TypeVar("ArgsT", bound=FeatureArgs)


class Feature(Generic[ArgsT]):
    """Base class of every feature; an instance is the pluggy plugin of one activation.

    A subclass sets ``spec`` and names its argument model as the type parameter,
    ``class Ring(Feature[RingArgs])``; without one it takes no arguments. Hooks are methods marked
    ``@hookimpl``; they read ``self.args`` and ``self.world``. The module that defines a feature imports
    neither torch nor megatron; hooks import heavy code inside the method.
    """

    spec: ClassVar[FeatureSpec]
    Args: ClassVar[type[FeatureArgs]] = FeatureArgs
    requested: bool = True
    """False for one that optimization level 1 alone switched on."""

    def __init__(self, args: ArgsT, world: World) -> None:
        self.args = args
        self.world = world

    @classmethod
    def summary(cls) -> str:
        """Return the first sentence of the class docstring, which lists and pages show."""
        return inspect.cleandoc(vars(cls).get("__doc__") or "").partition("\n")[0].removesuffix(".")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            for parameter in get_args(base):
                if isinstance(parameter, type) and issubclass(parameter, FeatureArgs):
                    cls.Args = parameter
