"""``MindSpeedPatchesManager`` and what its ``patches_info`` holds, on the patch engine of the framework."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from mindspeed.compat.registrations import Registration, target_of
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.inspection.source import find_module
from mindspeed.engine.runtime import session
from mindspeed.problems import Fix, MindSpeedError, Problem

DIRECT: str = "compat:patches"
"""Name of the feature that owns the patches which no feature of the list registered."""


class Applied(int):
    """A truth value that can also be called, as MindSpeed's consumers do both."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


def is_megatron_training_available() -> bool:
    """Return whether Megatron-LM is available, and not only megatron-core."""
    return find_module("megatron.training") is not None


class PatchInfo:
    """Everything registered for one target. ``remove_patch`` gives the original back, ``apply_patch`` patches again."""

    def __init__(self, dotted: str) -> None:
        self.dotted = dotted
        self.orig_module_name, _, self.orig_func_name = dotted.rpartition(".")
        self.suspension: ExitStack | None = None
        """Holds the patches off while they are removed; None again when their plan is deactivated."""

    @property
    def orig_func(self) -> Any:
        """The object that the patches stand in for, or None while they are not applied."""
        site = self._site()
        if site is None:
            return None
        with session.suspended(site):
            return pkgutil.resolve_name(target_of(self.dotted))

    @property
    def registrations(self) -> list[Registration]:
        return [call for call in MindSpeedPatchesManager.registrations if call.dotted == self.dotted]

    @property
    def patch_func(self) -> Any:
        """The replacement, or None."""
        return next((call.new for call in reversed(self.registrations) if not call.wraps), None)

    @property
    def wrappers(self) -> list[Any]:
        """The wrappers, innermost first."""
        return [call.new for call in self.registrations if call.wraps]

    @property
    def is_applied(self) -> Applied:
        return Applied(self.suspension is None and self._site() is not None)

    def apply_patch(self) -> None:
        """Patch again after `remove_patch`; else apply everything that is registered."""
        if self.suspension is not None:
            self.suspension.close()
            self.suspension = None
        elif self._site() is None:
            MindSpeedPatchesManager.apply_patches()

    def remove_patch(self) -> None:
        """Give the original back, replacement and wrappers alike, until `apply_patch`."""
        site = self._site()
        if site is not None and self.suspension is None:
            self.suspension = ExitStack()
            self.suspension.enter_context(session.suspended(site))

    def _site(self) -> str | None:
        active, site = session.current(), find_site(target_of(self.dotted))
        name = site.name if site is not None else ""
        return name if active is not None and any(call.site == name for call in active.applied.sites) else None


class MindSpeedPatchesManager:
    """The registry of patches under MindSpeed's name. No dummy is created: a missing target is an error with similar names."""

    patches_info: ClassVar[dict[str, PatchInfo]] = {}
    registrations: ClassVar[list[Registration]] = []
    """Calls of ``register_patch``, in order; those of features are made anew for every plan."""
    _owner: ClassVar[str] = DIRECT

    @classmethod
    def register_patch(
        cls, orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Remember a patch until `apply_patches`, or until the plan of the feature that registers it is made.

        ``new_func`` wraps the original when its name ends in ``wrapper`` or ``decorator`` and replaces it otherwise. Of two
        replacements the forced, later one wins. ``create_dummy`` plants nothing.
        """
        if not isinstance(orig_func_name, str) or "." not in orig_func_name:
            text = f"the patch target {orig_func_name!r} in a call of register_patch does not have the form package.module.name"
            fix = Fix.advise("write the full dotted name, such as megatron.core.utils.divide")
            raise MindSpeedError([Problem("MS409", text, (cls._owner,), fix=fix)])
        call = Registration(cls._owner, orig_func_name, new_func, force_patch, create_dummy)
        if call not in cls.registrations:
            cls.registrations.append(call)
        cls.patches_info.setdefault(orig_func_name, PatchInfo(orig_func_name))

    @classmethod
    def apply_patches(cls) -> None:
        """Put everything that is registered in force. Nothing happens when it already is."""
        from mindspeed.compat import activation

        activation.replan()

    @classmethod
    def remove_patches(cls) -> None:
        """Undo the patches that were applied through the old names; `apply_patches` puts them back."""
        from mindspeed.compat import activation

        activation.withdraw()

    @classmethod
    def remove_wrappers(cls, orig_func_name: str, wrappers_name: str, remove_check: bool = True) -> None:
        """Forget the wrappers of a target by name, and apply what remains if it was applied.

        Raises MS409 when ``remove_check`` is set and there is no such wrapper.
        """
        wrappers = [call for call in cls.registrations if call.wraps and call.dotted == orig_func_name]
        gone = [call for call in wrappers if call.new.__name__ == wrappers_name]
        if not gone and remove_check:
            text = f"{orig_func_name} has no wrapper {wrappers_name}"
            raise MindSpeedError([Problem("MS409", text, fix=Fix.advise("see MindSpeedPatchesManager.patches_info"))])
        cls.registrations[:] = [call for call in cls.registrations if call not in gone]
        from mindspeed.compat import activation

        activation.refresh()

    @classmethod
    @contextmanager
    def owned_by(cls, owner: str) -> Iterator[list[Registration]]:
        """Take the calls within the block as those of a feature; gives the list that they end up in."""
        before_owner, before = cls._owner, list(cls.registrations)
        cls._owner = owner
        cls.registrations[:] = [call for call in before if call.owner != owner]
        calls: list[Registration] = []
        try:
            yield calls
        except BaseException:
            cls.registrations[:] = before
            raise
        else:
            calls += [call for call in cls.registrations if call.owner == owner]
        finally:
            cls._owner = before_owner
