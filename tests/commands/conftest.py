"""The command line in this process."""

import io
import json
import sys

import pytest

from flashllm.cli import main


@pytest.fixture
def run(capsys):
    """(status, standard output, standard error) of a command; `stdin`: bytes that it reads."""

    def call(*argv, stdin=None):
        before = sys.stdin
        if stdin is not None:
            sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
        try:
            status = main([str(argument) for argument in argv])
        finally:
            sys.stdin = before
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def document(run):
    """The document of a command that succeeds with --json."""

    def call(*argv):
        status, out, err = run(*argv, "--json")
        assert status == 0, err
        return json.loads(out)

    return call
