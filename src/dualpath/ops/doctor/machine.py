"""Memory, limits and clock of the node."""

from dualpath.ops.doctor.finding import Finding, error, mebibytes, ok, warning

#: A router holds about two connections for each of its 4096 concurrent requests.
NEEDED_DESCRIPTORS = 2 * 4096 + 256
#: An engine with storage, control link and some peers; below it starts failing.
LEAST_DESCRIPTORS = 512


def memory(available_bytes: int, buffer_bytes: int) -> Finding:
    """Room for the PE or DE buffer."""
    found = f"{mebibytes(available_bytes)} available"
    needed = f"buffer of {mebibytes(buffer_bytes)}"
    if available_bytes < buffer_bytes:
        return error("Memory", found, needed, "make the buffer smaller (buffer_bytes)")
    return ok("Memory", found, needed)


def huge_pages(transparent: str) -> Finding:
    """``transparent`` is the kernel's choice, such as ``always [madvise] never``; empty: none."""
    check, needed = "Huge pages", "transparent ones: always or madvise"
    chosen = transparent.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return ok(check, f"transparent: {chosen}", needed)
    remedy = "write madvise to transparent_hugepage/enabled in sysfs: buffers pin fewer pages"
    return warning(check, f"transparent: {chosen or 'unknown'}", needed, remedy)


def locked_memory(limit_bytes: int | None, buffer_bytes: int, has_rdma: bool) -> Finding:
    """``limit_bytes`` of RLIMIT_MEMLOCK, None for no limit; RDMA pins the whole buffer.

    Every rank of an engine pins all of it, each within a limit of its own.
    """
    check, needed = "Locked memory", f"buffer of {mebibytes(buffer_bytes)} per rank, with RDMA"
    if limit_bytes is None:
        return ok(check, "unlimited", needed)
    found = f"limit of {mebibytes(limit_bytes)}"
    if limit_bytes >= buffer_bytes:
        return ok(check, found, needed)
    remedy = "ulimit -l unlimited (limits.conf: memlock; containers: --ulimit memlock=-1)"
    if has_rdma:
        return error(check, found, needed, remedy)
    return ok(check, f"{found}, not needed without RDMA", needed)


def shared_memory(refusal: str, buffer_bytes: int) -> Finding:
    """``refusal``: why memory of the buffer's size cannot be shared; empty if it can."""
    check, needed = (
        "Shared memory",
        f"buffer of {mebibytes(buffer_bytes)} for engines of several ranks",
    )
    if not refusal:
        return ok(check, "memfd, mapped by a second descriptor", needed)
    remedy = (
        "allow memfd_create and /proc/PID/fd in this container, raise ulimit -f and its memory "
        "limit, or serve with --tensor-parallel-size 1"
    )
    return warning(check, refusal, needed, remedy)


def file_descriptors(soft: int, hard: int) -> Finding:
    """Open files a process may have, by its soft and hard limit."""
    check, needed = "File descriptors", f"{NEEDED_DESCRIPTORS} for a router at full load"
    found = f"limit of {soft}, at most {hard}"
    remedy = f"ulimit -n {NEEDED_DESCRIPTORS}"
    if soft < LEAST_DESCRIPTORS:
        return error(check, found, f"at least {LEAST_DESCRIPTORS}", remedy)
    if soft < NEEDED_DESCRIPTORS:
        return warning(check, found, needed, remedy)
    return ok(check, found, needed)


def clock(synchronised: bool | None) -> Finding:
    """Whether the kernel knows its clock to be synchronised; None where it cannot be asked."""
    if synchronised:
        return ok("Clock", "synchronised")
    found = "not synchronised" if synchronised is False else "cannot be asked"
    remedy = "run chrony or systemd-timesyncd: logs of several nodes are compared by their time"
    return warning("Clock", found, "synchronised", remedy)
