"""The runner of capped benchmarks: the limit holds, the group goes, and what cannot be capped is refused."""

import signal
import subprocess
import sys
import time

import memory_group
import pytest

LIMIT = 64 << 20
HOLD = "held = b'x' * ({} << 20)"


@pytest.fixture
def needs_groups():
    try:
        memory_group.MemoryGroup(LIMIT).close()
        memory_group.drop_page_cache()
    except memory_group.GroupError as error:
        pytest.skip(str(error))


@pytest.mark.cgroup
@pytest.mark.usefixtures("needs_groups")
def test_a_command_within_the_limit_runs_and_its_peak_is_told():
    run = memory_group.run_capped([sys.executable, "-c", HOLD.format(20)], LIMIT)
    assert 20 << 20 <= run.peak_bytes <= LIMIT
    assert (run.returncode, run.kills, run.limit_bytes) == (0, 0, LIMIT)


@pytest.mark.cgroup
@pytest.mark.usefixtures("needs_groups")
def test_over_the_limit_is_a_kill_that_is_told():
    run = memory_group.run_capped([sys.executable, "-c", HOLD.format(200)], LIMIT)
    assert run.returncode == -signal.SIGKILL
    assert run.kills == 1
    assert run.peak_bytes <= LIMIT


@pytest.mark.cgroup
@pytest.mark.usefixtures("needs_groups")
def test_reads_are_cold_and_counted(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * (8 << 20))
    path.read_bytes()  # cached now
    run = memory_group.run_capped([sys.executable, "-c", f"open({str(path)!r}, 'rb').read()"], LIMIT)
    assert run.returncode == 0
    assert run.read_bytes >= 8 << 20


@pytest.mark.cgroup
@pytest.mark.usefixtures("needs_groups")
def test_what_a_command_leaves_running_goes_with_its_group():
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with memory_group.MemoryGroup(LIMIT) as group:
        child = subprocess.Popen(group.entering(sleeper))
        while str(child.pid) not in (group.path / "cgroup.procs").read_text().split():
            time.sleep(0.01)
    assert child.wait(timeout=10) == -signal.SIGKILL
    assert not group.path.exists()


def test_without_groups_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_group, "_ROOTS", ((tmp_path / "none", memory_group._V1),))
    witness = tmp_path / "ran"
    with pytest.raises(memory_group.GroupError, match="no memory control group can be made here"):
        memory_group.run_capped([sys.executable, "-c", f"open({str(witness)!r}, 'w')"], LIMIT)
    assert not witness.exists()
