"""PID 1 of a sandbox session: runs commands for the executor, and nothing outlives a command.

Runs inside the sandbox, as a plain script or forked from the zygote (standard library only; modules that cost milliseconds to
import are avoided: ``socket``, ``signal``, ``struct`` and ``json`` together double the start). It
is not importable code of the executor; ``sandboxes.channel`` speaks the other end.

Protocol, over one stream socket. Request: 4-byte little-endian length, then a marshalled dict.
Reply: any number of frames ``type (1 byte), length (4 bytes), payload``: ``o`` stdout, ``e``
stderr, ``t`` bytes left out (``o`` or ``e``, and how many), ``x`` the end (a line of text: ``code
reason wall_s cpu_s maxrss_kb dropped_bytes``), ``f`` a file or a piece of one, ``l`` a line about a
file, ``r`` a refusal (text). The executor trusts nothing that comes from here: the reply is plain
bytes with bounds, never unmarshalled. While a command runs, ``stdin`` and ``signal`` may come; they
have no reply, and one that comes too late is dropped.

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
# prctl of the C library; set by who loaded it.
PRCTL = None
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
CHILDREN = "/proc/self/task/%d/children"
PAGE = resource.getpagesize()
# How often memory is looked at where no control group holds it.
LOOK_S = 0.25
# Of a listing: one descriptor a level, of the thousand that PID 1 may have.
MAX_DEPTH = 200


def receive(count):
    parts = []
    while count:
        data = os.read(CONTROL, min(count, 1 << 20))
        if not data:
            os._exit(0)
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def next_request():
    return marshal.loads(receive(int.from_bytes(receive(4), "little")))


def send(kind, payload=b""):
    data = kind + len(payload).to_bytes(4, "little") + bytes(payload)
    while data:
        data = data[os.write(CONTROL, data) :]


class Stream:
    """One output stream of a command: the first half of ``cap`` is forwarded at once, of what
    follows the last half is kept for the end, and what lies between is counted.
    """

    def __init__(self, fd, kind, cap):
        self.fd, self.kind, self.dropped = fd, kind, 0
        self.left, self.room, self.tail = cap - cap // 2, cap // 2, bytearray()
        os.set_blocking(fd, False)

    def pump(self):
        """Read once. False at the end of the file."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        if not data:
            return False
        if self.left:
            head, data = data[: self.left], data[self.left :]
            self.left -= len(head)
            send(self.kind, head)
        if data:
            self.tail += data
            over = len(self.tail) - self.room
            if over > CHUNK:
                del self.tail[:over]
                self.dropped += over
        return True

    def end(self):
        over = len(self.tail) - self.room
        if over > 0:
            del self.tail[:over]
            self.dropped += over
        if self.dropped:
            send(b"t", self.kind + b"%d" % self.dropped)
        if self.tail:
            send(self.kind, self.tail)


def become_payload(request, pipes):
    """In the child: its own session, limits, clean descriptors. Returns in the child only."""
    os.setsid()
    # PID 1 hides its memory, and with it these files; a payload has nothing to hide.
    if PRCTL is not None:
        PRCTL(4, 1, 0, 0, 0)
    try:
        # Where memory ends, the kernel takes the payload and not PID 1.
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass
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


class Input:
    """The standard input of a command: what is pending for it, and whether more may come."""

    def __init__(self, fd, data, keep_open, poll):
        self.fd, self.pending, self.open, self.poll = fd, bytearray(data), keep_open, poll
        self.asked = False
        os.set_blocking(fd, False)
        self.settle()

    def settle(self):
        """Ask for room while something is pending; close when nothing will come any more."""
        if self.fd < 0:
            return
        if self.pending and not self.asked:
            self.poll.register(self.fd, select.POLLOUT)
        elif self.asked and not self.pending:
            self.poll.unregister(self.fd)
        self.asked = bool(self.pending)
        if not self.pending and not self.open:
            self.close()

    def write(self):
        try:
            del self.pending[: os.write(self.fd, self.pending[:CHUNK])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.open = False
            self.pending.clear()
        self.settle()

    def close(self):
        if self.fd >= 0:
            if self.asked:
                self.poll.unregister(self.fd)
            os.close(self.fd)
            self.fd = -1


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
    poll.register(CONTROL, select.POLLIN | select.POLLRDHUP)
    source = Input(stdin, request["stdin"], request["keep_stdin_open"], poll)
    verdict = watch(poll, streams, ended, source, request, pid)
    if verdict:
        kill(pid)
    _, status, usage = os.wait4(pid, 0)
    for stream in streams.values():
        budget = LAST_DRAIN
        while budget > 0 and stream.pump():
            budget -= CHUNK
        os.close(stream.fd)
        stream.end()
    os.close(ended)
    source.close()
    reap_all(pid)
    code = os.waitstatus_to_exitcode(status)
    reason = verdict or ("signalled" if code < 0 else "exited")
    total = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = total.ru_utime + total.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    dropped = sum(stream.dropped for stream in streams.values())
    send(
        b"x",
        (
            "%d %s %.6f %.6f %d %d" % (code, reason, now() - began, cpu, usage.ru_maxrss, dropped)
        ).encode(),
    )


def watch(poll, streams, ended, source, request, pid):
    """Move bytes until the payload ends, or its time is up ("timeout"), or its memory where no
    control group holds it ("oom").
    """
    deadline = now() + request["timeout_s"]
    memory = request["memory_bytes"] if os.getpid() == 1 else 0
    while True:
        left = deadline - now()
        if left <= 0:
            return "timeout"
        if memory and rough_memory() > memory and memory_used() > memory:
            return "oom"
        left = min(left, LOOK_S) if memory else left
        done = False
        # Not more than the rest of the pipes may be read before the clock is looked at again.
        for fd, events in poll.poll(left * 1000):
            if fd == CONTROL:
                if events & (select.POLLRDHUP | select.POLLHUP):
                    abandon(pid)
                meanwhile(next_request(), source, pid)
            elif fd == ended:
                done = True
            elif fd == source.fd:
                source.write()
            elif fd in streams and streams[fd].pump() is False:
                poll.unregister(fd)
        if done:
            return ""


def rough_memory():
    """Not less than the bytes that the processes of the session hold, and quick to tell."""
    pages = 0
    for data in of_each_process("statm"):
        fields = data.split()
        pages += int(fields[1]) - int(fields[2])
    return pages * PAGE


def memory_used():
    """The same with what forks share counted once."""
    kilobytes = 0
    for data in of_each_process("smaps_rollup"):
        for line in data.splitlines():
            if line.startswith(b"Pss_Anon:"):
                kilobytes += int(line.split()[1])
    return kilobytes << 10


def of_each_process(file):
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/" + file, "rb") as source:
                    yield source.read()
            except OSError:
                continue  # it has just ended


def meanwhile(request, source, pid):
    """What comes while a command runs: more input, or a signal for its process group."""
    if request["op"] == "stdin" and source.open:
        source.pending += request["data"]
        source.open = not request["eof"]
        source.settle()
    elif request["op"] == "signal":
        try:
            if request["all"]:
                kill_all(pid)
            else:
                os.killpg(pid, request["number"])
        except OSError:
            pass


def kill_all(pid):
    """As PID 1 every other process of the namespace; else the command's own session, and those that
    left it and came to us when their parents ended.
    """
    if os.getpid() == 1:
        os.kill(-1, _signal.SIGKILL)
        return
    for child in adopted():
        kill(child)
    os.killpg(pid, _signal.SIGKILL)


def adopted():
    try:
        with open(CHILDREN % os.getpid()) as children:
            return [int(child) for child in children.read().split()]
    except OSError:
        return []


def reap_all(pid):
    """Kill and reap everything that the command left: nothing outlives it.

    As PID 1 that is every other process of the namespace. Without a namespace (process backend) it
    is the command's own session and what comes to us: a process that leaves the session while its
    parent lives is beyond reach, which is why that backend is called unsafe.
    """
    while True:
        try:
            kill_all(pid)
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
    """Whole files. ``hidden``: nothing else runs any more, and what was planted there goes."""
    if request.get("hidden"):
        sweep_processes()
    for path, data in request["files"].items():
        parts = inside(path)
        if request.get("hidden"):
            clear_the_way(parts)
        write_piece(parts, ".put-%d" % os.getpid(), data, 0o644, True)
    done()


def put_piece(request):
    """A piece of a file under a name of its own; with ``mode`` the last one, which renames it."""
    last = request["mode"] is not None
    write_piece(inside(request["path"]), request["name"], request["data"], request["mode"], last)
    done()


def write_piece(parts, temporary, data, mode, last):
    folder = open_parent(parts, True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            while data:
                data = data[os.write(fd, data) :]
            if last:
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
        if last:
            os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        remove_tree(folder, temporary)
        raise
    finally:
        os.close(folder)


def discard(request):
    """Forget the pieces of a file that will not be finished."""
    remove_named(inside(request["path"]), request["name"])
    done()


def clear_the_way(parts):
    """Remove what stands where a folder or the file itself has to be."""
    folder = os.open(WORK, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts[:-1]:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            break
        except OSError:
            remove_tree(folder, part)
            break
        os.close(folder)
        folder = below
    else:
        remove_tree(folder, parts[-1])
    os.close(folder)


def get(request):
    """Send each file that exists and is a regular one: name, NUL, content."""
    for path in request["paths"]:
        data, left = b"", MAX_FILE
        try:
            for piece in pieces(inside(path)):
                data += piece
                left -= len(piece)
                if left < 0:
                    raise OSError(27, "file %s is larger than %d bytes" % (path, MAX_FILE))
        except FileNotFoundError:
            continue
        send(b"f", path.encode() + b"\0" + data)
    done()


def get_pieces(request):
    """Send one regular file, a piece at a time."""
    try:
        for piece in pieces(inside(request["path"])):
            send(b"f", piece)
    except FileNotFoundError:
        raise OSError(2, "no regular file %s" % request["path"]) from None
    done()


def pieces(parts):
    """The content of a regular file as it is when it is read: it may shrink meanwhile."""
    try:
        folder = open_parent(parts, False)
    except OSError:
        raise FileNotFoundError from None
    try:
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        raise FileNotFoundError from None
    finally:
        os.close(folder)
    try:
        if os.fstat(fd).st_mode & 0o170000 != 0o100000:
            raise FileNotFoundError
        while True:
            piece = os.read(fd, 1 << 20)
            if not piece:
                return
            yield piece
    finally:
        os.close(fd)


def stat(request):
    parts = inside(request["path"])
    folder = open_parent(parts, False)
    try:
        describe(folder, parts[-1], "/".join(parts))
    finally:
        os.close(folder)
    done()


def describe(folder, name, path):
    """A line about one entry: mode, size, modified, path, NUL, target of a link."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    target = os.readlink(name, dir_fd=folder) if found.st_mode & 0o170000 == 0o120000 else ""
    head = "%d %d %.6f " % (found.st_mode, found.st_size, found.st_mtime)
    send(b"l", head.encode() + os.fsencode(path) + b"\0" + os.fsencode(target))
    return found.st_mode & 0o170000 == 0o040000


def list_files(request):
    """Lines about what is in a folder, at most ``limit``; one descriptor per level, so the depth is
    bounded too.
    """
    parts = inside(request["path"] + "/x")[:-1] if request["path"] else []
    folder = open_parent([*parts, "x"], False)
    left, more = request["limit"], False
    stack = [(folder, "/".join(parts), None)]
    while stack:
        folder, prefix, names = stack.pop()
        names = os.listdir(folder) if names is None else names
        names.sort()
        while names and left > 0:
            name = names.pop(0)
            path = prefix + "/" + name if prefix else name
            try:
                is_folder = describe(folder, name, path)
                left -= 1
                if is_folder and request["recursive"]:
                    if len(stack) >= MAX_DEPTH:
                        more = True
                        continue
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                    below = os.open(name, flags, dir_fd=folder)
                    stack += [(folder, prefix, names), (below, path, None)]
                    break
            except OSError:
                continue  # gone meanwhile, or not ours to read
        else:
            more = more or bool(names)
            os.close(folder)
    done(int(more))


def remove(request):
    parts = inside(request["path"])
    remove_named(parts, parts[-1])
    done()


def remove_named(parts, name):
    try:
        folder = open_parent(parts, False)
    except OSError:
        return  # then there is no such name
    try:
        remove_tree(folder, name)
    finally:
        os.close(folder)


def remove_tree(folder, name):
    """Remove whatever ``name`` is, without following a link. However deep: each level is moved up
    before it is emptied, so that one folder is open at a time.
    """
    try:
        os.unlink(name, dir_fd=folder)
        return
    except FileNotFoundError:
        return
    except OSError:
        pass
    moved, waiting = 0, [name]
    while waiting:
        top = waiting[-1]
        os.chmod(top, 0o700, dir_fd=folder)
        here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            for entry in os.listdir(here):
                try:
                    os.unlink(entry, dir_fd=here)
                    continue
                except OSError:
                    pass
                moved += 1
                aside = ".gone-%d-%d" % (os.getpid(), moved)
                try:
                    os.rename(entry, aside, src_dir_fd=here, dst_dir_fd=folder)
                except OSError:
                    # A folder of a layer below cannot be moved: it is emptied where it is.
                    remove_tree(here, entry)
                else:
                    waiting.insert(0, aside)
        finally:
            os.close(here)
        waiting.pop()
        os.rmdir(top, dir_fd=folder)


def sweep_processes(_request=None):
    """Kill everything else in the session, and wait until it is gone."""
    if os.getpid() == 1:
        reap_all(0)
    if _request:
        done()


def done(code=0):
    send(b"x", b"%d done 0 0 0 0" % code)


def now():
    return time.monotonic()


def ping(_request):
    done()


def late(_request):
    """Meant for a command that has ended: there is no reply to it."""


HANDLERS = {
    "exec": execute, "python": execute, "stdin": late, "signal": late, "ping": ping,
    "put": put, "put_piece": put_piece, "discard": discard, "get": get, "get_pieces": get_pieces,
    "stat": stat, "list": list_files, "remove": remove, "sweep": sweep_processes,
}  # fmt: skip


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
        request = next_request()
        try:
            HANDLERS[request["op"]](request)
        except RecursionError:
            send(b"r", b"the folder is too deep")
        except OSError as error:
            send(b"r", ("%s" % (error.strerror or error)).encode("utf-8", "replace"))


def hide():
    """Not dumpable: what runs beside us under the same user cannot open our memory in /proc."""
    import ctypes

    global PRCTL
    PRCTL = ctypes.CDLL(None).prctl
    PRCTL(4, 0, 0, 0, 0)
    if os.getpid() != 1 and os.path.exists(CHILDREN % os.getpid()):
        # What outlives its parent comes to us, so that it can be waited for.
        PRCTL(36, 1, 0, 0, 0)


if __name__ == "__main__":
    hide()
    warm()
    serve(int(sys.argv[1]), sys.argv[2])
