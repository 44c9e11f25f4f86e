"""Run the tests that failed in the last run once more, alone: ``python -m tests.second_try``.

A test that then passes depends on the tests beside it or on how busy the machine is. It is named as flaky, and mended like
any other defect. The status is 0 when every one passes; more than `MOST` failures are no accident and get no second try.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MOST: Final = 3


def failed(root: Path = ROOT) -> list[str]:
    """The failures that pytest has recorded below ``root``."""
    record = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return sorted(json.loads(record.read_text(encoding="utf-8"))) if record.exists() else []


def passes_alone(test: str) -> bool:
    """Run one test in a pytest of its own, which has workers of its own."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", test], cwd=ROOT, check=False).returncode == 0


def main(root: Path = ROOT) -> int:
    """Give each failure a second try and say how it went. Returns the exit status."""
    tests = failed(root)
    if not 1 <= len(tests) <= MOST:
        print(f"{len(tests)} failures are recorded: a second try is for 1 to {MOST} tests", file=sys.stderr)
        return 1
    outcomes = {test: passes_alone(test) for test in tests}
    for test, passed in outcomes.items():
        print(f"FLAKY {test}: failed beside others, passes alone" if passed else f"FAILED {test}: twice")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
