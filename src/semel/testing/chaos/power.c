/* A disk that keeps only what was synced.

   Every change to a file below $SEMEL_POWER_ROOT is noted in $SEMEL_POWER_LOG before it is made, with what it destroys: the
   bytes that a write covers, the tail that a truncation drops, a second name (in $SEMEL_POWER_LOG.graves) for a file that is
   removed or replaced. fsync and its relatives do nothing but note that they were called. After the processes were killed,
   the notes are undone from the last to the first, except for those of files that were synced afterwards (power.py).
   While $SEMEL_POWER_LOG.out exists a sync comes too late, and is noted as such: the power went out at that moment. Every note
   has its time, so that it can be asked whether an answer waited for a sync. Without $SEMEL_POWER_LOG all calls pass through. Not seen: what stdio writes, memory maps, and the kernel's asynchronous I/O; who uses them must be told not to. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct note {
    int64_t kind, at;                    /* nanoseconds of the monotonic clock */
    int64_t inode, offset, length, size; /* size: of the file before the change */
    int64_t path, data;                  /* lengths of what follows */
};

static const char *log_name(void) {
    const char *name = getenv("SEMEL_POWER_LOG");
    return name && *name ? name : NULL;
}

static int below_root(const char *path) {
    const char *root = getenv("SEMEL_POWER_ROOT");
    size_t length = root ? strlen(root) : 0;
    return root && strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* The path of an open regular file or folder below the root; 0 when it is none of ours. */
static int ours(int fd, struct stat *facts, char *path) {
    char link[64];
    if (!log_name() || fstat(fd, facts) != 0) return 0;
    if (!S_ISREG(facts->st_mode) && !S_ISDIR(facts->st_mode)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below_root(path) && facts->st_nlink > 0;
}

static void note(char kind, int64_t inode, int64_t offset, int64_t length, int64_t size, const char *path,
                 const void *data, size_t count) {
    int file = (int)syscall(SYS_openat, AT_FDCWD, log_name(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) return;
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    int64_t at = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    struct note head = {kind, at, inode, offset, length, size, (int64_t)strlen(path), (int64_t)count};
    struct iovec parts[3] = {{&head, sizeof head}, {(void *)path, strlen(path)}, {(void *)data, count}};
    if (syscall(SYS_writev, file, parts, 3) < 0) abort(); /* a note that is missing would be a lie */
    syscall(SYS_close, file);
}

/* Note a change of [offset, offset + length) with the bytes that are there now. */
static void note_bytes(char kind, int fd, int64_t offset, int64_t length, const struct stat *facts, const char *path) {
    int64_t covered = facts->st_size - offset < length ? facts->st_size - offset : length;
    char *old = NULL, link[64];
    if (covered > 0) {
        /* Opened anew only where it must be: closing any descriptor of a file drops the process's locks on it (SQLite's). */
        int flags = fcntl(fd, F_GETFL), anew = (flags & O_ACCMODE) == O_WRONLY || flags & O_DIRECT;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        int file = anew ? (int)syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0) : fd;
        old = malloc((size_t)covered);
        if (!old || file < 0 || syscall(SYS_pread64, file, old, covered, offset) != covered) abort();
        if (anew) syscall(SYS_close, file);
    }
    note(kind, (int64_t)facts->st_ino, offset, length, facts->st_size, path, old, covered > 0 ? (size_t)covered : 0);
    free(old);
}

static int synced(int fd, char kind);

static void before_write(int fd, int64_t offset, size_t length) {
    int error = errno;
    struct stat facts;
    char path[PATH_MAX];
    if (ours(fd, &facts, path) && S_ISREG(facts.st_mode)) {
        int flags = fcntl(fd, F_GETFL);
        if (offset < 0) offset = flags & O_APPEND ? facts.st_size : lseek(fd, 0, SEEK_CUR);
        note_bytes('W', fd, offset, (int64_t)length, &facts, path);
        if (flags & O_DSYNC) synced(fd, 'S');
    }
    errno = error;
}

static size_t total(const struct iovec *parts, int count) {
    size_t sum = 0;
    for (int each = 0; each < count; each++) sum += parts[each].iov_len;
    return sum;
}

ssize_t write(int fd, const void *data, size_t length) {
    before_write(fd, -1, length);
    return syscall(SYS_write, fd, data, length);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    before_write(fd, -1, total(parts, count));
    return syscall(SYS_writev, fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    before_write(fd, offset, length);
    return syscall(SYS_pwrite64, fd, data, length, offset);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    before_write(fd, offset, total(parts, count));
    return syscall(SYS_pwritev, fd, parts, count, (long)offset, 0L);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    before_write(fd, offset, total(parts, count));
    return syscall(SYS_pwritev2, fd, parts, count, (long)offset, 0L, flags);
}

static void before_cut(int fd, int64_t size) {
    int error = errno;
    struct stat facts;
    char path[PATH_MAX];
    if (ours(fd, &facts, path) && S_ISREG(facts.st_mode) && facts.st_size != size)
        note_bytes('T', fd, size, facts.st_size > size ? facts.st_size - size : 0, &facts, path);
    errno = error;
}
int ftruncate(int fd, off_t size) {
    before_cut(fd, size);
    return (int)syscall(SYS_ftruncate, fd, size);
}
int truncate(const char *name, off_t size) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0), failed = fd < 0 ? -1 : ftruncate(fd, size);
    if (fd >= 0) syscall(SYS_close, fd);
    return failed;
}
int fallocate(int fd, int mode, off_t offset, off_t length) {
    struct stat facts;
    if (mode == 0 && fstat(fd, &facts) == 0 && offset + length > facts.st_size) before_cut(fd, offset + length);
    return (int)syscall(SYS_fallocate, fd, mode, offset, length);
}
int posix_fallocate(int fd, off_t offset, off_t length) {
    int error = errno, failed = fallocate(fd, 0, offset, length) ? errno : 0;
    errno = error;
    return failed;
}

static int opened(int folder, const char *name, int flags, mode_t mode) {
    int made = 0, error = errno;
    if (log_name() && flags & (O_CREAT | O_TRUNC)) {
        struct stat facts;
        made = fstatat(folder, name, &facts, 0) != 0;
        int file = flags & O_TRUNC && !made && S_ISREG(facts.st_mode) ? (int)syscall(SYS_openat, folder, name, O_RDONLY | O_CLOEXEC, 0) : -1;
        if (file >= 0) {
            before_cut(file, 0);
            syscall(SYS_close, file);
        }
    }
    errno = error;
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    error = errno;
    struct stat facts;
    char path[PATH_MAX];
    if (fd >= 0 && made && flags & O_CREAT && ours(fd, &facts, path))
        note('C', (int64_t)facts.st_ino, 0, 0, 0, path, NULL, 0);
    errno = error;
    return fd;
}
#define MODE(flags)                                       \
    mode_t mode = 0;                                      \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        mode = (mode_t)va_arg(rest, int);                 \
        va_end(rest);                                     \
    }
int open(const char *name, int flags, ...) {
    MODE(flags)
    return opened(AT_FDCWD, name, flags, mode);
}
int openat(int folder, const char *name, int flags, ...) {
    MODE(flags)
    return opened(folder, name, flags, mode);
}
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* A second name for a file that is about to lose this one; 0 when there is no such file. `path` becomes absolute. */
static int64_t bury(const char *name, char *path, struct stat *facts) {
    char grave[PATH_MAX], folder[PATH_MAX];
    static int64_t last; /* with the process id in it, no two are alike */
    if (!log_name()) return -1;
    const char *slash = strrchr(name, '/');
    snprintf(grave, sizeof grave, "%.*s", slash ? (int)(slash - name + 1) : 1, slash ? name : ".");
    if (!realpath(grave, folder)) return -1;
    if (snprintf(path, PATH_MAX, "%s/%s", folder, slash ? slash + 1 : name) >= PATH_MAX) return -1;
    if (!below_root(path)) return -1;
    if (stat(path, facts) != 0 || !S_ISREG(facts->st_mode)) return 0;
    int64_t number = ((int64_t)getpid() << 32) + __atomic_add_fetch(&last, 1, __ATOMIC_SEQ_CST);
    snprintf(grave, sizeof grave, "%s.graves/%lld", log_name(), (long long)number);
    if (syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, grave, 0) != 0) abort();
    return number;
}

int unlink(const char *name) {
    int error = errno;
    struct stat facts;
    char path[PATH_MAX];
    int64_t grave = bury(name, path, &facts);
    if (grave > 0) note('U', (int64_t)facts.st_ino, grave, 0, facts.st_size, path, NULL, 0);
    errno = error;
    return (int)syscall(SYS_unlinkat, AT_FDCWD, name, 0);
}
int rename(const char *from, const char *to) {
    int error = errno;
    struct stat moved, covered;
    char path[PATH_MAX], target[PATH_MAX];
    if (stat(from, &moved) == 0 && S_ISREG(moved.st_mode)) {
        int64_t grave = bury(to, target, &covered);
        if (grave >= 0 && realpath(from, path))
            note('R', (int64_t)moved.st_ino, grave, 0, moved.st_size, path, target, strlen(target));
    }
    errno = error;
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

static int synced(int fd, char kind) {
    struct stat facts;
    char path[PATH_MAX], out[PATH_MAX];
    if (!ours(fd, &facts, path)) return 0;
    snprintf(out, sizeof out, "%s.out", log_name());
    note(access(out, F_OK) == 0 ? 'L' : kind, (int64_t)facts.st_ino, 0, 0, 0, path, NULL, 0);
    return 1;
}
int fsync(int fd) { return synced(fd, 'S') ? 0 : (int)syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return synced(fd, 'S') ? 0 : (int)syscall(SYS_fdatasync, fd); }
int syncfs(int fd) { return synced(fd, 'A') ? 0 : (int)syscall(SYS_syncfs, fd); }
int sync_file_range(int fd, off_t offset, off_t length, unsigned flags) { /* a hint: it promises nothing */
    (void)fd, (void)offset, (void)length, (void)flags;
    return 0;
}

/* The names that programs built for large files use. */
#define SAME(name) __attribute__((alias(#name)))
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) SAME(pwrite);
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) SAME(pwritev);
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) SAME(pwritev2);
int truncate64(const char *name, off_t size) SAME(truncate);
int ftruncate64(int fd, off_t size) SAME(ftruncate);
int fallocate64(int fd, int mode, off_t offset, off_t length) SAME(fallocate);
int posix_fallocate64(int fd, off_t offset, off_t length) SAME(posix_fallocate);
int open64(const char *name, int flags, ...) SAME(open);
int openat64(int folder, const char *name, int flags, ...) SAME(openat);
int creat64(const char *name, mode_t mode) SAME(creat);
