"""Problems: one per mistake, with every code explained once.

A problem is written for the person who must act on it: a code, one sentence, who is
involved, where it was declared, and the fix. Nothing here raises at the first problem;
callers collect them and raise one error that carries them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe one mistake in the user's words.

    ``code`` is a key of `CODES`; ``message`` one sentence; ``features`` the names involved;
    ``chain`` the lines that explain why each of them is there; ``where`` a place the reader
    can open (distribution, version, file:line, or the source of a value); ``fix`` what to do.
    """

    code: str
    message: str
    features: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    where: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.code} {self.message}"]
        lines += [f"  because: {line}" for line in self.chain]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class MindSpeedError(Exception):
    """Base of every error that mindspeed raises; ``problems`` holds all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class ResolutionError(MindSpeedError):
    """The request cannot become a plan."""


class PatchError(MindSpeedError):
    """A patch cannot be applied, or cannot be undone."""


class PlatformError(MindSpeedError):
    """The device layer cannot do what was asked."""


class RunError(MindSpeedError):
    """A run cannot start or go on: data, checkpoint, disk, a lost rank."""


CODES: Final[dict[str, str]] = {
    "MS101": "A feature plugin failed to import or to register. It is listed with its error and cannot be "
    "activated; every other feature works. Fix the plugin or uninstall its distribution.",
    "MS102": "Two distributions provide a feature under one name. Neither is chosen silently: a built-in name "
    "cannot be shadowed, and of two third parties one must be uninstalled.",
    "MS103": "A feature declares a constraint on a name or slot that no installed feature provides. The mistake is "
    "in the declaring feature, not in your request.",
    "MS104": "A feature's declaration is wrong: a field has another type than FeatureSpec says, or it contradicts itself, for "
    "example it holds a slot together with a feature that it requires.",
    "MS105": "A feature belongs to a distribution that MINDSPEED_PLUGINS leaves out, so none of its code is loaded. It is "
    "listed with that as its state.",
    "MS106": "A new feature cannot be written: its name is malformed or taken, its folder is in use, or the place is no "
    "checkout of mindspeed.",
    "MS110": "A feature in MindSpeed's old form can never do what it says: it checks against a name that is "
    "neither a feature nor an argument, or its arguments are given and none of them can switch it on.",
    "MS111": "An old MindSpeed flag stands for a feature that this version does not have yet. The flag would do "
    "nothing, so the job is refused; docs/moving-from-mindspeed.md lists what is there.",
    "MS112": "An import name of MindSpeed that does not exist here. The message names the feature or module that "
    "takes its place.",
    "MS201": "A requested name is not a known feature. Near names are suggested.",
    "MS202": "Two active features exclude each other. Both chains of reasons are printed, so that you see which of "
    "your requests brought each in.",
    "MS203": "Two active features hold one exclusive slot. A slot is a role that only one feature can play.",
    "MS204": "A feature needs another one and strict resolution was asked for, so nothing is added by itself.",
    "MS205": "A feature needs one of several others and none of them is active. mindspeed picks one for you only "
    "where a setting of the feature says auto.",
    "MS206": "The declared order has a cycle. The path is printed with the feature that declared each edge.",
    "MS207": "A requested feature is above the optimisation level of this job.",
    "MS208": "A feature does not support this platform or this Megatron version.",
    "MS209": "A size above one was given, and no installed feature provides that parallelism.",
    "MS210": "A feature was requested and taken out at the same time, or one that was taken out is required.",
    "MS211": "MINDSPEED_DISABLE takes a feature out that the rest of the job cannot do without: another feature requires it, "
    "it provides a parallel size above one, or a plan that was made before has it.",
    "MS301": "A setting does not exist, or its value has the wrong type or range.",
    "MS302": "Sizes do not fit together, for example the world size is not a multiple of the product of the parallel sizes.",
    "MS303": "One source gives one value twice and differently: a size as --tp and as a setting of the feature that provides "
    "it, or one setting in two --set.",
    "MS304": "A check of a feature failed for these arguments and this world.",
    "MS305": "The job file cannot be read, or has a key that does not exist.",
    "MS306": "The plan says something else than the running process: another world size, another parsed argument.",
    "MS307": "A check could not be decided because a value is unknown, and strict resolution was asked for.",
    "MS341": "A setting leaves a choice to mindspeed (auto), and it cannot be made: values that decide it are not known, or "
    "none of the features that could be chosen fits this job. Give the values, or name a feature.",
    "MS342": "A setting names a feature that cannot take the place: another one is active there, or the named one does "
    "something else.",
    "MS332": "The shared attention mask cannot be had: the function that is to give it cannot be imported or gives something "
    "else than a boolean tensor of all tokens by all tokens, or what the model sees is not for a shared mask.",
    "MS333": "Adaptive context parallelism has no mask it can use: none is known, a batch came without one, its shape is "
    "another, its samples have different ones, or the model needs what the algorithm cannot do.",
    "MS335": "It is not known where the documents of a batch end, so that they cannot be kept apart.",
    "MS336": "A row of packed sequences cannot be cut into equal pieces for context parallelism.",
    "MS337": "Packed sequences do not fit into their row, or their padding would be seen.",
    "MS343": "A loss function returns two values in a job with context parallelism. Megatron then multiplies the loss by the "
    "ranks that share a sequence and sums their gradients, so these are too large by a constant factor, which Adam hides. "
    "Return the sum over this rank's tokens, their number and the report.",
    "MS401": "The target of a patch does not exist in this Megatron.",
    "MS402": "Two features patch one site in ways that cannot both hold.",
    "MS403": "A patch cannot be applied to this kind of target: a dataclass, or a class whose own source names itself.",
    "MS404": "A holder of the original object could not be rebound.",
    "MS405": "A plan is already active in this process, and it is a different one.",
    "MS406": "A replacement, wrapper or mixin named by a patch cannot be imported.",
    "MS407": "The target of a patch has other parameters, or is another kind of thing, than in the Megatron release that it "
    "calls itself: somebody has edited it, or it is a newer one than those recorded. Nothing is patched blindly.",
    "MS408": "megatron.core and megatron.training come from different copies of Megatron, so that two versions would be "
    "mixed in one process. Both folders are named.",
    "MS409": "A patch registered through MindSpeed's old names cannot be taken: it asks for a dummy, gives no new "
    "object, or is a wrapper by its content and not by its name.",
    "MS410": "A feature is active, and the phase in which it acts ended without a single call at one of its sites. The "
    "feature had no effect there: the model has no such part, or another code path ran. An error under --strict.",
    "MS411": "A patched name holds something else than what the plan put there: somebody has assigned it since.",
    "MS412": "A feature looked at its own effect and says that something is wrong with it.",
    "MS413": "A feature that optimization level 1 switched on met a part of the model that it does not fit, and left that part "
    "as Megatron has it. Training goes on. A feature that was requested refuses the model instead (MS304); --without takes the "
    "feature out. An error under --strict.",
    "MS501": "The platform is not usable here: a package or a device is missing.",
    "MS502": "Megatron is missing, or has a version that is not supported.",
    "MS503": "Too little space on a disk or in shared memory for the run.",
    "MS504": "A lock of an extension build that no process of this host holds: whoever needs the extension waits for it "
    "without end. Remove it, unless another host builds in the same folder.",
    "MS505": "An operator was called with tensors of a shape or type that it cannot take.",
    "MS506": "Several importable copies of Megatron have different versions, or their parts would be mixed.",
    "MS507": "Megatron's compiled data helpers do not load and cannot be compiled here.",
    "MS508": "The run has more tokens than these data helpers can count.",
    "MS509": "A lock file is missing, damaged, or of another format.",
    "MS510": "There is no C++ compiler to build the operators with. Nothing is broken: they run their references, which are "
    "slower. CXX names a compiler that is not called g++, c++ or clang++.",
    "MS511": "The C++ operators cannot be compiled, linked or loaded. The first errors are printed, the log has all of them. "
    "Operators run their references meanwhile.",
    "MS512": "The built library of C++ operators does not load, so the references run. It is damaged, or lacks a library that "
    "was there when it was built.",
    "MS513": "C++ operators were built once, for another torch, processor, C library or state of the sources than is here, so "
    "the references run. `mindspeed ops build` builds those for this machine; the cache keeps both.",
    "MS514": "The folder in which operators are built cannot be written. MINDSPEED_CACHE names another one.",
    "MS515": "Strict resolution was asked for, and an operator of an active feature would run its plain-torch reference. The "
    "result would be the same and slower. `mindspeed ops list` says what is missing.",
    "MS516": "A file that a command makes cannot be written: no permission, no space, or a part of its path is a file. Files "
    "that existed are unchanged.",
    "MS601": "A data file is missing, damaged, or of another format.",
    "MS602": "A checkpoint is missing, incomplete, or belongs to another model.",
    "MS603": "Saving failed, for example because the disk is full. The previous checkpoint is untouched.",
    "MS604": "A rank ended early; the others were stopped.",
    "MS605": "The script passed a value for an argument that the plan also sets, and they differ.",
    "MS606": "Training produced a value that is not finite.",
    "MS607": "A feature verification failed: a difference above its claim, or the feature had no effect.",
    "MS608": "Another job holds the run folder. Two jobs in one folder would remove each other's checkpoints, so the second "
    "one is refused; the folder is free when the first one has ended, however it ends.",
    "MS610": "The ranks of a job do not have the same plan: other features, settings, versions, files or environment "
    "variables. All of them stop before the first collective; the message names the ranks that are odd.",
    "MS611": "A rank of the job did not activate a plan in time, or its store could not be reached.",
    "MS612": "Another rank failed while the job was set up; this one stops because of it.",
    "MS613": "The checkpoint cannot be resumed with these features: one of them owns data in it, or changes its format. "
    "mindspeed checkpoint diff shows every difference and what becomes of it.",
    "MS618": "This node, or the job that is to start, has something else than the lock file: a version, a file of a patch, "
    "a setting, or another plan.",
    "MS901": "An internal error: a bug in mindspeed or in a plugin's hook. The message names the plugin and the hook.",
}
"""Every code with the paragraph that ``mindspeed explain CODE`` prints: 1xx discovery, 2xx resolution,
3xx arguments and world, 4xx patches, 5xx platform, 6xx run time, 9xx internal."""
