"""A slow solve reports its progress: a line in scripts, a bar in terminals, nothing if it is quick."""

from __future__ import annotations

import io
import sys

import pytest

import odograph as odo
from odograph.display import SlowNotice


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, seconds: float) -> str:
    times = iter([0.0, seconds, seconds + 1, seconds + 2])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr("odograph.display.time.monotonic", lambda: next(times))
        patch.delitem(sys.modules, "ipykernel", raising=False)
        with SlowNotice("solving") as notice:
            for done in (1, 2, 3):
                notice(done, 4)
    return stream.getvalue()


def test_a_script_gets_one_line_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(monkeypatch, io.StringIO(), 1.5) == "odograph: solving\n"
    assert report(monkeypatch, io.StringIO(), -5) == ""


def test_a_terminal_gets_a_bar_that_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = report(monkeypatch, Terminal(), 1.5)
    assert shown.count("\r[") == 3
    assert shown.endswith("75% \n")


def test_a_target_of_the_table_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    odo.compile_policy(odo.Policy(1, 1e-6))
    assert capsys.readouterr() == ("", "")
