"""What a session cannot do, on every backend that claims to isolate. Each test proves its attack."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollstream.errors import SandboxLostError
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient, Session
from sandboxes.testing import Executor
from tests.contract.sandboxes.conftest import HOST_SECRET
from tests.contract.sandboxes.test_sessions import HOLD, IS_FREE, PROVE_HELD

SPEC = events_pb2.SandboxSpec(toolchain="python")
OTHERS = "import os; print([p for p in os.listdir('/proc') if p.isdigit() and p not in ('1', str(os.getpid()))])"


async def well(session: Session) -> None:
    """The session still answers, and nothing but its PID 1 lives in it."""
    result = await session.run_python(OTHERS)
    assert result.stdout == b"[]\n", result.stderr


async def test_network_is_loopback_alone(session: Session) -> None:
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = host.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        code = f"""
import errno, socket
def attempt(act):
    try: act(); return "REACHED"
    except OSError as error: return errno.errorcode[error.errno]
def udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))
print(attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 2)))
print(attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2)), attempt(udp))
own = socket.create_server(("127.0.0.1", 0)); socket.create_connection(own.getsockname()); print("own")
"""
        result = await session.run_python(code)
    lines = result.stdout.decode().split()
    assert lines == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH", "own"], result.stderr


async def test_unconfined_socket_families_are_unknown(session: Session) -> None:
    code = """
import errno, socket
for family, kind in ((40, 1), (38, 5), (17, 3), (31, 3)):
    try: socket.socket(family, kind); print("MADE", family)
    except OSError as error: print(errno.errorcode[error.errno])
socket.socketpair(); print("unix")
"""
    result = await session.run_python(code)
    assert result.stdout.split() == [b"EAFNOSUPPORT"] * 4 + [b"unix"], result.stderr


async def test_host_files_are_not_there(
    session: Session, tmp_path: Path, running: Executor
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host", encoding="utf-8")
    places = [
        str(secret),
        str(running.folder),
        str(Path.cwd() / "pyproject.toml"),
        "/root",
        "/home",
    ]
    code = (
        f"import os; print([p for p in {places!r} if os.path.exists(p)], sorted(os.listdir('/')))"
    )
    found = (await session.run_python(code)).stdout.decode()
    assert found.startswith("[] "), found
    assert set(eval(found[3:])) <= {  # a list of names, printed by our own code
        "bin", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "tmp", "usr", "work",
    }  # fmt: skip


async def test_host_processes_are_not_there(session: Session, running: Executor) -> None:
    code = f"""
import os
pids = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
print(pids == sorted({{1, os.getpid()}}), os.path.exists("/proc/{running.process.pid}"))
"""
    assert (await session.run_python(code)).stdout == b"True False\n"


async def test_secrets_of_the_executor_are_nowhere(session: Session) -> None:
    code = """
import glob
for name in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try: print(name, open(name, "rb").read())
    except OSError as error: print(name, error.strerror)
"""
    result = await session.run_python(code)
    assert b"/proc/1/environ" in result.stdout
    assert HOST_SECRET.encode() not in result.stdout
    assert (await session.exec(["cat", "/proc/self/environ"])).exit_code == 0


async def test_descriptors_are_the_three_standard_ones(session: Session) -> None:
    code = "import os; print(sorted(set(os.listdir('/proc/self/fd')) - {'3'}))"
    assert (await session.run_python(code)).stdout == b"['0', '1', '2']\n"
    listing = await session.exec(["ls", "/proc/self/fd"])
    assert listing.stdout.split() == [b"0", b"1", b"2", b"3"]


async def test_identity_has_no_power(session: Session) -> None:
    result = await session.exec(["cat", "/proc/self/status"])
    fields = dict(line.split(":", 1) for line in result.stdout.decode().splitlines())
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[capabilities], 16) == 0, capabilities
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Seccomp"].strip() == "2"
    assert fields["Uid"].split() == ["1000"] * 4


async def test_no_group_of_the_host_is_kept(session: Session) -> None:
    result = await session.run_python("import os; print(set(os.getgroups()) <= {1000})")
    assert result.stdout == b"True\n"


async def test_toolchain_and_root_are_read_only(session: Session) -> None:
    code = """
import errno, os
for path in ("/usr/x", "/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname"):
    try: open(path, "w").write("x"); print("WROTE", path)
    except OSError as error: print(errno.errorcode[error.errno])
open("/work/x", "w").write("x"); open("/tmp/x", "w").write("x"); print("own")
"""
    result = await session.run_python(code)
    *refused, own = result.stdout.decode().split()
    assert set(refused) <= {"EROFS", "EACCES", "EPERM"} and len(refused) == 5, result.stdout
    assert own == "own"


async def test_kernel_secrets_are_masked(session: Session) -> None:
    code = """
for name in ("kcore", "keys", "timer_list"):
    try: print(len(open("/proc/" + name, "rb").read(64)))
    except OSError: print(0)
"""
    assert (await session.run_python(code)).stdout.split() == [b"0"] * 3


async def test_dangerous_system_calls_are_refused(session: Session) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return "DONE" if result >= 0 else errno.errorcode[ctypes.get_errno()]
assert libc.syscall(39) > 1
calls = dict(mount=(165, b"x", b"/tmp", b"tmpfs", 0, 0), unshare=(272, 0x10000000), setns=(308, 0, 0),
    chroot=(161, b"/tmp"), pivot_root=(155, b".", b"."), keyctl=(250, 0, 0), add_key=(248, b"user", b"a", b"b", 1, -3),
    bpf=(321, 0, 0, 0), perf=(298, 0, 0, -1, -1, 0), io_uring=(425, 1, 0), clone3=(435, 0, 0), ptrace=(101, 16, 1, 0, 0),
    clone_newuser=(56, 0x10000011, 0, 0, 0, 0), settime=(227, 0, b"\\0" * 16), hostname=(170, b"x", 1),
    open_by_handle=(304, 0, 0, 0), userfaultfd=(323, 0), swapon=(167, b"x", 0), reboot=(169, 0, 0, 0, 0),
    mknod=(133, b"/work/disk", 0o60600, 0xFE00), setuid=(105, 0), mount_setattr=(442, -100, b"/", 0, 0, 0),
    move_mount=(429, -100, b"/", -100, b"/tmp", 0), process_vm_readv=(310, 1, 0, 0, 0, 0, 0), pidfd_getfd=(438, 0, 0, 0))
for name, arguments in calls.items(): print(name, call(*arguments))
"""
    result = await session.run_python(code)
    answers = dict(line.split() for line in result.stdout.decode().splitlines())
    assert len(answers) == 25, result.stderr
    assert {n for n, a in answers.items() if a not in ("EPERM", "ENOSYS", "EINVAL")} == set()
    assert [n for n, a in answers.items() if a == "EINVAL"] in ([], ["setuid"])
    await well(session)


async def test_pid_1_cannot_be_touched(session: Session) -> None:
    code = """
import os, signal
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
os.system("kill -KILL -1")
done = []
for name in ("mem", "environ", "maps", "fd/0", "root/etc", "cwd/."):
    try: os.open("/proc/1/" + name, os.O_RDONLY); done.append(name)
    except OSError: pass
try: os.open("/proc/1/mem", os.O_RDWR); done.append("write")
except OSError: pass
print("tried", done)
"""
    result = await session.run_python(code)
    # kill -1 takes the attacker's own shell, not the attacker; it may take the attacker itself.
    assert result.stdout in (b"tried []\n", b""), result.stdout
    second = code.replace('os.system("kill -KILL -1")', "")
    assert (await session.run_python(second)).stdout == b"tried []\n"
    await well(session)


@pytest.mark.parametrize("command", ["python", "shell"])
async def test_fork_bomb_is_bounded_and_gone(session: Session, command: str) -> None:
    if command == "shell":
        bomb = "touch began; trap '' TERM; f() { f | f & }; f; sleep 600"
        result = await session.exec(["sh", "-c", bomb], timeout_s=1)
        assert dict(await session.get_files(["began"])) == {"began": b""}
    else:
        bomb = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN); made = 0
while True:
    try: pid = os.fork()
    except OSError: break
    if pid == 0: signal.pause()
    made += 1
print(made, flush=True); signal.pause()
"""
        result = await session.run_python(bomb, timeout_s=2)
        assert 10 < int(result.stdout) <= 48, result.stderr
    assert result.reason == "timeout"
    await well(session)


async def test_daemon_does_not_outlive_its_command(session: Session) -> None:
    daemon = f"import os\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: exec({HOLD!r})\n os._exit(0)\n"
    result = await session.run_python(daemon + PROVE_HELD)
    assert (result.reason, result.stdout) == ("exited", b"alive\n"), result.stderr
    assert (await session.run_python(IS_FREE)).stdout == b"free\n"
    await well(session)


async def test_stopped_process_is_ended(session: Session) -> None:
    code = "import os, signal; print('stopping', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    result = await session.run_python(code, timeout_s=0.5)
    assert (result.reason, result.stdout) == ("timeout", b"stopping\n")
    await well(session)


async def test_memory_hog_fails_alone(session: Session) -> None:
    code = "kept = []\nprint('hog', flush=True)\nwhile True: kept.append(bytearray(16 << 20))"
    result = await session.run_python(code, timeout_s=15)
    assert result.stdout == b"hog\n"
    assert b"MemoryError" in result.stderr or result.reason in {"signalled", "oom"}
    await well(session)


@pytest.mark.parametrize("place", ["/work", "/tmp", "/dev/shm"])
async def test_disk_is_bounded(session: Session, place: str) -> None:
    code = f"""
import errno, os
wrote = 0
try:
    for number in range(64):
        with open("{place}/%d" % number, "wb") as out: wrote += out.write(bytes(1 << 20)); out.flush()
except OSError as error: print(wrote > 0, wrote < 32 << 20, errno.errorcode[error.errno])
"""
    result = await session.run_python(code)
    assert result.stdout == b"True True ENOSPC\n", result.stderr
    await well(session)


async def test_inodes_are_bounded(session: Session, missing: tuple[str, ...]) -> None:
    if "inode limit" in missing:
        return  # said so, in every answer to Create
    code = """
import errno
try:
    for number in range(200_000): open("/work/%d" % number, "w").close()
except OSError as error: print(number > 100, errno.errorcode[error.errno])
"""
    result = await session.run_python(code, timeout_s=20)
    assert result.stdout == b"True ENOSPC\n", (result.reason, result.stderr)


async def test_huge_sparse_file_is_refused(session: Session) -> None:
    result = await session.exec(["truncate", "-s", "1T", "sparse"])
    assert result.exit_code != 0


async def test_removing_everything_hurts_nobody_else(client: SandboxClient) -> None:
    async with client.session(SPEC) as session:
        await session.put_files({"victim": b"x"})
        await session.exec(["rm", "-rf", "--no-preserve-root", "/"], timeout_s=20)
        assert dict(await session.get_files(["victim"])) == {}
    async with client.session(SPEC) as session:
        assert (await session.run_python("import json; print(1)")).stdout == b"1\n"


async def test_siblings_do_not_meet(client: SandboxClient) -> None:
    plant = """
import os, socket
for path in ("/work/planted", "/tmp/planted", "/dev/shm/planted"): open(path, "w").close()
ear = socket.socket(socket.AF_UNIX); ear.bind("\\0planted"); ear.listen()
tcp = socket.create_server(("127.0.0.1", 4711)); socket.create_connection(("127.0.0.1", 4711))
mouth = socket.socket(socket.AF_UNIX); mouth.connect("\\0planted")
open("/work/ready", "w").close(); print("planted", flush=True)
import signal; signal.pause()
"""
    look = """
import os, socket
seen = [p for p in ("/work/planted", "/tmp/planted", "/dev/shm/planted") if os.path.exists(p)]
for family, address in ((socket.AF_UNIX, "\\0planted"), (socket.AF_INET, ("127.0.0.1", 4711))):
    try: socket.socket(family).connect(address); seen.append(address)
    except ConnectionRefusedError: pass
print(seen, [p for p in os.listdir("/proc") if p.isdigit()] == ["1", str(os.getpid())])
"""
    import asyncio

    async with client.session(SPEC) as one, client.session(SPEC) as other:
        planted = asyncio.create_task(one.run_python(plant, timeout_s=3))
        while not planted.done():
            result = await other.run_python(look)
            assert result.stdout == b"[] True\n", result.stderr
        assert (await planted).stdout == b"planted\n", (await planted).stderr


async def test_killed_session_is_lost_and_never_blank(
    client: SandboxClient, running: Executor
) -> None:
    async with client.session(SPEC) as session:
        before = {p.pid for p in running.descendants()}
        await session.put_files({"state": b"x"})
        assert before
        for process in running.descendants():
            if _is_guest(process.pid):
                process.kill()
        with pytest.raises(SandboxLostError):
            await session.run_python("print('blank')")
    async with client.session(SPEC) as fresh:
        assert (await fresh.run_python("print(1)")).stdout == b"1\n"


def _is_guest(pid: int) -> bool:
    """Whether ``pid`` is PID 1 of a namespace below ours."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False
    ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
    return len(ids) > 1 and ids[-1] == "1"
