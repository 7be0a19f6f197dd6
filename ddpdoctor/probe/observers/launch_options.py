"""How a script takes its place in the launch: the local rank it parsed, and ``nn.DataParallel``.

torchrun gives each worker its local rank in ``LOCAL_RANK``, never on the command line: a script
that reads it from an option has the option's default on every rank. Both happen before the process
is a rank.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.runtime import events, rank
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.run.records.process import (
    DATA_PARALLEL_AFTER,
    DataParallelRecord,
    LocalRankRecord,
)

_READ = re.compile(r"\.local_rank\b(?!\s*=[^=])")
_OPTION = re.compile(r"--?local[-_]rank$")

_option: Site | None = None
"""Where the option was added."""
_parsed: tuple[weakref.ref[Any], Site] | None = None
_parallel: Site | None = None


def added(parser: Any, *names: Any, **kwargs: Any) -> None:
    """``ArgumentParser.add_argument`` is called."""
    global _option
    if any(isinstance(name, str) and _OPTION.match(name) for name in names):
        _option = caller()


def parsed(result: Any, parser: Any, *args: Any, **kwargs: Any) -> None:
    """``ArgumentParser.parse_known_args`` returned."""
    global _parsed
    if _parsed is None and hasattr(result[0], "local_rank"):
        _parsed = weakref.ref(result[0]), caller()


def data_parallel_built(*args: Any, **kwargs: Any) -> None:
    """An ``nn.DataParallel`` is built."""
    global _parallel
    _parallel = _parallel or caller()


class LaunchOptions(Observer):
    """What a rank made of the launch."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._parallel_seen = False
        events.before_step(DATA_PARALLEL_AFTER, self._parallel_trains)

    def ddp_built(self, ddp: Any) -> None:
        """By now the script has had its chance to put the environment's local rank there."""
        global _parsed
        if _parsed is None:
            return
        (reference, site), _parsed = _parsed, None
        number, here = getattr(reference(), "local_rank", None), rank.environment_int("LOCAL_RANK")
        if here is None or not isinstance(number, int) or number == here:
            return
        use = _use(site)
        if use:
            at = _option if _option is not None and _option.path else site
            used = Location(site.path, use)
            self.state.recorder.add(
                LocalRankRecord(parsed=number, environment=here, used=used, **at.place)
            )

    def rank_ends(self) -> None:
        """Whatever became of it, there is one."""
        self._parallel_trains()

    def _parallel_trains(self) -> None:
        if _parallel is not None and not self._parallel_seen:
            self._parallel_seen = True
            self.state.recorder.add(DataParallelRecord(**_parallel.place))


def _use(site: Site) -> int:
    """The first line of the file that parsed the option which does anything with it; 0 if none."""
    try:
        with open(site.path, encoding="utf-8", errors="replace") as file:
            lines = enumerate(file, 1)
            return next((n for n, line in lines if _READ.search(line.partition("#")[0])), 0)
    except OSError:
        return 0
