"""The format of a run directory under its old names, until all have moved."""

from __future__ import annotations

from ddpdoctor.core.opening import integer as integer
from ddpdoctor.core.opening import whole as whole
from ddpdoctor.run.journal import SEGMENT_SIZE as SEGMENT_SIZE
from ddpdoctor.run.journal import Journal as Journal
from ddpdoctor.run.journal import segment_line as segment_line
from ddpdoctor.run.journal import segment_number as segment_number
from ddpdoctor.run.mapped import UnreadableError as UnreadableError
from ddpdoctor.run.names import *  # noqa: F403
from ddpdoctor.run.records.base import EVERY as EVERY
from ddpdoctor.run.records.base import encode as encode
from ddpdoctor.run.requests import *  # noqa: F403
from ddpdoctor.run.status import *  # noqa: F403
