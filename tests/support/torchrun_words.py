"""Command lines as torchrun's own parser reads them."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence

from ddpdoctor.core.job import Command
from ddpdoctor.supervise.command import build


def torchrun_parser() -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        # torch warns at import where there is no numpy.
        warnings.simplefilter("ignore")
        from torch.distributed.run import get_args_parser

    return get_args_parser()


def doctor(words: Sequence[str], environ: Mapping[str, str] | None = None) -> Command:
    command = build(words, {**os.environ, **(environ or {})})
    assert command is not None, "took it for a call for help"
    return command
