/* A preload shim: it logs a process's writes and syncs, and makes chosen ones fail.

   SHIM_LOG   absolute path of the log; without it nothing is logged
   SHIM_FULL  "bytes:pattern"  when this process has written so many bytes to matching paths, its disk is full: the
              write that passes the end is cut short, and every later one fails with ENOSPC
   SHIM_EIO   "n:pattern"      the n-th sync of a matching path fails with EIO, and only that one, as on Linux

   The variables are read at every call, so a process may change them while it runs (while no other thread writes).
   One line per call: pid, name, fd, bytes, result, errno, began, ended (monotonic nanoseconds, the same clock in all
   processes), path. The line is written when the call has returned. Calls go to the kernel by syscall(), so the shim
   never calls itself. Writes that the C library makes for itself (printf) and stores to mapped memory are not seen.
   In this file off_t is 64 bits wide, as everywhere on 64-bit Linux. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HERE LONG_MIN /* no offset: write at the file's own position */

static atomic_long written, syncs; /* to and of matching paths, in this process */

struct call {
    const char *name;
    int fd;
    long size, began;
    char path[PATH_MAX];
};

static long now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void begin(struct call *c, const char *name, int fd, long size)
{
    char link[64];
    int saved = errno;
    c->name = name, c->fd = fd, c->size = size;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, c->path, sizeof c->path - 1);
    c->path[length < 0 ? 0 : length] = 0;
    errno = saved;
    c->began = now();
}

static long finish(struct call *c, long result)
{
    int saved = errno;
    long ended = now();
    const char *log = getenv("SHIM_LOG");
    /* Opened for each line: a kept descriptor could be closed by the program, and its number given to a database. */
    long out = log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (out >= 0) {
        char line[PATH_MAX + 256];
        int length = snprintf(line, sizeof line, "%d %s %d %ld %ld %d %ld %ld %s\n", (int)getpid(), c->name, c->fd,
                              c->size, result, result < 0 ? saved : 0, c->began, ended, c->path);
        syscall(SYS_write, (int)out, line, (size_t)length);
        syscall(SYS_close, (int)out);
    }
    errno = saved;
    return result;
}

static long fail(struct call *c, int error)
{
    errno = error;
    return finish(c, -1);
}

/* The number before the colon, if the variable is set and its pattern matches the path; -1 otherwise. */
static long setting(const char *variable, const struct call *c)
{
    const char *value = getenv(variable);
    char *colon;
    if (!value) return -1;
    long number = strtol(value, &colon, 10);
    return *colon == ':' && fnmatch(colon + 1, c->path, 0) == 0 ? number : -1;
}

/* How many bytes of this write the disk still takes. */
static size_t room(const struct call *c)
{
    long limit = setting("SHIM_FULL", c);
    if (limit < 0 || c->size <= 0) return (size_t)c->size;
    long left = limit - atomic_fetch_add(&written, c->size);
    return left <= 0 ? 0 : left < c->size ? (size_t)left : (size_t)c->size;
}

static ssize_t put(const char *name, int fd, const void *data, size_t size, off_t offset)
{
    struct call c;
    begin(&c, name, fd, (long)size);
    size_t part = room(&c);
    if (part == 0 && size > 0) return fail(&c, ENOSPC);
    return finish(&c, offset == HERE ? syscall(SYS_write, fd, data, part)
                                     : syscall(SYS_pwrite64, fd, data, part, offset));
}

static ssize_t put_many(const char *name, int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    struct call c;
    long size = 0;
    for (int i = 0; i < count; i++) size += (long)parts[i].iov_len;
    begin(&c, name, fd, size);
    /* Not cut short: the whole write fails. */
    if (room(&c) < (size_t)size) return fail(&c, ENOSPC);
    return finish(&c, offset == HERE ? syscall(SYS_writev, fd, parts, count)
                                     : syscall(SYS_pwritev2, fd, parts, count, (long)offset, 0L, flags));
}

static int sync_file(const char *name, long number, int fd)
{
    struct call c;
    begin(&c, name, fd, 0);
    long failing = setting("SHIM_EIO", &c);
    if (failing >= 0 && atomic_fetch_add(&syncs, 1) + 1 == failing) return (int)fail(&c, EIO);
    return (int)finish(&c, syscall(number, fd));
}

static int cut(int fd, off_t length)
{
    struct call c;
    begin(&c, "ftruncate", fd, (long)length);
    return (int)finish(&c, syscall(SYS_ftruncate, fd, length));
}

ssize_t write(int fd, const void *data, size_t size) { return put("write", fd, data, size, HERE); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return put("pwrite", fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return put("pwrite", fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int n) { return put_many("writev", fd, parts, n, HERE, 0); }
ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return put_many("pwritev", fd, parts, n, at, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return put_many("pwritev", fd, parts, n, at, flags);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) { return pwritev2(fd, parts, n, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t at) { return pwritev2(fd, parts, n, at, 0); }
int fsync(int fd) { return sync_file("fsync", SYS_fsync, fd); }
int fdatasync(int fd) { return sync_file("fdatasync", SYS_fdatasync, fd); }
int ftruncate(int fd, off_t length) { return cut(fd, length); }
int ftruncate64(int fd, off_t length) { return cut(fd, length); }

/* A server's answer to its client. */
ssize_t send(int fd, const void *data, size_t size, int flags)
{
    struct call c;
    begin(&c, "send", fd, (long)size);
    return finish(&c, syscall(SYS_sendto, fd, data, size, flags, NULL, 0));
}
