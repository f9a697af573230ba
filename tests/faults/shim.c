// Preloaded: the n-th system call on files under FAULT_PREFIX misbehaves. Counts calls of the C library that
// name such a file, or a descriptor opened from one. `fault_arm` says what happens; see harness.py.
// Not seen: what the C library calls itself (fopen), mappings, calls of other names (access, flock,
// renameat). Calls that change the disk are counted apart: the process dies before the n-th (`fault_kill`;
// TORN: in the middle of it, where it is a write), and those before it are in the file FAULT_LOG, a line
// each; see kills.py.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ERROR, SHORT, ZERO, FLIP };
enum { DESCRIPTORS = 65536 };

static atomic_long calls, first = -1, count;
static int kind, number;
static unsigned char tracked[DESCRIPTORS];

long fault_calls(void) { return atomic_load(&calls); }
void fault_arm(long from, long how_many, int what, int error) {
  kind = what;
  number = error;
  atomic_store(&calls, 0);
  atomic_store(&count, how_many);
  atomic_store(&first, from);
}

enum { NEVER = -1 };
static atomic_long changes, last_change = NEVER;
static int torn, journal = -1;

long fault_changes(void) { return atomic_load(&changes); }
// The process dies before change number `at`; with `in_the_middle` after half of it. NEVER: it only counts.
void fault_kill(long at, int in_the_middle, int log) {
  torn = in_the_middle;
  journal = log;
  atomic_store(&changes, 0);
  atomic_store(&last_change, at);
}

// Called before a change. `fd` or `path` names the file; `n` bytes from `at`, for a write: what it may write.
static size_t changing(const char* what, int fd, const char* path, const char* to, long at, size_t n) {
  if (journal < 0) return n;
  char name[4096] = "", line[9000], link[64];
  if (path == NULL) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, name, sizeof name - 1);
    if (length > 0) name[length] = 0;
    path = name;
  }
  const int dies = atomic_fetch_add(&changes, 1) == atomic_load(&last_change);
  if (dies && !(torn && n > 1)) kill(getpid(), SIGKILL);
  const int length =
      snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", what, path, to == NULL ? "" : to, at, n);
  if (write(journal, line, (size_t)length) != length) abort();
  return dies ? n / 2 : n;
}
// Keeps the file `path`, which is about to be replaced or deleted, in the folder FAULT_OLD. Its number there;
// -1: there is no such file.
static long kept(const char* path) {
  char old[4096];
  const char* folder = getenv("FAULT_OLD");
  if (path == NULL || folder == NULL || journal < 0) return -1;
  const long number_there = atomic_load(&changes);
  snprintf(old, sizeof old, "%s/%ld", folder, number_there);
  return link(path, old) == 0 ? number_there : -1;
}
static void after_change(size_t wanted, size_t allowed) {
  if (allowed != wanted) kill(getpid(), SIGKILL);
}

static int is_ours(const char* path) {
  const char* prefix = getenv("FAULT_PREFIX");
  return path != NULL && prefix != NULL && strncmp(path, prefix, strlen(prefix)) == 0;
}
static int is_tracked(int fd) { return fd >= 0 && fd < DESCRIPTORS && tracked[fd]; }
// Whether `path`, relative to the folder opened as `directory`, is ours; `name`, of 4096 bytes, is then the
// whole of it.
static int is_ours_at(int directory, const char* path, char* name) {
  if (path == NULL) return 0;
  if (path[0] != '/' && is_tracked(directory)) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    const ssize_t length = readlink(link, name, 2047);
    if (length <= 0) return 0;
    snprintf(name + length, 4096 - (size_t)length, "/%.2000s", path);
    return is_ours(name);
  }
  snprintf(name, 4096, "%.4000s", path);
  return is_ours(name);
}

// Whether this call is one that misbehaves.
static int hit(void) {
  const long call = atomic_fetch_add(&calls, 1), from = atomic_load(&first);
  return from >= 0 && call >= from && call - from < atomic_load(&count);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
// A call that can only fail.
#define FAILS(ours)                       \
  if ((ours) && hit() && kind == ERROR) { \
    errno = number;                       \
    return -1;                            \
  }

static int opened(int fd, int ours) {
  if (fd >= 0 && fd < DESCRIPTORS) tracked[fd] = (unsigned char)ours;
  return fd;
}

#define CREATES(folder, name)                                                    \
  if (ours && (flags & O_CREAT) != 0 && faccessat(folder, path, F_OK, 0) != 0) { \
    changing("create", -1, name, NULL, 0, 0);                                    \
  } else if (ours && (flags & O_TRUNC) != 0) {                                   \
    changing("truncate", -1, name, NULL, 0, 0);                                  \
  }

#define OPEN(name)                                      \
  int name(const char* path, int flags, ...) {          \
    va_list list;                                       \
    va_start(list, flags);                              \
    const mode_t mode = va_arg(list, mode_t);           \
    va_end(list);                                       \
    const int ours = is_ours(path);                     \
    FAILS(ours)                                         \
    CREATES(AT_FDCWD, path)                             \
    return opened(REAL(name)(path, flags, mode), ours); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                               \
  int name(int directory, const char* path, int flags, ...) {      \
    va_list list;                                                  \
    va_start(list, flags);                                         \
    const mode_t mode = va_arg(list, mode_t);                      \
    va_end(list);                                                  \
    char whole[4096];                                              \
    const int ours = is_ours_at(directory, path, whole);           \
    FAILS(ours)                                                    \
    CREATES(directory, whole)                                      \
    return opened(REAL(name)(directory, path, flags, mode), ours); \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
  if (fd >= 0 && fd < DESCRIPTORS) tracked[fd] = 0;
  return REAL(close)(fd);
}

// Bytes of a read or a write, given what is asked for; -1: the call fails, -2: it goes on, and `flip` is set.
static ssize_t distorted(int fd, size_t wanted, int* flip) {
  *flip = 0;
  if (!is_tracked(fd) || !hit()) return (ssize_t)wanted;
  if (kind == ERROR) {
    errno = number;
    return -1;
  }
  if (kind == FLIP) *flip = 1;
  if (kind == ZERO) return 0;
  return kind == SHORT ? (ssize_t)(wanted / 2 / 512 * 512 + (wanted < 1024)) : (ssize_t)wanted;
}
static void flip_bit(void* data, ssize_t got) {
  if (got > 0) ((unsigned char*)data)[got / 3] ^= 0x10;
}

#define READ(name, parameters, arguments)           \
  ssize_t name parameters {                         \
    int flip;                                       \
    const ssize_t length = distorted(fd, n, &flip); \
    if (length <= 0 && n != 0) return length;       \
    n = (size_t)length;                             \
    const ssize_t got = REAL(name) arguments;       \
    if (flip) flip_bit(data, got);                  \
    return got;                                     \
  }
READ(read, (int fd, void* data, size_t n), (fd, data, n))
READ(pread, (int fd, void* data, size_t n, off_t at), (fd, data, n, at))
READ(pread64, (int fd, void* data, size_t n, off64_t at), (fd, data, n, at))

// How Python's os.preadv reads: with flags, preadv2.
#define READV(name, parameters, arguments, one)                                                      \
  ssize_t name parameters {                                                                          \
    int flip;                                                                                        \
    struct iovec piece = pieces[0];                                                                  \
    const ssize_t length = distorted(fd, piece.iov_len, &flip);                                      \
    if (length <= 0 && piece.iov_len != 0) return length;                                            \
    if ((size_t)length != piece.iov_len) {                                                           \
      piece.iov_len = (size_t)length;                                                                \
      return REAL(name) one;                                                                         \
    }                                                                                                \
    const ssize_t got = REAL(name) arguments;                                                        \
    if (flip) flip_bit(piece.iov_base, got < (ssize_t)piece.iov_len ? got : (ssize_t)piece.iov_len); \
    return got;                                                                                      \
  }
READV(preadv, (int fd, const struct iovec* pieces, int n, off_t at), (fd, pieces, n, at), (fd, &piece, 1, at))
READV(preadv64, (int fd, const struct iovec* pieces, int n, off64_t at), (fd, pieces, n, at),
      (fd, &piece, 1, at))
READV(preadv2, (int fd, const struct iovec* pieces, int n, off_t at, int flags), (fd, pieces, n, at, flags),
      (fd, &piece, 1, at, flags))
READV(preadv64v2, (int fd, const struct iovec* pieces, int n, off64_t at, int flags),
      (fd, pieces, n, at, flags), (fd, &piece, 1, at, flags))

#define WRITE(name, parameters, arguments, place)                             \
  ssize_t name parameters {                                                   \
    int flip;                                                                 \
    const ssize_t length = distorted(fd, n, &flip);                           \
    if (length <= 0 && n != 0) return length;                                 \
    const size_t wanted = (size_t)length;                                     \
    n = wanted;                                                               \
    if (is_tracked(fd)) n = changing("write", fd, NULL, NULL, place, wanted); \
    const ssize_t got = REAL(name) arguments;                                 \
    after_change(wanted, n);                                                  \
    return got;                                                               \
  }
WRITE(write, (int fd, const void* data, size_t n), (fd, data, n), lseek(fd, 0, SEEK_CUR))
WRITE(pwrite, (int fd, const void* data, size_t n, off_t at), (fd, data, n, at), at)
WRITE(pwrite64, (int fd, const void* data, size_t n, off64_t at), (fd, data, n, at), at)

#define BY_DESCRIPTOR(name, parameters, arguments) \
  int name parameters {                            \
    FAILS(is_tracked(fd))                          \
    return REAL(name) arguments;                   \
  }
#define BY_DESCRIPTOR_CHANGE(what, name, parameters, arguments, place) \
  int name parameters {                                                \
    FAILS(is_tracked(fd))                                              \
    if (is_tracked(fd)) changing(what, fd, NULL, NULL, place, 0);      \
    return REAL(name) arguments;                                       \
  }
#define BY_PATH_CHANGE(name, parameters, arguments, target, gone)        \
  int name parameters {                                                  \
    FAILS(is_ours(path))                                                 \
    if (is_ours(path)) changing(#name, -1, path, target, kept(gone), 0); \
    return REAL(name) arguments;                                         \
  }
#define BY_PATH(name, parameters, arguments) \
  int name parameters {                      \
    FAILS(is_ours(path))                     \
    return REAL(name) arguments;             \
  }
#define AT_PATH(name, parameters, arguments)  \
  int name parameters {                       \
    char whole[4096];                         \
    FAILS(is_ours_at(directory, path, whole)) \
    return REAL(name) arguments;              \
  }
// Not done: whether bytes reach the drive is simulated (kills.py) or does not matter, and waiting for it took
// most of the time.
#define SYNC(name)                              \
  int name(int fd) {                            \
    if (!is_tracked(fd)) return REAL(name)(fd); \
    FAILS(1)                                    \
    changing("fsync", fd, NULL, NULL, 0, 0);    \
    return 0;                                   \
  }
SYNC(fsync)
SYNC(fdatasync)
BY_DESCRIPTOR_CHANGE("truncate", ftruncate, (int fd, off_t n), (fd, n), n)
BY_DESCRIPTOR_CHANGE("truncate", ftruncate64, (int fd, off64_t n), (fd, n), n)
BY_DESCRIPTOR(fstat, (int fd, struct stat* status), (fd, status))
BY_DESCRIPTOR(fstat64, (int fd, struct stat64* status), (fd, status))
BY_PATH(stat, (const char* path, struct stat* status), (path, status))
BY_PATH(stat64, (const char* path, struct stat64* status), (path, status))
BY_PATH(lstat, (const char* path, struct stat* status), (path, status))
BY_PATH(lstat64, (const char* path, struct stat64* status), (path, status))
AT_PATH(fstatat, (int directory, const char* path, struct stat* status, int flags),
        (directory, path, status, flags))
AT_PATH(fstatat64, (int directory, const char* path, struct stat64* status, int flags),
        (directory, path, status, flags))
BY_PATH_CHANGE(mkdir, (const char* path, mode_t mode), (path, mode), NULL, NULL)
BY_PATH_CHANGE(rmdir, (const char* path), (path), NULL, NULL)
BY_PATH_CHANGE(unlink, (const char* path), (path), NULL, path)
BY_PATH_CHANGE(rename, (const char* path, const char* to), (path, to), to, to)
// As shutil.rmtree removes, in folders that it has opened.
int unlinkat(int directory, const char* path, int flags) {
  char whole[4096];
  const int ours = is_ours_at(directory, path, whole), folder = (flags & AT_REMOVEDIR) != 0;
  FAILS(ours)
  if (ours) changing(folder ? "rmdir" : "unlink", -1, whole, NULL, folder ? -1 : kept(whole), 0);
  return REAL(unlinkat)(directory, path, flags);
}
BY_DESCRIPTOR(fstatvfs, (int fd, struct statvfs* status), (fd, status))
BY_DESCRIPTOR(fstatvfs64, (int fd, struct statvfs64* status), (fd, status))
BY_DESCRIPTOR(fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n))
BY_DESCRIPTOR(fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n))
DIR* opendir(const char* path) {
  if (is_ours(path) && hit() && kind == ERROR) {
    errno = number;
    return NULL;
  }
  return REAL(opendir)(path);
}
DIR* fdopendir(int fd) {
  if (is_tracked(fd) && hit() && kind == ERROR) {
    errno = number;
    return NULL;
  }
  return REAL(fdopendir)(fd);
}
int closedir(DIR* folder) {
  const int fd = dirfd(folder);
  if (fd >= 0 && fd < DESCRIPTORS) tracked[fd] = 0;
  return REAL(closedir)(folder);
}
// How shutil copies, from one file of ours to another: part of it, or an error. It asks for more than there
// is.
ssize_t sendfile64(int to, int fd, off64_t* at, size_t n) {
  struct stat64 status;
  if (!is_tracked(fd) && !is_tracked(to)) return REAL(sendfile64)(to, fd, at, n);
  if (REAL(fstat64)(fd, &status) == 0 && S_ISREG(status.st_mode)) {
    const off64_t left = status.st_size - (at == NULL ? lseek64(fd, 0, SEEK_CUR) : *at);
    if (left <= 0)
      n = 0;
    else if (n > (size_t)left)
      n = (size_t)left;
  }
  int flip;
  const ssize_t length = distorted(fd, n, &flip);
  if (length <= 0) return length;
  const size_t wanted = (size_t)length;
  n = is_tracked(to) ? changing("write", to, NULL, NULL, lseek(to, 0, SEEK_CUR), wanted) : wanted;
  const ssize_t got = REAL(sendfile64)(to, fd, at, n);
  after_change(wanted, n);
  return got;
}
BY_PATH(statvfs, (const char* path, struct statvfs* status), (path, status))
BY_PATH(statvfs64, (const char* path, struct statvfs64* status), (path, status))

// This one returns its error.
int posix_fallocate64(int fd, off64_t at, off64_t n) {
  if (is_tracked(fd) && hit() && kind == ERROR) return number;
  return REAL(posix_fallocate64)(fd, at, n);
}
int posix_fallocate(int fd, off_t at, off_t n) {
  if (is_tracked(fd) && hit() && kind == ERROR) return number;
  return REAL(posix_fallocate)(fd, at, n);
}
