"""Find Ascend's software: driver, firmware, CANN, kernels, NNAL, the tool of the driver.

Read from files and variables, so it says something also where nothing can be imported. Never raises. Light.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mindspeed.problems import Text, marked
from mindspeed.workbench.diagnostics.finding import Finding

TOOLKITS: Final = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/nnae/latest")
"""Default folders of CANN, newest layout first."""
ATB: Final = "usr/local/Ascend/nnal/atb/latest"
HOME_VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
SECONDS: Final = 30


@dataclass(frozen=True, slots=True)
class AscendHost:
    """Hold the root of the file system and the environment variables, both real unless a test makes them up."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def devices(self) -> list[str]:
        """Names of the device nodes of NPUs."""
        return sorted(path.name for path in (self.root / "dev").glob("davinci[0-9]*"))

    def is_ascend(self) -> bool:
        """Return whether anything here hints at an Ascend machine."""
        variables = [name for name in (*HOME_VARIABLES, "ATB_HOME_PATH") if self.environ.get(name)]
        return bool(self.devices() or variables or (self.root / "usr/local/Ascend").is_dir())

    def install_folder(self) -> Path:
        """Find the folder of driver and firmware: as their installer noted, or the default."""
        noted = _value_in(self.root / "etc/ascend_install.info", "Driver_Install_Path_Param")
        return self.root / (noted or "/usr/local/Ascend").lstrip("/")


def findings(machine: AscendHost | None = None) -> Iterator[Finding]:
    """Report a finding per layer on a machine that looks like an Ascend one, none on any other.

    What is missing is a ``warning``; on a machine with device nodes, where training would use them, it is ``missing``.
    """
    machine = machine or AscendHost()
    if not machine.is_ascend():
        return
    absent = "missing" if machine.devices() else "warning"
    yield from _driver(machine, absent)
    yield _npu_smi(machine, absent)
    toolkit = _toolkit_folder(machine)
    yield _toolkit(toolkit, absent)
    yield from _variables(machine, toolkit)
    if toolkit is not None:
        yield _kernels(toolkit, absent)
    yield _nnal(machine)


def _driver(machine: AscendHost, absent: str) -> Iterator[Finding]:
    folder = machine.install_folder()
    for layer in ("driver", "firmware"):
        file = folder / layer / "version.info"
        version = _value_in(file, "Version")
        if version:
            yield Finding(f"ascend {layer}", f"{version} ({file})")
        else:
            fix = Text.of("install the {layer} of this card as root; in a container, mount {file}", layer=layer, file=file)
            yield Finding(
                f"ascend {layer}",
                Text.of("{file} contains no version", file=file),
                absent if layer == "driver" else "warning",
                fix,
            )


def _npu_smi(machine: AscendHost, absent: str) -> Finding:
    tool = shutil.which("npu-smi", path=machine.environ.get("PATH", os.defpath))
    if tool is None:
        fix = marked("npu-smi is part of the driver; in a container, mount /usr/local/bin/npu-smi")
        return Finding("npu-smi", marked("not found"), "warning", fix)
    environ = dict(machine.environ)
    try:
        done = subprocess.run([tool, "info"], capture_output=True, text=True, check=False, timeout=SECONDS, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        why = Text.of("no output within {seconds} seconds", seconds=SECONDS) if is_late else str(error)
        fix = marked("reinstall the driver, or reboot after its installation")
        return Finding("npu-smi", Text.of("{tool} does not run: {reason}", tool=tool, reason=why), absent, fix)
    lines = (line.strip(" |") for line in (done.stdout + done.stderr).splitlines() if line.strip(" +-=|"))
    said = next(lines, "nothing")
    if done.returncode:
        fix = marked("the versions of driver and firmware must match, and the user must be in the group HwHiAiUser")
        return Finding("npu-smi", Text.of("ends with status {status}: {text}", status=done.returncode, text=said), absent, fix)
    return Finding("npu-smi", said)


def _toolkit_folder(machine: AscendHost) -> Path | None:
    given = [machine.environ[name] for name in HOME_VARIABLES if machine.environ.get(name)]
    folders = [*(machine.root / path.lstrip("/") for path in given), *(machine.root / path for path in TOOLKITS)]
    return next((folder for folder in folders if folder.is_dir()), None)


def _toolkit(folder: Path | None, absent: str) -> Finding:
    if folder is None:
        fix = marked("install Ascend-cann-toolkit for this machine, see docs/ascend.md")
        return Finding("CANN toolkit", marked("not found"), absent, fix)
    version = _installed_version(folder, "toolkit")
    if version is None:
        fix = marked("this file is missing after an interrupted installation: install the toolkit again")
        return Finding("CANN toolkit", Text.of("{folder} has no ascend_toolkit_install.info", folder=folder), "warning", fix)
    return Finding("CANN toolkit", f"{version} ({folder})")


def _installed_version(folder: Path, package: str) -> str | None:
    """``version=`` of ``<arch>-linux/ascend_<package>_install.info``, or None."""
    files = [*sorted(folder.glob(f"*-linux/ascend_{package}_install.info")), folder / f"ascend_{package}_install.info"]
    return next((version for file in files if (version := _value_in(file, "version"))), None)


def _variables(machine: AscendHost, toolkit: Path | None) -> Iterator[Finding]:
    """Environment variables that ``set_env.sh`` of CANN sets."""
    source = f"source {_set_env(toolkit)}" if toolkit else Text.of("install CANN, then source its set_env.sh")
    for name in HOME_VARIABLES:
        value = machine.environ.get(name)
        if not value:
            yield Finding(name, marked("not set"), "warning", _in_shell(source))
        elif not (machine.root / value.lstrip("/")).is_dir():
            yield Finding(
                name,
                Text.of("{value} does not exist", value=value),
                "warning",
                Text.of("{command} in a new shell", command=source),
            )
        else:
            yield Finding(name, value)


def _in_shell(command: str) -> Text:
    return Text.of("{command} in this shell and in job scripts", command=command)


def _set_env(folder: Path) -> Path:
    inside, beside = folder / "set_env.sh", folder.parent / "set_env.sh"
    return beside if beside.is_file() and not inside.is_file() else inside


def _kernels(toolkit: Path, absent: str) -> Finding:
    chips = sorted(path.name for path in toolkit.glob("opp/built-in/op_impl/ai_core/tbe/kernel/ascend*") if path.is_dir())
    version = _installed_version(toolkit, "ops")
    if chips or version:
        return Finding("CANN kernels", ", ".join(filter(None, (version, *chips))))
    fix = marked("install the kernels (ops) package of the toolkit's version for this chip")
    return Finding("CANN kernels", Text.of("none below {folder}", folder=toolkit / "opp"), absent, fix)


def _nnal(machine: AscendHost) -> Finding:
    value = machine.environ.get("ATB_HOME_PATH")
    installed = machine.root / ATB
    if value and (machine.root / value.lstrip("/")).is_dir():
        return Finding("NNAL (ATB)", value)
    if value:
        text = Text.of("ATB_HOME_PATH is {value}, which does not exist", value=value)
        return Finding("NNAL (ATB)", text, "warning", marked("source NNAL's set_env.sh again"))
    if installed.is_dir():
        text = Text.of("installed in {folder}, but ATB_HOME_PATH is not set", folder=installed)
        return Finding("NNAL (ATB)", text, "warning", _in_shell(f"source {_set_env(installed)}"))
    fix = marked("install Ascend-cann-nnal of the toolkit's version")
    return Finding("NNAL (ATB)", marked("not installed"), "optional", fix)


def _value_in(file: Path, key: str) -> str | None:
    """The value of ``key=value`` in a small file, or None when there is no such file or line."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    line = re.search(rf"^\s*{re.escape(key)}\s*=\s*(\S.*?)\s*$", text, re.MULTILINE)
    return line[1] if line else None
