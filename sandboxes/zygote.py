"""The fork server of the native backend: makes a sandbox session in a few milliseconds.

A freshly executed interpreter with nothing of the executor in it: no memory, no environment, no
descriptors but the control socket. It prepares once what all sessions share (a read-only root in a
mount namespace of its own), and forks a session per request: user, mount, pid, network, ipc, uts
and cgroup namespaces, private tmpfs, no capabilities, seccomp; then the forked interpreter is the
guest, so that a session needs no start of Python.

What a session writes goes to a layer: a tmpfs of limited size that is mounted nowhere, and that only
its descriptor keeps. The session sees it through an overlay, on top of the layers of a snapshot;
the executor gets the descriptor, and with it the files outlive their session.

Runs as a plain script with the standard library only. Request, one datagram: a marshalled dict and
descriptors: the session's end of its channel, then the layers below, uppermost first. Answer, on
that channel: ``d`` with the descriptor of the writable layer, ``p`` and the host pid of the
session's PID 1, or ``r`` and what went wrong. The end of the control socket is the end of the
zygote; sessions end with their own channels.
"""

import _signal
import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import sys

# Loaded under a bare name: its traces are read inside the sandbox, and host paths are not shown
# there.
guest = type(sys)("guest")
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest.py")) as source:
    exec(compile(source.read(), "guest.py", "exec", dont_inherit=True), guest.__dict__)

LIBC = ctypes.CDLL(None, use_errno=True)
NEWTIME, NEWNS, NEWCGROUP, NEWUTS = 0x80, 0x20000, 0x2000000, 0x4000000
NEWIPC, NEWUSER, NEWPID, NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
LAST_CAPABILITY = 40
INSIDE_ID = 1000
DEVICES = ("null", "zero", "full", "random", "urandom")
MASKED = ("kcore", "keys", "timer_list", "sched_debug", "sysrq-trigger")
READ_ONLY_PROC = ("sys", "irq", "bus", "fs")
# The mount calls by descriptor (Linux 5.2, of detached trees 6.15), the same on all architectures.
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
SET_STRING, CREATE, EMPTY_PATH, CLONE_TREE, CLOEXEC = 1, 6, 0x1000, 1, 0x80000
ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 2, 4, 0x100000
# Snapshots are flattened before they stand on so many layers.
MAX_LAYERS = 20
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, what + ": " + os.strerror(number))
    return result


def mount(source, target, kind=None, flags=0, data=None):
    encode = lambda value: None if value is None else os.fsencode(value)  # noqa: E731
    result = LIBC.mount(encode(source), os.fsencode(target), encode(kind), flags, encode(data))
    check(result, "mount " + target)


def bind_read_only(source, target):
    mount(source, target, None, BIND)
    mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


# ------------------------------------------------------------------ once: the root that sessions
# share


def build_root(root, binds, files):
    """A read-only root at ``root``: toolchain, devices, empty places for what is private."""
    mount("rollstream", root, "tmpfs", NOSUID, "size=1m,nr_inodes=512,mode=755")
    for place in ("proc", "dev", "tmp", "work", "etc"):
        os.mkdir(root + "/" + place)
    for source, inside in binds:
        os.makedirs(root + inside)
        bind_read_only(source, root + inside)
    for name in ("bin", "lib", "lib64", "sbin"):
        if os.path.exists("/usr/" + name):
            os.symlink("usr/" + name, root + "/" + name)
    for inside, text in files.items():
        with open(root + inside, "w") as out:
            out.write(text)
    for name in DEVICES:
        with open(root + "/dev/" + name, "w"):
            pass
        mount("/dev/" + name, root + "/dev/" + name, None, BIND)
    os.makedirs(root + "/run/layers/empty")
    for number in (*range(MAX_LAYERS + 1), "merged"):
        os.mkdir(root + "/run/layers/%s" % number)
    os.mkdir(root + "/dev/shm")
    os.symlink("/proc/self/fd", root + "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink("/proc/self/fd/%d" % number, root + "/dev/" + name)
    mount(None, root, None, REMOUNT | BIND | RDONLY | NOSUID)


# ------------------------------------------------------------------ per session, in the forked
# child


def become_user(request, ready, go):
    """A user namespace with one id; the zygote writes the map when it may, else we do."""
    uid, gid = os.getuid(), os.getgid()
    check(LIBC.unshare(NEWUSER), "user namespace")
    if request["host_uid"] is None:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", "%d %d 1" % (INSIDE_ID, uid))
        write("/proc/self/gid_map", "%d %d 1" % (INSIDE_ID, gid))
    os.write(ready, b"u")
    if os.read(go, 1) != b"g":
        os._exit(1)
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)


def write(path, text):
    with open(path, "w") as out:
        out.write(text)


def new_layer(request):
    """A detached tmpfs: ``files`` is what a session writes, ``work`` is the overlay's own."""
    owner = INSIDE_ID if request["host_uid"] is not None else 0
    context = check(LIBC.syscall(FSOPEN, b"tmpfs", 1), "fsopen")
    options = {"size": request["disk_bytes"], "nr_inodes": request["inodes"], "mode": 755}
    for name, value in options.items():
        call = LIBC.syscall(FSCONFIG, context, SET_STRING, name.encode(), b"%d" % value, 0)
        check(call, "fsconfig " + name)
    check(LIBC.syscall(FSCONFIG, context, CREATE, None, None, 0), "tmpfs")
    layer = check(LIBC.syscall(FSMOUNT, context, 1, ATTR_NOSUID | ATTR_NODEV), "fsmount")
    os.close(context)
    for name in ("files", "work", "files/work", "files/tmp"):
        os.mkdir(name, 0o755, dir_fd=layer)
        os.chown(name, owner, owner, dir_fd=layer)
    return layer


def clone(layer):
    flags = ctypes.c_uint(CLONE_TREE | CLOEXEC | EMPTY_PATH)
    return check(LIBC.syscall(OPEN_TREE, layer, b"", flags), "open_tree")


def map_owner(layer, pid):
    """The files of layers belong to the id inside; to this session they show as its own."""
    namespace = os.open("/proc/%d/ns/user" % pid, os.O_RDONLY)
    attributes = b"".join(n.to_bytes(8, sys.byteorder) for n in (ATTR_IDMAP, 0, 0, namespace))
    size = ctypes.c_size_t(len(attributes))
    result = LIBC.syscall(MOUNT_SETATTR, layer, b"", EMPTY_PATH, attributes, size)
    os.close(namespace)
    check(result, "mount_setattr")


def stack_layers(layers):
    """The overlay at /work and /tmp. The places where its layers were mounted are left empty."""
    for number, layer in enumerate(layers):
        place = b"run/layers/%d" % number
        check(LIBC.syscall(MOVE_MOUNT, layer, b"", -100, place, 4), "move_mount")
    below = ["run/layers/%d/files" % n for n in range(1, len(layers))] or ["run/layers/empty"]
    options = "lowerdir=%s,upperdir=run/layers/0/files,workdir=run/layers/0/work,userxattr"
    mount("overlay", "run/layers/merged", "overlay", NOSUID | NODEV, options % ":".join(below))
    for name in ("work", "tmp"):
        mount("run/layers/merged/" + name, name, None, BIND)
    for place in (*range(len(layers)), "merged"):
        check(LIBC.umount2(b"run/layers/%s" % str(place).encode(), DETACH), "umount a layer")


def build_session(request, root, layers):
    """Private mounts over the shared root, and into it. Runs as PID 1 of the session."""
    mount(None, "/", None, REC | PRIVATE)
    mount(root, root, None, BIND | REC)
    os.chdir(root)
    if layers:
        stack_layers(layers)
    else:
        size = "size=%d,nr_inodes=%d,mode=755" % (request["disk_bytes"], request["inodes"])
        mount("work", "work", "tmpfs", NOSUID | NODEV, size)
        mount("tmp", "tmp", "tmpfs", NOSUID | NODEV, size)
    mount("shm", "dev/shm", "tmpfs", NOSUID | NODEV, "size=%d,mode=755" % request["shm_bytes"])
    mount("proc", "proc", "proc", NOSUID | NODEV | NOEXEC)
    for name in MASKED:
        if os.path.exists("proc/" + name):
            mount("dev/null", "proc/" + name, None, BIND)
    for name in READ_ONLY_PROC:
        mount("proc/" + name, "proc/" + name, None, BIND | REC)
        flags = BIND | REMOUNT | RDONLY | NOSUID | NODEV | NOEXEC
        mount(None, "proc/" + name, None, flags)
    # New root and old root in one place: the old one lies on top, and is taken away.
    check(LIBC.pivot_root(b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", DETACH), "umount the old root")
    os.chdir("/work")
    check(LIBC.sethostname(b"sandbox", 7), "hostname")
    raise_loopback()


def raise_loopback():
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    request = b"lo".ljust(16, b"\0") + IFF_UP_RUNNING.to_bytes(2, "little") + bytes(22)
    fcntl.ioctl(sock.fileno(), SIOCSIFFLAGS, request)
    sock.close()


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def give_up_powers(seccomp):
    """No capabilities, no way to get any, no system calls beyond the filter."""
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    # Version 3 header for this process, and two empty sets of (effective, permitted, inheritable).
    header = (0x20080522).to_bytes(4, "little") + bytes(4)
    check(LIBC.capset(header, bytes(24)), "capset")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # PID 1 holds the channel: nothing inside may read or trace it.
    check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    if seccomp:
        program = FilterProgram(len(seccomp) // 8, seccomp)
        check(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def become_session(request, channel, sync, root, layers):
    """In the forked child: namespaces, then a second fork whose child is PID 1. Never returns."""
    become_user(request, *sync)
    check(LIBC.unshare(NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP), "namespaces")
    wait, release = os.pipe()
    pid = os.fork()
    if pid:
        # One writer at a time: the pid first, then PID 1 may speak.
        guest.CONTROL = channel
        guest.send(b"p", b"%d" % pid)
        os.write(release, b"g")
        os._exit(0)
    os.close(release)
    if os.read(wait, 1) != b"g":
        # Whoever asked is gone: nobody would end this session.
        os._exit(1)
    os.close(wait)
    os.setsid()
    build_session(request, root, layers)
    give_up_powers(request["seccomp"])
    os.dup2(channel, 3)
    os.closerange(4, 4096)
    os.environ.clear()
    move_standard_library(request["python"])
    guest.serve(3, "/work")


def move_standard_library(inside):
    """The interpreter was started from the host's prefix; from here on its library is at
    ``inside``.
    """
    outside = sys.base_prefix
    sys.path[:] = [inside + p[len(outside) :] for p in sys.path if p.startswith(outside)]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        places = getattr(module, "__path__", ())
        # A package that is loaded already finds its other modules by this list.
        if any(place.startswith(outside) for place in places):
            module.__path__ = [inside + place[len(outside) :] for place in places]
    sys.prefix = sys.base_prefix = sys.exec_prefix = sys.base_exec_prefix = inside
    sys.executable = inside + "/bin/python3"


def fork_session(request, channel, below, root):
    """Fork a session and, as root, give it its ids; the rest it does by itself."""
    layers = []
    if request["layered"]:
        kept = new_layer(request)
        layers = [clone(layer) for layer in (kept, *below)]
        _socket.socket(fileno=os.dup(channel)).sendmsg(
            [b"d" + bytes(4)],
            [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, kept.to_bytes(4, sys.byteorder))],
        )
        os.close(kept)
    ready_read, ready = os.pipe()
    go_read, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        os.close(ready_read)
        os.close(go)
        try:
            become_session(request, channel, (ready, go_read), root, layers)
        except BaseException as error:
            guest.CONTROL = channel
            guest.send(b"r", str(error).encode())
        finally:
            # Whatever happens, also when nobody listens any more: a child that returned from here
            # would serve as a second zygote.
            os._exit(1)
    os.close(ready)
    os.close(go_read)
    try:
        if os.read(ready_read, 1) and request["host_uid"] is not None:
            write("/proc/%d/setgroups" % pid, "deny")
            for name in ("uid_map", "gid_map"):
                write("/proc/%d/%s" % (pid, name), "%d %d 1" % (INSIDE_ID, request["host_uid"]))
            for layer in layers:
                map_owner(layer, pid)
        os.write(go, b"g")
    finally:
        for fd in (ready_read, go, *layers):
            os.close(fd)


def can_layer():
    """Whether this kernel clones detached mounts and stacks them (Linux 6.15)."""
    try:
        layer = new_layer({"host_uid": None, "disk_bytes": 1 << 20, "inodes": 16})
        os.close(clone(layer))
        os.close(layer)
    except OSError:
        return False
    return True


def hide_command_line():
    """The command line of a fork is ours, and it holds a path of the host."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    ctypes.memset(begin, 0, end - begin)


def enter_own_namespaces(as_root):
    """Mounts of our own; without root that takes a user namespace, in which sessions nest theirs."""
    uid, gid = os.getuid(), os.getgid()
    if as_root:
        # A session must not read what the groups of the executor may read.
        os.setgroups([])
    check(LIBC.unshare(NEWNS if as_root else NEWUSER | NEWNS), "own namespaces")
    if not as_root:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", "0 %d 1" % uid)
        write("/proc/self/gid_map", "0 %d 1" % gid)
    mount(None, "/", None, REC | PRIVATE)


def main():
    control = _socket.socket(fileno=int(sys.argv[1]))
    LIBC.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    os.umask(0o022)
    settings = marshal.loads(control.recv(1 << 20))
    root = settings["root"]
    try:
        enter_own_namespaces(settings["as_root"])
        build_root(root, settings["binds"], settings["files"])
    except OSError as error:
        control.send(str(error).encode())
        os._exit(1)
    guest.PRCTL = LIBC.prctl
    guest.warm()
    hide_command_line()
    control.send(b"ready layered" if can_layer() else b"ready")
    gc.disable()
    gc.freeze()
    while True:
        size = _socket.CMSG_SPACE(4 * (MAX_LAYERS + 1))
        data, ancillary, _, _ = control.recvmsg(1 << 16, size)
        if not data:
            os._exit(0)
        packed = ancillary[0][2]
        channel, *below = (
            int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed) - 3, 4)
        )
        try:
            fork_session(marshal.loads(data), channel, below, root)
        except OSError as error:
            guest.CONTROL = channel
            try:
                guest.send(b"r", str(error).encode())
            except OSError:
                pass  # whoever asked is gone
        for fd in (channel, *below):
            os.close(fd)


if __name__ == "__main__":
    main()
