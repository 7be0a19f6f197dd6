"""Records of exceptions."""

from __future__ import annotations

from ddpdoctor.run.records.base import JsonObject
from tests.conftest import Result
from tests.support.written import T0

HEAD = "Traceback (most recent call last):\n"


def error(exception: str, message: str, time: int = T0, **more: object) -> JsonObject:
    return {
        "kind": "error", "time": time, "exception": exception, "message": message,
        "path": "/job/train.py", "line": 7, **more,
        "traceback": f'{HEAD}  File "/job/train.py", line 7, in main\n{exception}: {message}\n',
    }  # fmt: skip


# -- failures in disguise, on real disks


def words(result: Result) -> str:
    return " ".join(result.ours.replace("ddpdoctor:", "").split())
