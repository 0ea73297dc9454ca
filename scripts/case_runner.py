"""Measurements for a machine that is lent for minutes: one after another, a JSON line for each when it ends.

Cases run in a process of their own. One that fails, kills its process or hangs costs itself: its line says so, and the
next one starts in a fresh process. A case that does not fit into the time left is skipped, and its line says that.
"""

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

PATIENCE = 3.0  # a case is stopped after so many times the seconds it should take


class Case(NamedTuple):
    """`seconds`: what it should take; `run`: the lines of earlier cases, by name -> its own."""

    seconds: float
    run: Callable[[dict[str, dict]], dict]


def supervise(command: list[str], cases: dict[str, Case], minutes: float) -> dict[str, dict]:
    """Print and return the lines of all cases. `command` starts a process that calls `serve` with the same cases."""
    ends, lines, child = time.monotonic() + 60 * minutes, {}, None
    for name, case in cases.items():
        began = time.monotonic()
        left = ends - began
        if case.seconds > left:
            line = {"skipped": f"needs about {case.seconds:.0f} s, {max(left, 0):.0f} are left"}
        else:
            child = child or subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            line = _ask(child, {"case": name, "lines": lines}, min(left, PATIENCE * case.seconds))
            line["wall_s"] = round(time.monotonic() - began, 1)
            if "error" in line:
                _end(child)
                child = None
        lines[name] = line
        print(json.dumps({"case": name} | line), flush=True)
    if child:
        _end(child)
    return lines


def _ask(child: subprocess.Popen, request: dict, seconds: float) -> dict:
    try:
        print(json.dumps(request), file=child.stdin, flush=True)
        if not select.select([child.stdout], [], [], seconds)[0]:
            return {"error": f"stopped after {seconds:.0f} s"}
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = ""
    return json.loads(answer) if answer else {"error": f"its process died with {child.wait()}"}


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.communicate()


def serve(cases: dict[str, Case]) -> None:
    """In the child: run the cases asked for, until the other side ends. What they print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for request in map(json.loads, sys.stdin):
        try:
            line = cases[request["case"]].run(request["lines"])
        except Exception as error:
            traceback.print_exc(limit=-4)
            line = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        print(json.dumps(line), file=out, flush=True)
