"""PID 1 of a sandbox session: runs commands for the executor, and nothing outlives a command.

Runs inside the sandbox, as a plain script or forked from the zygote (standard library only; modules that cost milliseconds to
import are avoided: ``socket``, ``signal``, ``struct`` and ``json`` together double the start). It
is not importable code of the executor; ``sandboxes.channel`` speaks the other end.

Protocol, over one stream socket. Request: 4-byte little-endian length, then a marshalled dict.
Reply: any number of frames ``type (1 byte), length (4 bytes), payload``: ``o`` stdout, ``e``
stderr, ``x`` the end (a line of text: ``code reason wall_s cpu_s maxrss_kb dropped_bytes``), ``f``
a file, ``r`` a refusal (text). The executor trusts nothing that comes from here: the reply is plain
bytes with bounds, never unmarshalled.

What it waits for: a request, or the end of the socket. The end of the socket is the end of PID 1,
and the kernel then kills every process of the namespace.
"""

import _signal
import gc
import marshal
import os
import resource
import select
import sys
import time
import warnings  # noqa: F401 - os.execvpe imports it, after the fork and from another root

# Set by serve().
CONTROL = -1
WORK = "/work"
LIMITS = {
    "AS": resource.RLIMIT_AS,
    "NPROC": resource.RLIMIT_NPROC,
    "FSIZE": resource.RLIMIT_FSIZE,
    "NOFILE": resource.RLIMIT_NOFILE,
    "CPU": resource.RLIMIT_CPU,
    "CORE": resource.RLIMIT_CORE,
}
CHUNK = 65536
# Output that is still in the pipe when the command ends is read up to this much, and no end of file
# is waited for.
LAST_DRAIN = 1 << 20
MAX_FILE = 64 << 20


def receive(count):
    parts = []
    while count:
        data = os.read(CONTROL, min(count, 1 << 20))
        if not data:
            os._exit(0)
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def send(kind, payload=b""):
    data = kind + len(payload).to_bytes(4, "little") + payload
    while data:
        data = data[os.write(CONTROL, data) :]


class Stream:
    """One output stream of a command: forwards up to ``cap`` bytes and counts the rest."""

    def __init__(self, fd, kind, cap):
        self.fd, self.kind, self.left, self.dropped = fd, kind, cap, 0
        os.set_blocking(fd, False)

    def pump(self):
        """Read once. False at the end of the file."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        if not data:
            return False
        kept = data[: self.left]
        self.left -= len(kept)
        self.dropped += len(data) - len(kept)
        if kept:
            send(self.kind, kept)
        return True


def become_payload(request, pipes):
    """In the child: its own session, limits, clean descriptors. Returns in the child only."""
    os.setsid()
    for number, fd in enumerate(pipes):
        os.dup2(fd, number)
    os.closerange(3, 4096)
    for number in (_signal.SIGPIPE, _signal.SIGINT, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    for name, value in request["limits"].items():
        resource.setrlimit(LIMITS[name], (value, value))
    os.chdir(WORK)
    if request.get("cwd"):
        os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def run_code(code):
    """Run a script as ``__main__`` of this forked interpreter. Never returns."""
    import builtins

    status = 0
    sys.stdin = open(0, encoding="utf-8", errors="replace")
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1
    )
    sys.argv = ["main.py"]
    main = type(sys)("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    try:
        exec(compile(code, "main.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
    except BaseException as error:
        # The first frame is this file: the script's own trace begins below it.
        trace = error.__traceback__
        error = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    try:
        finish()
        sys.stdout.flush()
    except OSError:
        status = status or 1
    os._exit(status & 255)


def finish():
    """What an interpreter does at its end: wait for threads, call what asked to be called."""
    import atexit

    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit._run_exitfuncs()


def start(request):
    """Fork the payload. Returns (pid, stdin, stdout, stderr) of this end."""
    ends = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        try:
            become_payload(request, (ends[0][0], ends[1][1], ends[2][1]))
            if request["op"] == "python":
                run_code(request["code"])
            os.execvpe(request["argv"][0], request["argv"], os.environ)
        except OSError as error:
            os.write(
                2, ("%s: %s\n" % (request.get("argv", ["python"])[0], error.strerror)).encode()
            )
            os._exit(127)
        finally:
            # A child that returned from here would serve as a second guest.
            os._exit(126)
    os.close(ends[0][0])
    os.close(ends[1][1])
    os.close(ends[2][1])
    return pid, ends[0][1], ends[1][0], ends[2][0]


def feed(fd, data):
    """Write some of stdin. Returns what is left, or None when done."""
    if not data:
        return None
    try:
        return data[os.write(fd, data[:CHUNK]) :] or None
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return None


def execute(request):
    began = now()
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid, stdin, stdout, stderr = start(request)
    streams = {
        stdout: Stream(stdout, b"o", request["cap"]),
        stderr: Stream(stderr, b"e", request["cap"]),
    }
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (stdout, stderr, ended):
        poll.register(fd, select.POLLIN)
    poll.register(CONTROL, select.POLLRDHUP)
    os.set_blocking(stdin, False)
    pending = request["stdin"] or None
    if pending:
        poll.register(stdin, select.POLLOUT)
    else:
        os.close(stdin)
    deadline = began + request["timeout_s"]
    timed_out = watch(poll, streams, ended, stdin, pending, deadline, pid)
    if timed_out:
        kill(pid)
    _, status, usage = os.wait4(pid, 0)
    for stream in streams.values():
        budget = LAST_DRAIN
        while budget > 0 and stream.pump():
            budget -= CHUNK
        os.close(stream.fd)
    os.close(ended)
    reap_all(pid)
    code = os.waitstatus_to_exitcode(status)
    reason = "timeout" if timed_out else "signalled" if code < 0 else "exited"
    total = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = total.ru_utime + total.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    dropped = sum(stream.dropped for stream in streams.values())
    send(
        b"x",
        (
            "%d %s %.6f %.6f %d %d" % (code, reason, now() - began, cpu, usage.ru_maxrss, dropped)
        ).encode(),
    )


def watch(poll, streams, ended, stdin, pending, deadline, pid):
    """Move bytes until the payload ends or its time is up. True when it was the time."""
    while True:
        left = deadline - now()
        if left <= 0:
            return True
        done = False
        for fd, _ in poll.poll(left * 1000):
            if fd == CONTROL:
                abandon(pid)
            elif fd == ended:
                done = True
            elif fd == stdin and pending:
                pending = feed(stdin, pending)
                if pending is None:
                    poll.unregister(stdin)
                    os.close(stdin)
            elif fd in streams and streams[fd].pump() is False:
                poll.unregister(fd)
        if done:
            return False


def reap_all(pid):
    """Kill and reap everything that the command left: nothing outlives it.

    As PID 1 that is every other process of the namespace. Without a namespace (process backend) it
    is only the command's own session: what has left that is beyond reach, which is why that backend
    is called unsafe.
    """
    alone = os.getpid() == 1
    while True:
        try:
            if alone:
                os.kill(-1, _signal.SIGKILL)
            else:
                os.killpg(pid, _signal.SIGKILL)
        except OSError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def abandon(pid):
    """The executor is gone: end, and without a namespace take along what we can name."""
    if os.getpid() != 1:
        kill(pid)
        try:
            os.killpg(pid, _signal.SIGKILL)
        except OSError:
            pass
    os._exit(0)


def kill(pid):
    try:
        os.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def inside(path):
    """``path`` under the work folder; every component is opened without following links."""
    parts = [p for p in path.split("/") if p not in ("", ".")]
    if not parts or ".." in parts or path.startswith("/"):
        raise OSError(22, "path must be relative and inside the work folder")
    return parts


def open_parent(parts, create):
    """A descriptor of the folder that holds the last part."""
    folder = os.open(WORK, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts[:-1]:
        if create:
            try:
                os.mkdir(part, 0o755, dir_fd=folder)
            except FileExistsError:
                pass
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def put(request):
    for path, data in request["files"].items():
        parts = inside(path)
        folder = open_parent(parts, True)
        temporary = ".put-%d" % os.getpid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            fd = os.open(temporary, flags, 0o644, dir_fd=folder)
            try:
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
            os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            try:
                os.unlink(temporary, dir_fd=folder)
            except OSError:
                pass
            raise
        finally:
            os.close(folder)
    send(b"x", b"0 done 0 0 0 0")


def get(request):
    """Send each file that exists and is a regular one: name, NUL, content."""
    for path in request["paths"]:
        parts = inside(path)
        try:
            folder = open_parent(parts, False)
        except OSError:
            continue
        try:
            fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            continue
        finally:
            os.close(folder)
        try:
            if os.fstat(fd).st_mode & 0o170000 != 0o100000:
                continue
            data = b""
            while len(data) <= MAX_FILE:
                more = os.read(fd, 1 << 20)
                if not more:
                    break
                data += more
        finally:
            os.close(fd)
        if len(data) > MAX_FILE:
            raise OSError(27, "file %s is larger than %d bytes" % (path, MAX_FILE))
        send(b"f", path.encode() + b"\0" + data)
    send(b"x", b"0 done 0 0 0 0")


def now():
    return time.monotonic()


def ping(_request):
    send(b"x", b"0 done 0 0 0 0")


HANDLERS = {"exec": execute, "python": execute, "put": put, "get": get, "ping": ping}


def warm():
    """Do once what every script does first: a fork then finds it done.

    The parser's tables and the text layer of files cost a fork 2 ms when it has to make them.
    """
    with open("/dev/null", "w", encoding="utf-8", errors="backslashreplace", buffering=1) as out:
        exec(
            compile("def f(x): return [x]\nprint(f(1), file=out)", "main.py", "exec"), {"out": out}
        )
    with open("/dev/null", encoding="utf-8", errors="replace") as empty:
        empty.read()


def serve(control, work):
    """Answer requests on ``control`` until it ends. Never returns."""
    global CONTROL, WORK
    CONTROL, WORK = control, work
    os.umask(0o022)
    # The only signal that Python handles by itself, and so the only one that could end PID 1 from
    # inside.
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    # A fork shares these pages for as long as nobody writes to them, and a collection would.
    gc.disable()
    gc.freeze()
    while True:
        request = marshal.loads(receive(int.from_bytes(receive(4), "little")))
        try:
            HANDLERS[request["op"]](request)
        except OSError as error:
            send(b"r", ("%s" % (error.strerror or error)).encode())


def hide():
    """Not dumpable: what runs beside us under the same user cannot open our memory in /proc."""
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


if __name__ == "__main__":
    hide()
    warm()
    serve(int(sys.argv[1]), sys.argv[2])
