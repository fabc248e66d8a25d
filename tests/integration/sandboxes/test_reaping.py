"""Nothing is left: of a crowd whose executor is killed, of thousands of cycles; and limits that cannot be held are told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollstream.v1 import events_pb2
from rollstream.v1 import sandbox_pb2 as pb
from sandboxes.cgroups import PREFIX, ControlGroups, sweep
from sandboxes.client import SandboxClient
from sandboxes.testing import Executor, executor, wait_until

SPEC = events_pb2.SandboxSpec(toolchain="python")
SETTINGS = ["sandboxes.backend=native", "sandboxes.pool={}"]
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="control groups need root: run as root")


def homes() -> set[str]:
    """Names of executors' folders in all hierarchies of control groups; others may run here too."""
    return {
        name
        for place, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(PREFIX)
    }


async def crowd(held: AsyncExitStack, running: Executor, count: int) -> list[str]:
    client = await held.enter_async_context(SandboxClient([running.target]))
    places = asyncio.Semaphore(8)

    async def one() -> str:
        async with places:
            session = await held.enter_async_context(client.session(SPEC))
            assert (await session.exec(["true"])).exit_code == 0
            return session.session_id

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def test_killed_with_a_hundred_sessions_and_started_again() -> None:
    async with AsyncExitStack() as held:
        first = held.enter_context(executor(SETTINGS))
        assert len(set(await crowd(held, first, 100))) == 100
        # A zygote and a hundred guests, each in its groups: what must go was there.
        below = first.descendants()
        assert len(below) >= 101
        assert os.getuid() != 0 or len(first.groups()) >= 100
        mine = first.homes()
        assert os.getuid() != 0 or mine
        first.kill()
        gone = lambda: not any(p.is_running() and p.status() != "zombie" for p in below)  # noqa: E731
        await asyncio.to_thread(wait_until, gone, what="every process is gone", deadline_s=20)
        environment = {"TMPDIR": str(first.folder / "tmp")}
        with executor(SETTINGS, env=environment) as second:
            assert not homes() & mine, "the groups of the dead are still there"
            mine |= second.homes()
            async with SandboxClient([second.target]) as client, client.session(SPEC) as session:
                assert (await session.exec(["echo", "well"])).stdout == b"well\n"
        assert first.leftovers() == []
    assert not homes() & mine


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_ten_thousand_cycles_leave_the_machine_as_it_was() -> None:
    with executor(["sandboxes.backend=native", "sandboxes.pool={python=8}"]) as running:
        mine = running.homes()
        async with SandboxClient([running.target]) as client:
            places = asyncio.Semaphore(8)

            async def one() -> None:
                async with places, client.session(SPEC) as session:
                    assert (await session.exec(["true"])).exit_code == 0

            await asyncio.gather(*(one() for _ in range(100)))
            await filled(client)
            processes, groups = len(running.descendants()), len(running.groups())
            descriptors = len(os.listdir(f"/proc/{running.process.pid}/fd"))
            for _ in range(99):
                await asyncio.gather(*(one() for _ in range(100)))
            await filled(client)
            await asyncio.to_thread(
                wait_until,
                lambda: (
                    (len(running.descendants()), len(running.groups())) == (processes, groups)
                    and len(os.listdir(f"/proc/{running.process.pid}/fd")) <= descriptors + 8
                ),
                what="processes, groups and descriptors are as many as before",
                deadline_s=30,
            )
    assert not homes() & mine


async def filled(client: SandboxClient) -> None:
    """The pool holds what it is to hold."""
    stub = client._executors[0].stub
    while any(t.ready < t.target for t in (await stub.Capacity(pb.CapacityRequest())).toolchains):
        await asyncio.sleep(0.02)


@AS_ROOT
def test_groups_of_a_dead_executor_are_killed_and_removed() -> None:
    code = """
import os, subprocess, sys
from sandboxes.cgroups import ControlGroups
group = ControlGroups().make(memory_bytes=1 << 28, pids=9, cpus=1.0)
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
left = subprocess.Popen(["sleep", "600"], **quiet, start_new_session=True).pid
group.join(left)
for folder in group.folders.values(): print(left, folder, int((folder / "cgroup.procs").read_text()) == left)
sys.stdout.flush(); os._exit(0)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    lines = [line.split() for line in out.stdout.splitlines()]
    assert len(lines) == 3 and all(held == "True" for _, _, held in lines), out.stderr

    def swept() -> bool:
        # Any executor that starts does it, and one that is at it just now holds the lock.
        for _, folder, _ in lines:
            sweep(Path(folder).parent.parent)
        return not any(Path(folder).parent.exists() for _, folder, _ in lines)

    wait_until(swept, what="the groups are gone")
    wait_until(lambda: ended(lines[0][0]), what="the process that was left is killed")


def ended(pid: str) -> bool:
    """Whether it ran its course; here its parent may not have reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_limits_that_cannot_be_held_are_told(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path)
    assert groups.enforced == ()
    assert len(groups.missing()) == 3
    assert groups.make(memory_bytes=1 << 28, pids=9, cpus=1.0) is None
    groups.close()
    assert list(tmp_path.iterdir()) == []


def test_version_2_takes_its_own_names(tmp_path: Path) -> None:
    """Against files that take what is written: on this machine version 2 has no controllers."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    groups = ControlGroups(tmp_path)
    group = groups.make(memory_bytes=1 << 28, pids=9, cpus=0.5)
    assert group is not None and set(group.folders) == {"memory", "pids", "cpu"}
    (folder,) = set(group.folders.values())
    assert (folder / "memory.max").read_text() == str(1 << 28)
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "pids.max").read_text() == "9"
    assert (folder / "cpu.max").read_text() == "50000 100000"
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (folder / "pids.events").write_text("max 3\n")
    assert (group.memory_killed(), group.processes_refused()) == (1, 3)
