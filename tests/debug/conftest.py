"""What the tests of the debugger share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dap_client import DapUnavailable, install_modules


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return install_modules(tmp_path_factory.mktemp("dap"))
    except DapUnavailable as error:
        pytest.skip(f"no DAP test client: {error}")
