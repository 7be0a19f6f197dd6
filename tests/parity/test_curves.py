"""Losses over samples: the picture, and whether a size is beyond the noise of seeds."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.diagnose.parity.curves import beyond_noise, curves_of
from ddpdoctor.diagnose.parity.training import Point, Training
from ddpdoctor.probe.hooks import overrides as hooks
from ddpdoctor.render import curves
from ddpdoctor.render.html.parity_page import parity_page
from ddpdoctor.run import overrides
from tests.support.browser import PROGRAM, Browser


def trained(
    ranks: int, seed: int, shift: float = 0.0, steps: int = 120, noise: float = 0.2
) -> Training:
    """A size whose loss falls over samples, with the noise of a seed."""
    drawn = random.Random(seed)
    batch = 8 * ranks
    losses = tuple(
        Point(
            batch * (step + 1),
            2 * math.exp(-batch * step / 400) + 1 + shift + noise * drawn.gauss(0, 1),
        )
        for step in range(steps // ranks)
    )
    return Training(
        ranks=ranks, steps=steps // ranks, batch=batch, rates=(), decay=None, losses=losses,
        epoch=None, normalized=None, stepped=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shift", "how"), [(0.0, "within"), (1.0, "higher than"), (-1.0, "lower than")]
)
def test_a_difference_is_told_from_noise(shift: float, how: str) -> None:
    every = [trained(1, 0), trained(2, 5, shift)]
    (text,) = beyond_noise(every, [trained(1, 1), trained(1, 2)])
    assert text.startswith(f"the loss of 2 ranks after 960 samples is {how} what 3 seeds of 1 rank")


def test_nothing_is_said_without_a_band() -> None:
    every = [trained(1, 0), trained(2, 5, 9.0)]
    assert list(beyond_noise(every, [])) == []
    (same,) = beyond_noise(every, [trained(1, 0)])
    assert "the seeds changed no loss" in same
    (few,) = beyond_noise([trained(1, 0), trained(2, 5, 9.0, steps=20)], [trained(1, 1)])
    assert few.startswith("the losses of 16 steps")
    broken = trained(1, 1)
    broken = Training(**{**vars(broken), "losses": (*broken.losses[:-1], Point(960, math.nan))})
    (lost,) = beyond_noise(every, [broken])
    assert lost.startswith("the losses of 16 steps")


def test_seeds_are_seldom_beyond_each_other() -> None:
    said = [
        text
        for seed in range(0, 300, 3)
        for text in beyond_noise([trained(1, seed), trained(2, seed + 1)], [trained(1, seed + 2)])
    ]
    assert len(said) == 100 and sum("within" not in each for each in said) <= 2


def test_windows_of_all_sizes_are_the_same() -> None:
    found = curves_of([trained(1, 0, steps=100), trained(4, 1, steps=100)])
    assert found is not None and found.low == () and found.seeds == 1
    assert len(found.samples) == 25 and found.samples[-1] == 800
    assert all(len(each) == 25 and None not in each for each in found.sizes.values())
    assert curves_of([trained(1, 0)]) is None


def test_the_picture() -> None:
    picture = curves.drawn(
        [("1 rank", [4.0, 3.0, 2.0, None]), ("2 ranks", [4.0, 3.5, 3.0, 2.5])],
        " 64",
        ("2 seeds", [3.5, 2.5, 2.0, 1.0], [4.0, 3.5, 2.5, 1.5]),
    )
    assert picture[0] == "        4 |*"
    assert picture[-3].startswith("        1 |") and picture[-2:] == [
        "          +- 64", "           a 1 rank   b 2 ranks   : 2 seeds"
    ]  # fmt: skip
    assert all(len(each) <= 15 for each in picture[:-1])
    assert curves.drawn([("1 rank", [None])], "0") == []


def test_a_page_has_the_numbers() -> None:
    every = [trained(1, 0), trained(2, 5)]
    made = parity_page(
        title="train.py", verdict="the same training", differs=False, remarks=["within"],
        findings=[], table=[("", "1 rank", "2 ranks"), ("batch", "8", "16")],
        curves=curves_of(every, [trained(1, 1)]), runs=[("1 rank", "/runs/1")], written=0.0,
    )  # fmt: skip
    content = json.loads(made.split('id="content">')[1].split("</script>")[0])
    assert content["curves"]["band"]["name"] == "2 seeds of 1 rank"
    assert [name for name, _ in content["curves"]["losses"]] == ["1 rank", "2 ranks"]
    assert content["table"][1] == ["batch", "8", "16"]


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")
def test_a_browser_draws_the_page(tmp_path: Path, token: str) -> None:
    every = [trained(1, 0), trained(2, 5)]
    page = tmp_path / "parity.html"
    page.write_text(
        parity_page(
            title="train.py",
            verdict="the same training",
            differs=False,
            remarks=["within"],
            findings=[],
            table=[("", "1 rank", "2 ranks"), ("batch", "8", "16")],
            curves=curves_of(every, [trained(1, 1)]),
            runs=[("1 rank", "/runs/1")],
            written=0.0,
        )
    )
    browser = Browser(tmp_path / "profile", token)
    try:
        browser.open(page)
        titles = browser.evaluate("[...document.querySelectorAll('h2')].map((e) => e.textContent)")
        assert titles == ["Sizes", "Losses over samples", "Environment and command"]
        names = browser.evaluate("document.querySelector('.u-legend').textContent")
        assert "2 ranks" in names and "2 seeds of 1 rank, least" in names
        assert browser.complaints() == []
    finally:
        browser.close()


def seeded(monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> list[Any]:
    """What a function of a module is called with, once its seeds are moved."""
    calls: list[Any] = []

    def seed(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    monkeypatch.setenv(overrides.VARIABLE, "seed=2")
    module: Any = SimpleNamespace(__name__=name, manual_seed_all=seed, **{function: seed})
    hooks.install_seed(module)
    getattr(module, function)(7)
    getattr(module, function)(seed=8)
    getattr(module, function)(None)
    getattr(module, function)()
    return calls


@pytest.mark.parametrize(
    ("name", "function"),
    [("random", "seed"), ("numpy.random", "seed"), ("torch.random", "manual_seed")],
)
def test_seeds_are_moved(monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> None:
    calls = seeded(monkeypatch, name, function)
    assert calls == [
        ((2000013,), {}), ((), {"seed": 2000014}), ((None,), {}), ((), {}),
    ]  # fmt: skip


@pytest.mark.parametrize("wanted", ["", "bucket_cap_mb=2"])
def test_seeds_stay_without_the_wish(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv(overrides.VARIABLE, wanted)
    given: Callable[..., None] = print
    module: Any = SimpleNamespace(__name__="random", seed=given)
    hooks.install_seed(module)
    assert module.seed is given
    before = torch.get_rng_state()
    hooks.install_first_seed(torch)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_of_a_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedSampler:
        def __init__(self, seed: int = 0) -> None:
            self.seed = seed

    monkeypatch.setenv(overrides.VARIABLE, "seed=1")
    hooks.install_sampler_seed(SimpleNamespace(DistributedSampler=DistributedSampler))  # type: ignore[arg-type]
    assert DistributedSampler(5).seed == 1000008
