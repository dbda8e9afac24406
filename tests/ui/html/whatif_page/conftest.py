"""One trace's page for all tests here, and a browser to look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whatif_pages import TRACE, laid_out

from stepscope.predict.engine import Bench
from stepscope.records.explanation import Explanation
from stepscope.ui.html.report import write_report
from stepscope.ui.html.whatif_grid import WhatIfGrid


@pytest.fixture(scope="package")
def explained() -> tuple[Explanation, Bench, WhatIfGrid]:
    return laid_out(TRACE)


@pytest.fixture
def bench(explained: tuple[Explanation, Bench, WhatIfGrid]) -> Bench:
    return explained[1]


@pytest.fixture
def grid(explained: tuple[Explanation, Bench, WhatIfGrid]) -> WhatIfGrid:
    return explained[2]


@pytest.fixture
def open_page(visit: Any, tmp_path: Path) -> Any:
    """A report with this grid."""

    def show(explanation: Explanation, grid: WhatIfGrid, **options: Any) -> Any:
        path = tmp_path / "report.html"
        write_report(explanation, [], path, whatif=grid)
        return visit(path, **{"viewport": {"width": 1280, "height": 900}} | options)

    return show


@pytest.fixture
def page(explained: tuple[Explanation, Bench, WhatIfGrid], open_page: Any) -> Any:
    """The report of that trace."""
    return open_page(explained[0], explained[2])
