/* A wall clock that jumps: the seconds in the file $SEMEL_CLOCK (a mapped 8-byte integer) are added to what the kernel says. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

/* For a process that was forked, and not started, with the preload. */
int semel_clock_attach(const char *name) {
    int file = open(name, O_RDONLY);
    if (file < 0) return -1;
    void *page = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page == MAP_FAILED) return -1;
    offset = page;
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("SEMEL_CLOCK");
    if (name) semel_clock_attach(name);
}

static int64_t jump(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
