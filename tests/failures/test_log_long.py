"""Long logs: most lines are passed over, and what matters among them is not."""

from __future__ import annotations

from ddpdoctor.failures.entry import any_of
from ddpdoctor.failures.lines import segments
from ddpdoctor.failures.log import read
from ddpdoctor.failures.table import TABLE
from tests.support.log_lines import CANCELLED, STEPS

TRAINING = "".join(f"epoch {n} step {n} loss 0.{n} and all is well here\n" for n in range(3000))


def seen(log: str) -> list[str]:
    return [each.text for each in read("a.log", [log.encode()])]


def test_a_status_is_seen_behind_many_that_are_zero() -> None:
    fine = "".join(f"worker {n} exited with exit code 0\n{STEPS}" for n in range(30))
    log = TRAINING + fine + "worker 3 exited with exit code 1\n" + TRAINING
    assert seen(log) == ["worker 3 exited with exit code 1"]


def test_an_end_is_seen_behind_a_bar_that_was_seen_to_be_nothing() -> None:
    bars = (f"\r error={n / 99:.2f}: {n}%|{'#' * n}{' ' * (99 - n)}" for n in range(99))
    bar = "".join(f"{each}| 9/99 [00:01<00:09, 1.3it/s]" for each in bars)
    log = TRAINING + (bar + "\n" + STEPS) * 5 + bar + CANCELLED + TRAINING
    assert seen(log) == [CANCELLED.strip()]


def test_a_bar_is_looked_at_a_few_times() -> None:
    bar = "".join(
        f"\r{n}%|{'█' * n}{' ' * (99 - n)}| {n}/99 [00:0{n % 9}<00:01]" for n in range(99)
    )
    texts = segments((bar + "\rKeyboardInterrupt" + bar).encode())
    assert len(texts) < 10
    assert "KeyboardInterrupt" in texts


def test_each_example_of_the_table_holds_a_literal() -> None:
    pattern = any_of(text for each in TABLE for text in each.literals)
    assert all(pattern.search(text) for each in TABLE for text in each.examples)
    assert not pattern.search("epoch 3 step 70 loss 0.31 lr 0.001")


def test_literals_are_found_wherever_they_stand() -> None:
    pattern = any_of(["ab", "abc", "a+b", "x"])
    found = [text for text in ("zab", "a+b", "ax", "aab", "a b", "") if pattern.search(text)]
    assert found == ["zab", "a+b", "ax", "aab"]
