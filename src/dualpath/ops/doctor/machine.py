"""Checks of the node's memory, limits and clock."""

from dualpath.ops.doctor.finding import Finding, error, mebibytes, ok, warning

#: A router has about two connections for each of its 4096 concurrent requests.
NEEDED_DESCRIPTORS = 2 * 4096 + 256
#: Enough for an engine with storage, control connection and some peers; with less it fails.
MIN_DESCRIPTORS = 512


def memory(available_bytes: int, buffer_bytes: int) -> Finding:
    """Check the memory available for the PE or DE buffer."""
    found = f"{mebibytes(available_bytes)} available"
    needed = f"buffer of {mebibytes(buffer_bytes)}"
    if available_bytes < buffer_bytes:
        return error("Memory", found, needed, "make the buffer smaller (buffer_bytes)")
    return ok("Memory", found, needed)


def huge_pages(transparent: str) -> Finding:
    """Check transparent huge pages; ``transparent`` is like ``always [madvise] never`` or empty."""
    check, needed = "Huge pages", "transparent: always or madvise"
    chosen = transparent.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return ok(check, f"transparent: {chosen}", needed)
    remedy = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled: buffers pin fewer pages"
    return warning(check, f"transparent: {chosen or 'unknown'}", needed, remedy)


def locked_memory(limit_bytes: int | None, buffer_bytes: int, has_rdma: bool) -> Finding:
    """Check RLIMIT_MEMLOCK (None: unlimited): RDMA pins the whole buffer.

    Every rank of an engine pins all of it, within its own limit.
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
    """Check memory shared by ranks; ``refusal``: why it cannot be shared, empty if it can."""
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
    """Check the soft and hard limit of open files per process."""
    check, needed = "File descriptors", f"{NEEDED_DESCRIPTORS} for a router at full load"
    found = f"limit of {soft}, at most {hard}"
    remedy = f"ulimit -n {NEEDED_DESCRIPTORS}"
    if soft < MIN_DESCRIPTORS:
        return error(check, found, f"at least {MIN_DESCRIPTORS}", remedy)
    if soft < NEEDED_DESCRIPTORS:
        return warning(check, found, needed, remedy)
    return ok(check, found, needed)


def clock(synchronised: bool | None) -> Finding:
    """Check whether the kernel's clock is synchronised; None if the kernel does not answer."""
    if synchronised:
        return ok("Clock", "synchronised")
    found = "not synchronised" if synchronised is False else "unknown"
    remedy = "run chrony or systemd-timesyncd: timestamps of several nodes' logs must be comparable"
    return warning("Clock", found, "synchronised", remedy)
