"""The runner of capped commands says what it ran, or why it ran nothing."""

import json
import sys

import capped
import pytest


def test_a_command_runs_or_it_is_told_why_not(capsys):
    status = capped.main(["256MiB", sys.executable, "-c", ""])
    said = capsys.readouterr()
    if status:
        assert said.err.startswith("capped: ")
    else:
        assert json.loads(said.out)["limit_bytes"] == 256 << 20


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as stop:
        capped.main(["64MiB"])
    assert stop.value.code == 2
    assert "no command" in capsys.readouterr().err
