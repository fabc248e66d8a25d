"""What a session is to its user, whatever isolates it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollstream.errors import ContractError, SandboxLostError
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient, Session

CAP = 65536
# Takes a lock that only a living process can hold: who gets it later knows that the holder is dead.
HOLD = """
import fcntl, time
held = open("lock", "w"); fcntl.flock(held, fcntl.LOCK_EX); open("holding", "w").close(); time.sleep(600)
"""
PROVE_HELD = """
import fcntl, os, sys
while not os.path.exists("holding"): pass
try: fcntl.flock(open("lock", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: print("alive", flush=True)
"""
IS_FREE = """
import fcntl
fcntl.flock(open("lock", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB); print("free")
"""


async def test_failing_command_is_a_result(session: Session) -> None:
    result = await session.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.reason) == (3, "exited")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_missing_command_is_a_result(session: Session) -> None:
    result = await session.exec(["no-such-command"])
    assert result.exit_code == 127
    assert b"no-such-command" in result.stderr


async def test_killed_command_tells_its_signal(session: Session) -> None:
    result = await session.exec(["sh", "-c", "kill -9 $$"])
    assert (result.exit_code, result.reason) == (-9, "signalled")


async def test_empty_command_is_refused(session: Session) -> None:
    with pytest.raises(ContractError, match="empty"):
        await session.exec([])
    assert (await session.exec(["true"])).exit_code == 0


async def test_python_runs_in_a_fresh_main(session: Session) -> None:
    first = await session.run_python("left = 1; import json; print(__name__, json.dumps([1]))")
    second = await session.run_python("print('left' in globals())")
    assert (first.stdout, second.stdout) == (b"__main__ [1]\n", b"False\n")


async def test_python_shares_the_files(session: Session) -> None:
    await session.run_python("open('note', 'w').write('kept')")
    assert (await session.exec(["cat", "note"])).stdout == b"kept"


@pytest.mark.parametrize(
    ("code", "status", "stderr"),
    [
        ("import sys; sys.exit(4)", 4, b""),
        ("raise SystemExit('why')", 1, b"why"),
        ("1/0", 1, b"ZeroDivisionError"),
        ("def broken(:", 1, b"SyntaxError"),
        ("import os; os.abort()", -6, b""),
    ],
)
async def test_python_failure_is_a_result(
    session: Session, code: str, status: int, stderr: bytes
) -> None:
    result = await session.run_python(code)
    assert result.exit_code == status
    assert stderr in result.stderr


async def test_python_may_start_python(session: Session) -> None:
    code = (
        "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(7)']))"
    )
    result = await session.run_python(code)
    assert result.stdout == b"b'7\\n'\n", result.stderr


async def test_threads_and_multiprocessing_work(session: Session) -> None:
    code = """
import concurrent.futures as f, multiprocessing as m
with f.ThreadPoolExecutor(2) as pool: print(sum(pool.map(abs, [-1, 2])))
child = m.get_context("fork").Process(target=lambda: print("child", flush=True)); child.start(); child.join()
"""
    result = await session.run_python(code)
    assert result.stdout == b"3\nchild\n", result.stderr


async def test_threads_and_exit_functions_end_before_the_script(session: Session) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start(); print("main")
"""
    result = await session.run_python(code)
    assert result.stdout == b"main\nthread\nexit\n", result.stderr


async def test_binary_output_is_untouched(session: Session) -> None:
    every = bytes(range(256)) * 8
    result = await session.exec(["cat"], stdin=every)
    assert result.stdout == every


async def test_output_cannot_pose_as_a_frame(session: Session) -> None:
    end = b"0 exited 0 0 0 0"
    forged = b"x" + len(end).to_bytes(4, "little") + end
    result = await session.exec(["sh", "-c", "cat; exit 9"], stdin=forged)
    assert (result.stdout, result.exit_code) == (forged, 9)


async def test_stdin_ends_at_once_without_input(session: Session) -> None:
    result = await session.exec(["cat"])
    assert (result.reason, result.stdout) == ("exited", b"")


async def test_large_stdin_to_a_non_reader(session: Session) -> None:
    result = await session.exec(["sh", "-c", "echo done"], stdin=b"x" * (8 << 20))
    assert (result.reason, result.stdout) == ("exited", b"done\n")


async def test_environment_is_empty_but_for_what_is_asked(session: Session) -> None:
    result = await session.exec(["env"], env={"ASKED": "yes"})
    names = {line.split(b"=")[0] for line in result.stdout.splitlines()}
    assert b"ASKED=yes" in result.stdout.splitlines()
    assert names <= {b"ASKED", b"PATH", b"HOME", b"LANG", b"PWD", b"SHLVL", b"_"}


async def test_working_folder_can_be_chosen(session: Session) -> None:
    await session.put_files({"deep/er/file": b"x"})
    assert (await session.exec(["ls"], cwd="deep/er")).stdout == b"file\n"


@pytest.mark.parametrize("stream", [1, 2])
async def test_flood_is_capped_and_counted(session: Session, stream: int) -> None:
    code = f"import os\nfor _ in range(512): os.write({stream}, bytes(65536))\nos._exit(5)"
    result = await session.run_python(code)
    kept = result.stdout if stream == 1 else result.stderr
    assert len(kept) == CAP
    assert result.dropped_bytes == 512 * 65536 - CAP
    assert result.exit_code == 5


async def test_endless_output_ends_at_the_deadline(session: Session) -> None:
    result = await session.exec(["yes"], timeout_s=0.3)
    assert (result.reason, len(result.stdout)) == ("timeout", CAP)
    assert result.dropped_bytes > 0


async def test_timeout_keeps_what_was_written(session: Session) -> None:
    code = "print('partial', flush=True)\nwhile True: pass"
    result = await session.run_python(code, timeout_s=0.5)
    assert (result.reason, result.stdout) == ("timeout", b"partial\n")


async def test_timeout_of_a_command_that_ignores_signals(session: Session) -> None:
    command = "trap '' TERM INT HUP; echo deaf; while :; do :; done"
    result = await session.exec(["sh", "-c", command], timeout_s=0.5)
    assert (result.reason, result.stdout) == ("timeout", b"deaf\n")


@pytest.mark.parametrize("ending", ["", "\nwhile True: pass"], ids=["exit", "timeout"])
async def test_children_die_with_their_command(session: Session, ending: str) -> None:
    code = f"import os\nif os.fork() == 0:\n exec({HOLD!r})\n{PROVE_HELD}{ending}"
    result = await session.run_python(code, timeout_s=3)
    assert result.stdout == b"alive\n", result.stderr
    assert (await session.run_python(IS_FREE)).stdout == b"free\n"


async def test_background_process_that_holds_stdout_is_not_waited_for(session: Session) -> None:
    result = await session.exec(["sh", "-c", "sleep 600 & echo started"], timeout_s=15)
    assert (result.reason, result.stdout) == ("exited", b"started\n")


async def test_commands_of_one_session_take_turns(session: Session) -> None:
    code = "import os; os.mkdir('turn'); os.rmdir('turn'); print(1)"
    results = await asyncio.gather(*(session.run_python(code) for _ in range(8)))
    assert [r.stdout for r in results] == [b"1\n"] * 8


async def test_cancelled_command_never_answers_the_next_one(session: Session) -> None:
    call = asyncio.create_task(
        session.run_python(
            "print('old', flush=True); open('began', 'w'); import time; time.sleep(5)"
        )
    )
    await asyncio.sleep(0)
    await _answers(session)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    try:
        result = await session.run_python("print('new')")
    except SandboxLostError:
        return
    assert result.stdout == b"new\n"


async def _answers(session: Session) -> None:
    """Let the loop turn until the call before this one is on its way."""
    for _ in range(50):
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------ files


async def test_files_round_trip(session: Session) -> None:
    files = {"a": b"", "b/c/d": bytes(range(256)), "name with\nnewline": b"x"}
    await session.put_files(files)
    assert dict(await session.get_files([*files, "missing", "b"])) == files


async def test_put_replaces_whole_files(session: Session) -> None:
    await session.put_files({"f": b"long content"})
    await session.put_files({"f": b"s"})
    assert dict(await session.get_files(["f"])) == {"f": b"s"}


async def test_files_of_the_spec_are_there_first(client: SandboxClient) -> None:
    spec = events_pb2.SandboxSpec(toolchain="python", files={"in/data": b"42"})
    async with client.session(spec) as session:
        assert (await session.exec(["cat", "in/data"])).stdout == b"42"


@pytest.mark.parametrize("path", ["../out", "a/../../out", "/etc/out", "", "."])
async def test_paths_outside_are_refused(session: Session, path: str) -> None:
    with pytest.raises(ContractError, match="work folder"):
        await session.put_files({path: b"x"})
    with pytest.raises(ContractError, match="work folder"):
        await session.get_files([path])


async def test_planted_links_are_not_followed(session: Session) -> None:
    plant = """
import os
os.symlink("/etc/passwd", "file"); os.symlink("/tmp", "folder"); os.symlink("/tmp/dangling", "new")
os.symlink("/proc/1/root", "root"); os.mkfifo("pipe"); os.mkdir("real"); os.link
print(len(open("file").read()) > 0, os.path.isdir("folder/."))
"""
    assert (await session.run_python(plant)).stdout == b"True True\n"
    wanted = ["file", "folder/x", "root/etc/passwd", "pipe", "real", "new"]
    assert dict(await session.get_files(wanted)) == {}
    with pytest.raises(ContractError):
        await session.put_files({"folder/escaped": b"x"})
    await session.put_files({"new": b"mine"})
    check = "import os; print(os.path.islink('new'), os.path.exists('/tmp/dangling'), os.path.exists('/tmp/escaped'))"
    assert (await session.run_python(check)).stdout == b"False False False\n"


async def test_session_is_well_after_a_refusal(session: Session) -> None:
    with pytest.raises(ContractError):
        await session.put_files({"../x": b""})
    assert (await session.exec(["echo", "well"])).stdout == b"well\n"


async def test_unknown_toolchain_names_the_known(client: SandboxClient) -> None:
    with pytest.raises(ContractError, match=r"(?s)fortran.*python"):
        async with client.session(events_pb2.SandboxSpec(toolchain="fortran")):
            pass


async def test_a_session_is_never_used_twice(client: SandboxClient) -> None:
    spec = events_pb2.SandboxSpec(toolchain="python")
    for _ in range(4):
        async with client.session(spec) as session:
            code = "import os; print(os.listdir('.')); open('trace', 'w')"
            assert (await session.run_python(code)).stdout == b"[]\n"
