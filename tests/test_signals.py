"""A wait that takes too long ends the process and says for whom; others don't."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

from hexiseq_triton.signals import Watch

SCRIPT = """
import time
from datetime import timedelta
from unittest.mock import Mock
from hexiseq_triton.signals import Watch
watch = Watch(timedelta(seconds=0.4))
watch.add(Mock(query=lambda: {passed}), "keys and values of rank 3")
time.sleep(1.5)
print("went on")
"""


class Point:
    """A mark that is passed when it is told so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def run(passed: bool) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(passed=passed)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_wait_without_end_ends_the_process_and_says_for_whom() -> None:
    ended = run(passed=False)
    assert ended.returncode == 1
    assert "timeout: waited 0.4 s for keys and values of rank 3" in ended.stderr
    assert "went on" not in ended.stdout
    assert run(passed=True).stdout == "went on\n"


def test_only_the_first_wait_counts_and_only_while_none_gets_on() -> None:
    watch = Watch(timedelta(seconds=1000))
    watch.close()
    assert watch.late() is None
    first, second = Point(), Point()
    watch.add(first, "rank 1")
    watch.add(second, "rank 2")
    watch._seconds = 0.0
    assert watch.late() == "rank 1"
    first.passed = True
    assert watch.late() == "rank 2"
    watch._seconds = 1000.0
    assert watch.late() is None
    second.passed = True
    assert watch.late() is None
