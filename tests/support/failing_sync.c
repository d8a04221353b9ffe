/* A disk that fails to write once: loaded with LD_PRELOAD, it lets one sync of a file fail.
 *
 * FAILING_PATH: the end of the file's path.  FAILING_AT: a file that arms it; the next sync of
 * FAILING_PATH fails with EIO and takes the file away, so that every later one succeeds, as in a
 * kernel that reports a write-back error once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(int fd) {
    const char *end = getenv("FAILING_PATH"), *armed = getenv("FAILING_AT");
    char link[64], path[4096];
    if (!end || !armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < (ssize_t)strlen(end) || memcmp(path + size - strlen(end), end, strlen(end))) return 0;
    return unlink(armed) == 0;
}

#define SYNC(name)                                                     \
    int name(int fd) {                                                 \
        static int (*real)(int);                                       \
        if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, #name);       \
        if (fails(fd)) { errno = EIO; return -1; }                     \
        return real(fd);                                               \
    }

SYNC(fsync)
SYNC(fdatasync)
