import sys

import pytest

from diff_transformer.bench import host_memory
from diff_transformer.bench.host_memory import free_host_memory
from diff_transformer.bench.machine import free_memory


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MACHINE = {"proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB\nHugePages_Total: 0\n"}
ONE = {  # of a group of version 1, that of a container
    "proc/self/cgroup": "4:cpu,memory:/box\n1:cpu:/box\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "5000\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "4000\n",
    "sys/fs/cgroup/memory/box/memory.stat": "cache 7\ntotal_inactive_file 500\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
}
TWO = {
    "proc/self/cgroup": "0::/slice/box\n",
    "sys/fs/cgroup/slice/box/memory.max": "max\n",
    "sys/fs/cgroup/slice/box/memory.current": "10\n",
    "sys/fs/cgroup/slice/memory.max": "3000\n",
    "sys/fs/cgroup/slice/memory.current": "1000\n",
    "sys/fs/cgroup/slice/memory.stat": "inactive_file 100\n",
}


@pytest.mark.parametrize(("group", "free"), [({}, 8 * 1024), (ONE, 1500), (TWO, 2100)])
def test_the_least_of_the_machine_and_its_control_groups(tmp_path, group, free):
    write(tmp_path, MACHINE | group)
    assert free_host_memory(tmp_path) == free


def test_a_group_that_is_full_leaves_nothing(tmp_path):
    write(tmp_path, MACHINE | TWO | {"sys/fs/cgroup/slice/memory.current": "5000"})
    assert free_host_memory(tmp_path) == 0


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    assert free_host_memory(tmp_path) == host_memory._physical()
    monkeypatch.delattr(host_memory.os, "sysconf")
    assert free_host_memory(tmp_path) == sys.maxsize


def test_this_machine_has_some():
    assert 2**20 < free_memory("cpu") < 2**60
