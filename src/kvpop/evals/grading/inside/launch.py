"""Runs one program under limits, in namespaces of its own where asked: ``launch.py CONFIG_FD STATUS_FD PARENT_PID``.

The config is a JSON object (see ``kvpop.evals.grading.sandbox``); the status is one line of JSON: {"exit": code}, {"signal": n}
or {"error": why}. SIGTERM ends the program with everything it started; so does the end of the parent.

The processes, with namespaces: the launcher stays outside; a child in the new user namespace starts the first process of
the new process namespace, which lays out the file system and starts the program. When that first process goes, the kernel
kills whatever is left in its namespace.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
SET_PDEATHSIG, SET_NO_NEW_PRIVS, SET_CHILD_SUBREAPER, SET_DUMPABLE, SET_SECCOMP, SECCOMP_FILTER = 1, 38, 36, 4, 22, 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442  # the same number everywhere
NOBODY = 65534
BOX = "/box"


def checked(result, what):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source, target, kind, flags, data=""):
    paths = [None if text is None else text.encode() for text in (source, target, kind)]
    checked(libc.mount(*paths, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def die_with_parent(parent):
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lay_out(config):
    """A root with nothing but the interpreter's own files, read-only, a few devices, and an empty directory to write in."""
    root = config["root"]
    mount(None, "/", None, REC | PRIVATE)
    mount("none", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=0755")
    for path in config["see"]:
        target = root + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        mount(path, target, None, BIND | REC)
    for name in ("proc", "dev", BOX[1:]):
        os.mkdir(f"{root}/{name}")
    if not os.path.lexists(root + "/tmp"):
        os.symlink(BOX, root + "/tmp")
    for name in ("null", "zero", "full", "random", "urandom"):
        open(f"{root}/dev/{name}", "w").close()
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", root + "/dev/fd")
    try:
        mount("proc", root + "/proc", "proc", NOSUID | NODEV)
        with open(root + "/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # no namespaces within
    except OSError:
        pass  # refused where the outer /proc is masked; then there is none
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID, 0, 0, 0)
    checked(
        libc.syscall(SYS_MOUNT_SETATTR, -100, root.encode(), 0x8000, attributes, ctypes.sizeof(attributes)),
        "mount_setattr",
    )
    for name in ("null", "zero", "full", "random", "urandom"):  # writing to a device is no writing to a file system
        clear = (ctypes.c_uint64 * 4)(0, RDONLY, 0, 0)
        libc.syscall(SYS_MOUNT_SETATTR, -100, f"{root}/dev/{name}".encode(), 0, clear, ctypes.sizeof(clear))
    mount("none", root + BOX, "tmpfs", NOSUID | NODEV, f"size={config['disk']},nr_inodes=1000,mode=0777")
    os.chdir(root)
    checked(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", DETACH), "umount2")
    os.chdir(BOX)


def write_files(config, directory):
    for name, text in config["files"].items():
        with open(os.path.join(directory, name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)


def limit(config):
    for name, value in config["limits"].items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        low, high = (value, value + 1) if name == "CPU" else (value, value)
        if hard != resource.RLIM_INFINITY:
            low, high = min(low, hard), min(high, hard)
        resource.setrlimit(which, (low, high))


def become_program(config, drop, told):
    """Never returns; ``told`` closes when the program has begun."""
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in config["fds"]]  # out of the way of 3, 4, ...
    for i, fd in enumerate(fds):
        os.dup2(fd, 3 + i)
    os.closerange(3 + len(fds), told)
    os.closerange(told + 1, 1 << 20)
    os.umask(0o077)
    if drop:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limit(config)
    if config["isolation"] == "limits":
        forbid_calls()
    os.execve(config["argv"][0], config["argv"], config["env"])


def run(config, drop=False):
    """Run the program and wait for it, reaping whatever else ends: what there is to report."""
    ok, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = fcntl.fcntl(told, fcntl.F_DUPFD_CLOEXEC, 10 + len(config["fds"]))
            become_program(config, drop, told)
        except BaseException as error:
            os.write(told, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(127)
    for fd in (told, 0, 1, 2, *config["fds"]):  # the program alone holds its ends
        os.close(fd)
    signal.signal(signal.SIGTERM, lambda *_: kill(child))
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    if failed := os.read(ok, 4096):
        return {"error": failed.decode()}
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"exit": os.WEXITSTATUS(status)}


def in_namespaces(config, status):
    from_child, to_launcher = os.pipe()
    from_launcher, to_child = os.pipe()
    is_root, uid, gid, launcher = os.geteuid() == 0, os.geteuid(), os.getegid(), os.getpid()
    middle = os.fork()
    if not middle:
        try:
            os.close(from_child)
            os.close(to_child)
            checked(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS), "unshare")
            die_with_parent(launcher)
            os.write(to_launcher, b"map\n")
            if os.read(from_launcher, 1) != b"y":
                raise OSError("the user namespace got no map of ids")
            first = os.fork()
            if not first:
                libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                first_process(config, status, is_root)
            os.write(to_launcher, b"%d\n" % first)
            os.waitpid(first, 0)
        except BaseException as error:
            report(status, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    os.close(to_launcher)
    os.close(from_launcher)
    victim = [middle]
    signal.signal(signal.SIGTERM, lambda *_: kill(victim[0]))
    lines = os.fdopen(from_child)
    if lines.readline() == "map\n":
        if not is_root:
            write(f"/proc/{middle}/setgroups", "deny")
        for kind, own in (("gid", gid), ("uid", uid)):
            # Root is exempt from the limit on processes, so root's program is nobody, inside and outside.
            write(f"/proc/{middle}/{kind}_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n" if is_root else f"{own} {own} 1\n")
        os.write(to_child, b"y")
        if line := lines.readline():
            victim[0] = int(line)  # the first process of the namespace: when it is gone, all are
    os.waitpid(middle, 0)


def through_bubblewrap(config, config_fd, status):
    """Run this script once more, inside; wait until everything in there has ended, not just the first."""
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    launcher = os.getpid()
    child = os.fork()
    if not child:
        try:
            die_with_parent(launcher)
            again = [sys.executable, "-I", "-S", __file__, str(config_fd), str(status), "0"]
            os.execve(config["bubblewrap"][0], [*config["bubblewrap"], *again], {})
        finally:
            os._exit(127)
    signal.signal(signal.SIGTERM, lambda *_: kill(child))  # and with it, by --die-with-parent, the rest
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def first_process(config, status, is_root):
    try:
        os.setsid()
        lay_out(config)
        write_files(config, BOX)
        report(status, run(config, drop=is_root))
    except BaseException as error:
        report(status, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def report(status, what):
    os.write(status, json.dumps(what).encode() + b"\n")


def processes():
    """(pid, parent, owner, threads) of all there are."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            yield int(name), int(fields[1]), os.stat(f"/proc/{name}").st_uid, int(fields[17])
        except OSError:
            pass  # gone meanwhile


def with_limits_only(config, status):
    """No namespaces, so the kernel is told to refuse what they would have contained: the program stays one process."""
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_root = os.geteuid() == 0
    user = NOBODY if is_root else os.getuid()
    write_files(config, config["root"])
    if is_root:
        os.chown(config["root"], NOBODY, NOBODY)
    os.chdir(config["root"])
    # The limit counts every thread of the user.
    config["limits"]["NPROC"] += sum(threads for _, _, owner, threads in processes() if owner == user)
    outcome = run(config, drop=is_root)
    while left := [pid for pid, parent, _, _ in processes() if parent == os.getpid()]:
        for pid in left:
            kill(pid)
        for _ in left:
            os.wait()
    report(status, outcome)


# Numbers of system calls by architecture (AUDIT_ARCH, clone, the refused): sockets, new processes, sessions and groups, signals
# to others, a look into others, namespaces and mounts, io_uring (a way around a filter), bpf, perf, keys.
FILTERS = {
    "x86_64": (
        0xC000003E,
        56,
        (
            41,
            57,
            58,
            109,
            112,
            62,
            200,
            234,
            129,
            297,
            424,
            434,
            101,
            310,
            311,
            272,
            308,
            165,
            425,
            321,
            298,
            248,
            250,
            323,
        ),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        (198, 154, 157, 129, 130, 131, 138, 240, 424, 434, 117, 270, 271, 97, 268, 40, 425, 280, 241, 217, 219, 282),
    ),
}
CLONE3, CLONE_THREAD = 435, 0x10000


def forbid_calls():
    """A seccomp filter: refused calls fail with EPERM; clone only makes threads."""
    audit, clone, refused = FILTERS[os.uname().machine]
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill_process, error = 0x7FFF0000, 0x80000000, 0x00050000
    code = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill_process), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, error | errno.EPERM)]  # the other numbering of x86
    code += [(equal, 0, 1, CLONE3), (give, 0, 0, error | errno.ENOSYS)]  # libc then calls clone
    for number in refused:
        code += [(equal, 0, 1, number), (give, 0, 0, error | errno.EPERM)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 1, 0, CLONE_THREAD), (give, 0, 0, error | errno.EPERM)]
    code += [(give, 0, 0, allow)]
    instructions = b"".join(struct.pack("=HBBI", *one) for one in code)
    held = ctypes.create_string_buffer(instructions)
    program = struct.pack("@HP", len(code), ctypes.addressof(held))
    checked(libc.prctl(SET_SECCOMP, SECCOMP_FILTER, program, 0, 0), "seccomp")


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main():
    config_fd, status, parent = (int(text) for text in sys.argv[1:4])
    with open(config_fd, closefd=False) as file:
        file.seek(0)
        config = json.load(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a program of the same user might send it
    try:
        if parent:
            die_with_parent(parent)
            if config["isolation"] == "bubblewrap":
                through_bubblewrap(config, config_fd, status)
                return
        os.close(config_fd)
        os.set_inheritable(status, False)
        if config["isolation"] == "namespaces":
            in_namespaces(config, status)
            return
        libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # the program must not look into this process
        if config["isolation"] == "limits":
            with_limits_only(config, status)
        else:  # in bubblewrap, which has laid it all out
            write_files(config, BOX)
            os.chdir(BOX)
            report(status, run(config))
    except BaseException as error:
        report(status, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
