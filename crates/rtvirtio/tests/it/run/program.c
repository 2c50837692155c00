/* An unmodified synchronous program, for the tests of `rtvirtio-run`: what it finds must be the same with and
 * without. `program WHAT DIRECTORY [SEED]`; exits with 0 if all was as it should be. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 256

static const char *directory;

#define EXPECT(what)                                                                               \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno);                   \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static char *path(const char *name)
{
    static _Thread_local char text[4096];
    snprintf(text, sizeof text, "%s/%s", directory, name);
    return text;
}

/* Page n of the file holds n in each word, and so does a right read of it. */
static void make_pages(void)
{
    int fd = open(path("pages"), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    EXPECT(fd >= 0);
    for (uint64_t page = 0; page < PAGES; page++) {
        uint64_t words[PAGE / 8];
        for (size_t i = 0; i < PAGE / 8; i++) words[i] = page;
        EXPECT(write(fd, words, PAGE) == PAGE);
    }
    EXPECT(fsync(fd) == 0 && close(fd) == 0);
}

static int open_pages(int flags)
{
    int fd = open(path("pages"), flags | O_DIRECT);
    EXPECT(fd >= 0);
    return fd;
}

static void *page_buffer(void)
{
    void *buffer = NULL;
    EXPECT(posix_memalign(&buffer, PAGE, 4 * PAGE) == 0);
    return buffer;
}

static void read_page(int fd, uint64_t page, uint64_t *buffer)
{
    memset(buffer, 0xff, PAGE);
    EXPECT(pread(fd, buffer, PAGE, (off_t)page * PAGE) == PAGE);
    for (size_t i = 0; i < PAGE / 8; i++) EXPECT(buffer[i] == page);
}

/* --- The same calls, the same results: each is written to the log. --- */

static uint64_t random_state;

static uint64_t random_below(uint64_t bound)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) % bound;
}

#define SLOTS 8
static int slots[SLOTS];
static int logged;
static char *memory; /* 16 pages, and one behind that cannot be touched */
static const size_t memory_pages = 16;

static void say(int step, const char *what, int fd, long result, int error)
{
    long position = lseek(fd, 0, SEEK_CUR);
    /* What a call that fails leaves in memory is not the same twice, with plain calls either. */
    if (result < 0) memset(memory, step, memory_pages * PAGE);
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < memory_pages * PAGE; i += 64) sum = (sum ^ (unsigned char)memory[i]) * 1099511628211u;
    dprintf(logged, "%d %s fd %d: %ld errno %d position %ld memory %016lx\n", step, what, fd, result,
            result < 0 ? error : 0, position, (unsigned long)sum);
}

static const int open_flags[] = {
    O_RDWR | O_DIRECT, O_RDWR | O_DIRECT, O_RDWR | O_DIRECT, O_RDONLY | O_DIRECT, O_WRONLY | O_DIRECT,
    O_RDWR, O_RDWR | O_DIRECT | O_APPEND, O_RDWR | O_DIRECT | O_DSYNC, O_RDWR | O_APPEND,
};

/* Lengths and offsets: mostly whole pages, sometimes sectors, sometimes what direct I/O does not take. */
static size_t some_bytes(void)
{
    switch (random_below(12)) {
    case 0: return 0;
    case 1: return 512 * (1 + random_below(8));
    case 2: return 1 + random_below(3 * PAGE);
    default: return PAGE * (1 + random_below(4));
    }
}

/* A direct write whose length is not of whole sectors fails, and what of it lies in other extents than its end may
   be on the disk by then: how much, no result says. So writes are of whole sectors, or of less than one. */
static size_t written(size_t bytes)
{
    return bytes % 512 ? bytes % 512 : bytes;
}

static size_t sectors(size_t bytes)
{
    return bytes & ~(size_t)511;
}

static off_t some_offset(void)
{
    switch (random_below(16)) {
    case 0: return -1;
    case 1: return (off_t)random_below(64 * PAGE);
    case 2: return (off_t)1 << 45;
    default: return (off_t)(PAGE * random_below(64));
    }
}

/* Where in a page some memory begins. */
static size_t in_page(const char *at)
{
    return (size_t)(at - memory) % PAGE;
}

static char *some_memory(void)
{
    switch (random_below(24)) {
    case 0: return NULL;
    case 1: return memory + (memory_pages - 1) * PAGE; /* reaches into what cannot be touched */
    case 2: return memory + 1 + random_below(PAGE - 1);
    default: return memory + PAGE * random_below(6);
    }
}

static void random_calls(int first, int count, int may_fork)
{
    for (int step = first; step < first + count; step++) {
        int slot = (int)random_below(SLOTS);
        int fd = slots[slot];
        size_t bytes = some_bytes();
        off_t offset = some_offset();
        char *at = some_memory();
        /* Linux 6.18, for one, asks a device for direct I/O of misaligned memory piece by piece: a piece in one page
           is transferred, a piece of several is refused, and where pieces end follows from the file's extents and
           from which pages of memory happen to be neighbours. So such memory is of one page and of one segment. */
        int misaligned = at && in_page(at);
        if (misaligned) bytes %= PAGE - in_page(at);
        /* Apart from each other: which of two that overlap a device fills first is its own business. */
        /* How much of a source that cannot be read in full has been written is not said by any result. */
        char *from = at == memory + (memory_pages - 1) * PAGE ? NULL : at;
        struct iovec two[2] = {{at, sectors(bytes)}, {memory + PAGE * (10 + random_below(2)), sectors(some_bytes())}};
        if (misaligned) two[1].iov_len = 0;
        const struct iovec *vectors = random_below(20) == 0 ? (void *)8 : two;
        if (at >= memory && at + bytes <= memory + memory_pages * PAGE) memset(at, step, bytes);
        long result = 0;
        const char *what = "";
        errno = 0;
        switch (random_below(may_fork ? 24 : 21)) {
        case 0:
        case 1: {
            char name[8] = {'f', (char)('0' + random_below(3)), 0};
            int flags = open_flags[random_below(sizeof open_flags / sizeof *open_flags)];
            what = "open";
            if (fd >= 0) close(fd);
            result = slots[slot] = fd = open(path(name), flags | O_CREAT | O_CLOEXEC, 0600);
            break;
        }
        case 2:
            what = "close";
            if (random_below(4)) break;
            result = close(fd);
            slots[slot] = -1;
            break;
        case 3: what = "read"; result = read(fd, at, bytes); break;
        case 4: what = "write"; result = write(fd, from, written(bytes)); break;
        case 5:
        case 6:
        case 7: what = "pread"; result = pread(fd, at, bytes, offset); break;
        case 8:
        case 9:
        case 10: what = "pwrite"; result = pwrite(fd, from, written(bytes), offset < 0 ? offset : offset % (96 * PAGE)); break;
        case 11: what = "preadv"; result = preadv(fd, vectors, (int)random_below(4) - 1, offset); break;
        case 12: what = "pwritev"; two[0].iov_base = from; result = pwritev(fd, vectors, 2, offset < 0 ? offset : offset % (96 * PAGE)); break;
        case 13: what = "preadv2"; result = preadv2(fd, two, 1, offset, (int)random_below(2)); break;
        case 14: what = "pwritev2"; two[0].iov_base = from; result = pwritev2(fd, two, 1, offset % (96 * PAGE), random_below(2) ? RWF_DSYNC : 0); break;
        case 15: what = "readv"; result = readv(fd, two, 2); break;
        case 16: what = "lseek"; result = lseek(fd, offset, SEEK_SET); break;
        case 17: what = "ftruncate"; result = ftruncate(fd, offset < 0 ? offset : 48 * PAGE + offset % (48 * PAGE)); break;
        case 18:
            what = "dup";
            if (slots[(slot + 1) % SLOTS] >= 0) close(slots[(slot + 1) % SLOTS]);
            result = slots[(slot + 1) % SLOTS] = dup(fd);
            break;
        case 19:
            what = "dup2";
            result = fd < 0 || slots[(slot + 3) % SLOTS] < 0 ? 0 : dup2(fd, slots[(slot + 3) % SLOTS]);
            break;
        case 20: {
            int flags = fcntl(fd, F_GETFL);
            what = "fcntl";
            result = flags < 0 ? flags : fcntl(fd, F_SETFL, flags ^ (random_below(3) ? O_DIRECT : O_APPEND));
            break;
        }
        case 21: what = "fdatasync"; result = fdatasync(fd); break;
        case 22: {
            char *arguments[] = {"true", NULL};
            pid_t child = 0;
            int status = 0;
            what = "spawn";
            result = posix_spawnp(&child, "true", NULL, NULL, arguments, environ);
            EXPECT(waitpid(child, &status, 0) == child && status == 0);
            break;
        }
        default: {
            pid_t child = fork();
            int status = 0;
            what = "fork";
            EXPECT(child >= 0);
            if (child == 0) {
                random_calls(step * 1000, 12, 0);
                _exit(0);
            }
            EXPECT(waitpid(child, &status, 0) == child && status == 0);
            break;
        }
        }
        /* A length that direct I/O does not take, from memory that cannot be reached: which of both the
           kernel finds first is not the same twice. */
        int out_of_reach = !at || from != at || vectors != two;
        say(step, what, fd, result, out_of_reach && errno == EFAULT ? EINVAL : errno);
    }
}

static void differential(uint64_t seed)
{
    random_state = seed * 2654435761u + 1;
    logged = open(path("log"), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0600);
    EXPECT(logged >= 0);
    memory = mmap(NULL, (memory_pages + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED && mprotect(memory + memory_pages * PAGE, PAGE, PROT_NONE) == 0);
    for (int i = 0; i < SLOTS; i++) {
        char name[8] = {'f', (char)('0' + i % 3), 0};
        slots[i] = open(path(name), open_flags[i] | O_CREAT | O_CLOEXEC, 0600);
        EXPECT(slots[i] >= 0);
    }
    memset(memory, 'm', memory_pages * PAGE);
    for (int i = 0; i < 96 * 3; i++) EXPECT(pwrite(slots[i % 3], memory, PAGE, (off_t)PAGE * (i / 3)) == PAGE);
    random_calls(0, 1500, 1);
}

/* --- Threads, forks and execs at once. --- */

static volatile int finished;

static void *reads(void *argument)
{
    int fd = *(int *)argument;
    uint64_t *buffer = page_buffer();
    for (uint64_t i = 0; !finished; i++) read_page(fd, (i * 7) % PAGES, buffer);
    free(buffer);
    return NULL;
}

static void *forks(void *argument)
{
    int fd = *(int *)argument;
    for (int i = 0; i < 40; i++) {
        int status = 0;
        pid_t child = fork();
        EXPECT(child >= 0);
        if (child == 0) {
            uint64_t *buffer = page_buffer();
            for (uint64_t page = 0; page < 20; page++) read_page(fd, page, buffer);
            /* A child of the child. */
            pid_t second = fork();
            if (second == 0) {
                read_page(fd, 3, buffer);
                _exit(0);
            }
            EXPECT(waitpid(second, &status, 0) == second);
            _exit(status);
        }
        EXPECT(waitpid(child, &status, 0) == child && status == 0);
        pid_t borrowed = vfork();
        if (borrowed == 0) {
            execl("/bin/true", "true", (char *)NULL);
            _exit(9);
        }
        EXPECT(waitpid(borrowed, &status, 0) == borrowed && status == 0);
    }
    return NULL;
}

static void threads(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    pthread_t readers[4], forker;
    for (int round = 0; round < 3; round++) {
        finished = 0;
        for (int i = 0; i < 4; i++) EXPECT(pthread_create(&readers[i], NULL, reads, &fd) == 0);
        EXPECT(pthread_create(&forker, NULL, forks, &fd) == 0);
        EXPECT(pthread_join(forker, NULL) == 0);
        finished = 1;
        for (int i = 0; i < 4; i++) EXPECT(pthread_join(readers[i], NULL) == 0);
    }
}

static void *executes(void *argument)
{
    (void)argument;
    struct timespec while_ = {0, 50000000};
    nanosleep(&while_, NULL);
    execl("/bin/sh", "sh", "-c", "exit 7", (char *)NULL);
    return NULL;
}

/* Ends with 7: another thread's program takes this one's place while all read. */
static void exec_from_a_thread(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    pthread_t readers[3], other;
    for (int i = 0; i < 3; i++) EXPECT(pthread_create(&readers[i], NULL, reads, &fd) == 0);
    EXPECT(pthread_create(&other, NULL, executes, NULL) == 0);
    reads(&fd);
}

/* --- Signals. --- */

static int signal_fd;
static uint64_t *signal_buffer;
static sigjmp_buf back;
static volatile sig_atomic_t ticks, jumps, may_jump;

/* Reads as well, and now and then does not return. */
static void on_tick(int signal)
{
    (void)signal;
    int error = errno;
    ticks++;
    read_page(signal_fd, (uint64_t)ticks % PAGES, signal_buffer);
    errno = error;
    if (may_jump && ticks % 5 == 0) {
        jumps++;
        siglongjmp(back, 1);
    }
}

static void signals(void)
{
    make_pages();
    signal_fd = open_pages(O_RDONLY);
    signal_buffer = page_buffer();
    int fd = open_pages(O_RDONLY);
    struct sigaction action = {.sa_handler = on_tick};
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    EXPECT(sigaction(SIGALRM, &action, NULL) == 0);
    for (volatile int round = 0; round < 400; round++) {
        /* On the stack: what a handler jumps away from must not be written to any more. */
        _Alignas(PAGE) uint64_t buffer[PAGE / 8];
        if (sigsetjmp(back, 1) == 0) {
            may_jump = 1;
            EXPECT(setitimer(ITIMER_REAL, &often, NULL) == 0);
            for (uint64_t page = 0; page < 40; page++) read_page(fd, page, buffer);
            may_jump = 0;
        }
        may_jump = 0;
        EXPECT(setitimer(ITIMER_REAL, &never, NULL) == 0);
        volatile uint64_t guard[PAGE / 8];
        for (size_t i = 0; i < PAGE / 8; i++) guard[i] = 0x5a5a;
        for (size_t i = 0; i < PAGE / 8; i++) EXPECT(guard[i] == 0x5a5a);
    }
    printf("%d ticks, %d jumps\n", (int)ticks, (int)jumps);
    EXPECT(ticks > 100 && jumps > 10);
}

/* --- Handlers that fork. --- */

#define FORKS 300
static pid_t children[FORKS];
static volatile sig_atomic_t forked, is_child;

/* The child returns from here, into whatever call was interrupted. */
static void forks_on_tick(int signal)
{
    (void)signal;
    int error = errno;
    if (!is_child && forked < FORKS) {
        pid_t child = fork();
        if (child == 0) is_child = 1;
        else if (child > 0) children[forked++] = child;
    }
    errno = error;
}

static void forking_handlers(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    uint64_t *buffer = page_buffer();
    struct sigaction action = {.sa_handler = forks_on_tick};
    struct itimerval often = {{0, 400}, {0, 400}}, never = {{0, 0}, {0, 0}};
    EXPECT(sigaction(SIGALRM, &action, NULL) == 0);
    EXPECT(setitimer(ITIMER_REAL, &often, NULL) == 0);
    uint64_t page = 0;
    while (forked < FORKS && !is_child) read_page(fd, page++ % PAGES, buffer);
    if (is_child) {
        /* And its own calls are right. */
        for (int i = 0; i < 5; i++) read_page(fd, page++ % PAGES, buffer);
        _exit(0);
    }
    EXPECT(setitimer(ITIMER_REAL, &never, NULL) == 0);
    int died = 0;
    for (int i = 0; i < FORKS; i++) {
        int status;
        EXPECT(waitpid(children[i], &status, 0) == children[i]);
        died += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    printf("%d of %d children died\n", died, FORKS);
    EXPECT(died == 0);
}

/* --- Descriptors. --- */

static void descriptors(void)
{
    make_pages();
    uint64_t *buffer = page_buffer();
    int complaints = fcntl(2, F_DUPFD, 200);
    for (int round = 0; round < 20; round++) {
        /* All of them, the library's too; then the lowest number is the lowest. */
        EXPECT(close_range(0, 199, 0) == 0 && close_range(201, ~0u, 0) == 0);
        int fd = open_pages(O_RDONLY);
        if (fd != 0) dprintf(complaints, "descriptor %d instead of 0\n", fd);
        EXPECT(fd == 0);
        for (uint64_t page = 0; page < 30; page++) read_page(fd, page, buffer);
        /* Closed and reused where no library sees it. */
        EXPECT(syscall(SYS_close, fd) == 0);
        int ends[2];
        EXPECT(syscall(SYS_pipe2, ends, O_DIRECT) == 0 && ends[0] == 0);
        EXPECT(write(ends[1], "in the pipe", 11) == 11);
        EXPECT(pread(ends[0], buffer, PAGE, 0) == -1 && errno == ESPIPE);
        EXPECT(read(ends[0], buffer, PAGE) == 11 && memcmp(buffer, "in the pipe", 11) == 0);
        EXPECT(close(ends[0]) == 0 && close(ends[1]) == 0);
        EXPECT(pread(0, buffer, PAGE, 0) == -1 && errno == EBADF);
    }
    dup2(complaints, 2);
}

/* --- Cancellation. --- */

static void *reads_for_ever(void *argument)
{
    int fd = *(int *)argument;
    void *buffer = page_buffer();
    pthread_cleanup_push(free, buffer);
    for (uint64_t i = 0;; i++) read_page(fd, i % PAGES, buffer);
    pthread_cleanup_pop(1);
    return NULL;
}

static void cancellation(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        void *result = NULL;
        struct timespec while_ = {0, (i % 20) * 50000};
        EXPECT(pthread_create(&thread, NULL, reads_for_ever, &fd) == 0);
        nanosleep(&while_, NULL);
        EXPECT(pthread_cancel(thread) == 0);
        EXPECT(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    }
}

/* --- Limits and sandboxes. --- */

static volatile sig_atomic_t too_large;

static void on_too_large(int signal)
{
    (void)signal;
    too_large++;
}

static void file_size_limit(void)
{
    make_pages();
    int fd = open_pages(O_RDWR);
    char *buffer = page_buffer();
    memset(buffer, 0, 4 * PAGE);
    struct rlimit limit = {8 * PAGE, 8 * PAGE};
    EXPECT(signal(SIGXFSZ, on_too_large) != SIG_ERR && setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (int i = 1; i <= 50; i++) {
        EXPECT(pwrite(fd, buffer, PAGE, 4 * PAGE) == PAGE);
        EXPECT(pwrite(fd, buffer, PAGE, 8 * PAGE) == -1 && errno == EFBIG);
        EXPECT(too_large == i);
        EXPECT(pwrite(fd, buffer, 4 * PAGE, 6 * PAGE) == 2 * PAGE);
    }
}

/* io_uring ends the program. */
static void sandbox(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    uint64_t *buffer = page_buffer();
    for (uint64_t page = 0; page < 30; page++) read_page(fd, page, buffer);
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_enter, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    EXPECT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    for (uint64_t page = 0; page < 30; page++) read_page(fd, page, buffer);
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        for (uint64_t page = 0; page < 30; page++) read_page(fd, page, buffer);
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

/* A file of its own where standard error was. */
static void own_file_as_stderr(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    uint64_t *buffer = page_buffer();
    EXPECT(close(2) == 0 && open(path("second"), O_CREAT | O_RDWR, 0600) == 2);
    for (uint64_t page = 0; page < 30; page++) read_page(fd, page, buffer);
}

/* Until it is killed. */
static void for_ever(void)
{
    make_pages();
    int fd = open_pages(O_RDONLY);
    /* A shell's background jobs ignore it, and so does what they start. */
    EXPECT(signal(SIGINT, SIG_DFL) != SIG_ERR);
    printf("reading\n");
    fflush(stdout);
    reads(&fd);
}

int main(int count, char **arguments)
{
    if (count < 3) return 2;
    const char *what = arguments[1];
    directory = arguments[2];
    if (!strcmp(what, "differential")) differential(strtoull(arguments[3], NULL, 10));
    else if (!strcmp(what, "threads")) threads();
    else if (!strcmp(what, "exec")) exec_from_a_thread();
    else if (!strcmp(what, "signals")) signals();
    else if (!strcmp(what, "forking-handlers")) forking_handlers();
    else if (!strcmp(what, "descriptors")) descriptors();
    else if (!strcmp(what, "cancellation")) cancellation();
    else if (!strcmp(what, "limit")) file_size_limit();
    else if (!strcmp(what, "sandbox")) sandbox();
    else if (!strcmp(what, "stderr")) own_file_as_stderr();
    else if (!strcmp(what, "for-ever")) for_ever();
    else return 2;
    return 0;
}
