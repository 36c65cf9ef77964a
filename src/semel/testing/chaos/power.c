/* A disk that keeps only what was synced. fsync and fdatasync do nothing but note "size path" in $SEMEL_POWER_LOG; after the
   server was killed, the file is cut to the size of its last note. While $SEMEL_POWER_OUT exists nothing is noted any more:
   the power went out at that moment. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int note(int fd) {
    const char *log = getenv("SEMEL_POWER_LOG"), *out = getenv("SEMEL_POWER_OUT");
    char link[64], path[4096], line[4200];
    struct stat facts;
    if (!log || (out && access(out, F_OK) == 0) || fstat(fd, &facts) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    int size = snprintf(line, sizeof line, "%lld %s\n", (long long)facts.st_size, path);
    int file = open(log, O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (file < 0) return 0;
    ssize_t written = write(file, line, (size_t)size);
    (void)written;
    close(file);
    return 0;
}

int fsync(int fd) { return note(fd); }
int fdatasync(int fd) { return note(fd); }
