"""Apply fixes to a request, as a user who follows them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer, parse_assignments
from mindspeed.problems import Fix


class JobRequest(NamedTuple):
    """Layers of a request, low to high, and the environment of its plan."""

    layers: tuple[Layer, ...]
    environment: Environment


def applied(fix: Fix, request: JobRequest) -> JobRequest | None:
    """Return a request with a fix applied to it; None for a fix that changes nothing, or that lacks a value."""
    changed = _changed(fix, request)
    return None if changed == request else changed


def _changed(fix: Fix, request: JobRequest) -> JobRequest | None:
    if fix.verb == "together":
        for step in fix.steps:
            if (changed := _changed(step, request)) is None:
                return None
            request = changed
        return request
    change = _CHANGES.get(fix.verb)
    return change(fix, request) if change is not None else None


def _give_field(fix: Fix, request: JobRequest) -> JobRequest | None:
    if fix.value is None:
        return None
    if fix.name == "platform":
        return JobRequest(_in_highest(request, platform=fix.value), replace(request.environment, platform=fix.value))
    if fix.name == "megatron":
        return request._replace(environment=replace(request.environment, megatron=fix.value))
    return request._replace(layers=_in_highest(request, world={fix.name: fix.value}))


def _drop_field(fix: Fix, request: JobRequest) -> JobRequest:
    return _in_all(request, lambda layer: {"world": _without(layer.world, fix.name)})


def _give_setting(fix: Fix, request: JobRequest) -> JobRequest | None:
    if fix.value is None:
        return None
    feature, _, name = fix.name.partition(".")
    given = {feature: {name: fix.value}}
    if isinstance(fix.value, str):  # as the command line reads it
        given = parse_assignments([f"{fix.name}={fix.value}"], "--set")
    return request._replace(layers=_in_highest(request, settings=given))


def _drop_setting(fix: Fix, request: JobRequest) -> JobRequest:
    feature, _, name = fix.name.partition(".")

    def dropped(layer: Layer) -> dict[str, Any]:
        left = {key: _without(values, name) if key == feature else values for key, values in layer.settings.items()}
        return {"settings": {key: values for key, values in left.items() if values}}

    return _in_all(request, dropped)


def _give_option(fix: Fix, request: JobRequest) -> JobRequest | None:
    if fix.name == "--optimization-level":
        return request._replace(layers=_in_highest(request, level=fix.value))
    if fix.name == "--nproc":
        return request._replace(environment=replace(request.environment, world_size=fix.value))
    if fix.name == "--without":
        return request._replace(layers=_in_highest(request, without=(fix.value,)))
    return None


def _drop_option(fix: Fix, request: JobRequest) -> JobRequest:
    if fix.name == "--strict":
        return _in_all(request, lambda layer: {"strict": None})
    return request._replace(layers=tuple(layer for layer in request.layers if layer.option != fix.name))


def _keep_feature(fix: Fix, request: JobRequest) -> JobRequest:
    return _in_all(request, lambda layer: {"without": tuple(name for name in layer.without if name != fix.name)})


def _add_feature(fix: Fix, request: JobRequest) -> JobRequest:
    if any(fix.name in layer.features for layer in request.layers):
        return request
    return request._replace(layers=_in_highest(request, features=(fix.name,)))


def _remove_feature(fix: Fix, request: JobRequest) -> JobRequest:
    return _in_all(request, lambda layer: {"features": tuple(name for name in layer.features if name != fix.name)})


def _rename(fix: Fix, request: JobRequest) -> JobRequest:
    feature, dot, old = fix.name.rpartition(".")
    new = fix.value.rpartition(".")[2]

    def renamed(layer: Layer) -> dict[str, Any]:
        if dot:
            return {"settings": {**layer.settings, feature: _with_name(layer.settings.get(feature, {}), old, new)}}
        names = tuple(new if name == old else name for name in layer.features)
        return {
            "features": names,
            "world": _with_name(layer.world, old, new),
            "settings": _with_name(layer.settings, old, new),
        }

    return _in_all(request, renamed)


_CHANGES: Final[Mapping[str, Callable[[Fix, JobRequest], JobRequest | None]]] = {
    "give-field": _give_field,
    "drop-field": _drop_field,
    "give-setting": _give_setting,
    "drop-setting": _drop_setting,
    "give-option": _give_option,
    "drop-option": _drop_option,
    "add-feature": _add_feature,
    "remove-feature": _remove_feature,
    "keep-feature": _keep_feature,
    "rename": _rename,
}


def _in_highest(request: JobRequest, **more: Any) -> tuple[Layer, ...]:
    """Return the layers, of which the highest has values in place of its own, or more of them."""
    *lower, highest = request.layers
    if "world" in more:
        more["world"] = {**highest.world, **more["world"]}
    if "settings" in more:
        given = {feature: {**highest.settings.get(feature, {}), **values} for feature, values in more["settings"].items()}
        more["settings"] = {**highest.settings, **given}
    for names in ("features", "without"):
        if names in more:
            more[names] = (*getattr(highest, names), *more[names])
    return (*lower, replace(highest, **more))


def _in_all(request: JobRequest, change: Callable[[Layer], dict[str, Any]]) -> JobRequest:
    return request._replace(layers=tuple(replace(layer, **change(layer)) for layer in request.layers))


def _with_name(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in values.items()}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
