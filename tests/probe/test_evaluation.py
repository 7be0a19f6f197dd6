"""Expressions that the training thread evaluates at the end of a step."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.runtime import control, evaluation, events, rank

GLOBAL = 5


class Sent:
    """What the rank answers."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.news = threading.Event()

    def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.news.set()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    sent = Sent()
    monkeypatch.setattr(control, "_send", sent)
    state = SimpleNamespace(tracker=SimpleNamespace(steps=7))
    monkeypatch.setattr(rank, "current", lambda: state)
    yield sent
    events.forget()


def ask(expression: str, *, seconds: float = 60.0) -> None:
    message = {"ask": 1, "expression": expression, "step": 7, "seconds": seconds}
    assert evaluation.evaluate(message) is control.LATER


def answer_of(sent: Sent, train: Callable[[], None]) -> dict[str, Any]:
    """Train until the rank has answered."""
    for _ in range(6000):
        train()
        if sent.news.wait(0.01):
            break
    (answer,) = sent.messages
    assert answer.pop("answers") == 1
    return answer


def end_step() -> None:
    """What the tracker does at the end of step 7."""
    if events.due <= 7:
        events.ring(7)


def train() -> None:
    loss, scale = 0.5, 3  # noqa: F841
    end_step()


def test_it_sees_the_loop_and_its_module(sent: Sent) -> None:
    ask(" [loss * scale for _ in range(GLOBAL)] ")
    assert answer_of(sent, train) == {"value": "[1.5, 1.5, 1.5, 1.5, 1.5]", "step": 7}


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("nosuch", "NameError: name 'nosuch' is not defined"),
        ("exit(3)", "SystemExit: 3"),
        ("1 +", "SyntaxError: invalid syntax (<ddpdoctor eval>, line 1)"),
        ("a\0", None),
        ("(" * 100_000, None),
    ],
)
def test_errors(sent: Sent, expression: str, error: str | None) -> None:
    ask(expression)
    answer = answer_of(sent, train)
    assert "value" not in answer
    assert answer["error"] == error or error is None


def test_what_is_long_is_cut(sent: Sent) -> None:
    ask("'x' * 10**6, list(range(10**6)), {i: i for i in range(10**5)}")
    assert len(answer_of(sent, train)["value"]) <= evaluation.MAX_TEXT


def test_what_takes_long_is_interrupted(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_SECONDS", 0.1)
    ask("sum(1 for _ in iter(int, 1))")
    assert answer_of(sent, train)["error"].startswith("interrupted after 0.1 s")
    for _ in range(1000):
        # A late interruption would come here.
        train()


def test_what_waits_too_long_is_not_evaluated_later(sent: Sent) -> None:
    ask("ran.append(1)", seconds=0.05)
    assert answer_of(sent, lambda: None) == {"trouble": "did not end a step within 0.05 s"}
    ran: list[int] = []
    end_step()
    assert not ran


def test_a_process_that_is_no_rank_says_so(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "current", lambda: None)
    ask("1")
    assert answer_of(sent, lambda: None) == {"trouble": "has not joined its process group"}


def test_the_frames_keep_no_value(sent: Sent) -> None:
    class Tensor:
        pass

    gone: list[weakref.ref[Tensor]] = []

    def loop() -> None:
        tensor = Tensor()
        gone.append(weakref.ref(tensor))
        end_step()
        del tensor
        assert gone[-1]() is None

    ask("tensor")
    assert "Tensor object" in answer_of(sent, loop)["value"]


def test_ctrl_c_is_the_jobs(sent: Sent) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def loop() -> None:
        interrupt = stop  # noqa: F841
        end_step()

    ask("interrupt()")
    with pytest.raises(KeyboardInterrupt):
        answer_of(sent, loop)
    while not sent.news.wait(1):
        pass
    assert sent.messages[0]["error"] == "interrupted by Ctrl-C"


TRACED = """
import sys, threading
from ddpdoctor.probe.runtime import evaluation, rank

rank.current = lambda: None
one = evaluation._Evaluation(compile("6 * 7", "x", "eval"))
one.run()
assert one._answer["value"] == "42"

def traced():
    sys.settrace(lambda *_: None)
    (lambda: None)()

thread = threading.Thread(target=traced, daemon=True)
thread.start()
thread.join(30)
print("alive" if thread.is_alive() else "ended", flush=True)
"""


def test_a_thread_is_traced_afterwards() -> None:
    """With an exception taken back, Python 3.11 repeats its first instruction for ever."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True)
    assert done.stdout == "ended\n", done.stderr
