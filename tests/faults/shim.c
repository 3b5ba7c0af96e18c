// Preloaded into rloss: counts the calls that change files below $FAULT_UNDER, and makes one of them fail or be the last.
//
//   FAULT_UNDER   a folder; other files are left alone
//   FAULT_AT      which call of all, from 1; 0 only counts
//   FAULT_MODE    kill   SIGKILL in the call's place; a write gets half of its bytes through
//                 once   the call fails with FAULT_ERRNO
//                 from   it and all writes after it fail so, as on a full disk
//   FAULT_ERRNO   a number
//   FAULT_COUNT   a file that gets the number of calls at a normal end
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;

static int below(const char *path) {
    const char *under = getenv("FAULT_UNDER");
    return under && path && strncmp(path, under, strlen(under)) == 0;
}

static int descriptor_below(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

// A path relative to a descriptor lies where the descriptor does.
static int entry_below(int folder, const char *path) {
    return path[0] == '/' || folder == AT_FDCWD ? below(path) : descriptor_below(folder);
}

// 0: go on. 1: fail with errno set. 2: be killed.
static int fault(int is_write) {
    const char *at_text = getenv("FAULT_AT"), *mode = getenv("FAULT_MODE");
    long at = at_text ? atol(at_text) : 0, call = atomic_fetch_add(&calls, 1) + 1;
    if (at == 0 || !mode) return 0;
    int hit = call == at || (strcmp(mode, "from") == 0 && is_write && call > at);
    if (!hit) return 0;
    if (strcmp(mode, "kill") == 0) return 2;
    const char *number = getenv("FAULT_ERRNO");
    errno = number ? atoi(number) : EIO;
    return 1;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

__attribute__((destructor)) static void report(void) {
    const char *file = getenv("FAULT_COUNT");
    FILE *out = file ? fopen(file, "w") : NULL;
    if (!out) return;
    fprintf(out, "%ld\n", atomic_load(&calls));
    fclose(out);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define SIMPLE(is_below, is_write, ...)      \
    if (is_below) switch (fault(is_write)) { \
        case 1: return -1;                   \
        case 2: die();                       \
        }                                    \
    return real(__VA_ARGS__)

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(write);
    if (descriptor_below(fd)) switch (fault(1)) {
        case 1: return -1;
        case 2: real(fd, bytes, length / 2); die();
        }
    return real(fd, bytes, length);
}

ssize_t writev(int fd, const struct iovec *parts, int count) { REAL(writev); SIMPLE(descriptor_below(fd), 1, fd, parts, count); }
int fsync(int fd) { REAL(fsync); SIMPLE(descriptor_below(fd), 0, fd); }
int fdatasync(int fd) { REAL(fdatasync); SIMPLE(descriptor_below(fd), 0, fd); }
int ftruncate64(int fd, off64_t length) { REAL(ftruncate64); SIMPLE(descriptor_below(fd), 0, fd, length); }
int rename(const char *from, const char *to) { REAL(rename); SIMPLE(below(to), 0, from, to); }
int unlink(const char *path) { REAL(unlink); SIMPLE(below(path), 0, path); }
int unlinkat(int folder, const char *path, int flags) { REAL(unlinkat); SIMPLE(entry_below(folder, path), 0, folder, path, flags); }
int rmdir(const char *path) { REAL(rmdir); SIMPLE(below(path), 0, path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); SIMPLE(below(path), 1, path, mode); }

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    SIMPLE(flags & O_CREAT && below(path), 1, path, flags, mode);
}
