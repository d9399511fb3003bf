"""Commands in child processes."""

import pytest
from killed_runs import start_command


@pytest.fixture
def cli(tmp_path):
    """``cli(arguments)`` -> exit code (None after ``limit`` seconds) and what was said, of a command in a child."""

    def run(*arguments, limit: float = 600) -> tuple[int | None, str]:
        process = start_command([*map(str, arguments)], tmp_path / "said")
        process.join(limit)
        code = process.exitcode
        process.kill()
        return code, (tmp_path / "said").read_text()

    return run
