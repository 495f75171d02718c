import sys
from pathlib import Path

import pytest

from tests.processes import run_all

WAIT, FAIL = "import time; time.sleep(1000)", "raise SystemExit('no luck')"


@pytest.mark.parametrize("programs", [(WAIT, FAIL), (FAIL, WAIT)])
def test_one_that_fails_is_shown_and_ends_the_others(tmp_path: Path, programs: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="no luck"):
        run_all([[sys.executable, "-c", program] for program in programs], tmp_path)


def test_one_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_all([[sys.executable, "-c", WAIT]], tmp_path, timeout_s=0.5)
