/*
 * limits.c - measures how fast this machine copies, writes and reads a number of bytes.
 *
 *      bench-limits BYTES BLOCKS THREADS SHARED-DIR STORAGE-DIR
 *      bench-limits read FILE SHARED-DIR
 *      bench-limits write FILE BYTES
 *
 * The first form makes its own file. `read` reads an existing file, because the speed of a disk depends on the place of the file.
 * `write` does not measure by itself: for each line of its input it writes BYTES, by one O_DIRECT call from huge pages, into a file that
 * has the space, syncs the file, and prints the seconds. It also does so once when it is ready. The first two forms print one JSON object
 * of seconds. Each value is measured once, unless the list says otherwise:
 *
 *      copy       a streaming copy of BLOCKS blocks in private memory into a file in SHARED-DIR whose pages exist: the median of five
 *      copy_cpu, sum_cpu  the CPU time of all threads for that copy, and of one for the checksums of as many bytes
 *      write_N    O_DIRECT writes from those pages, N at a time, into a new file in STORAGE-DIR, and fsync
 *      read_N     O_DIRECT reads, N at a time, into memory whose pages exist
 *      read_huge  8 at a time, each into the same 4 MiB of huge pages (where the machine has them) again and again
 *      buffered   reads through the page cache, from front to back, with read-ahead
 *      new_N, new_huge, new_buffered  the same reads into new memory, as in a load; new_huge copies from the huge pages into it
 *
 * No engine can be faster: the program does one thing at a time, makes no second copy and no final name. It makes its own system calls,
 * so that it does not depend on the engine's code.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sum/sum.h"

#define DIRECT_ALIGN 4096u
#define REQUEST_BYTES (4u << 20)
#define HUGE_DEPTH 8u
#define HUGE_PAGE_BYTES (2u << 20)
#define THREADS_MAX 64u
#define COPIES 5u

enum work_kind { WORK_COPY, WORK_WRITE, WORK_READ };

struct work {
        enum work_kind kind;
        char *memory;
        char **blocks; /* WORK_COPY: where the bytes come from */
        size_t size, block_bytes;
        size_t memory_bytes; /* of reads: less than size where they use the same memory again */
        char *copy_to; /* of reads: where each piece then goes, or NULL */
        unsigned index, threads; /* this thread's turn among so many */
        int fd;
};

static void die(const char *what)
{
        fprintf(stderr, "bench-limits: %s: %s\n", what, strerror(errno));
        exit(1);
}

static double now(void)
{
        struct timespec time;

        clock_gettime(CLOCK_MONOTONIC, &time);
        return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static double cpu(void)
{
        struct timespec time;

        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
        return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void transfer(const struct work *work, size_t offset, size_t size)
{
        size_t done = 0;

        while (done < size) {
                char *at = work->memory + offset % work->memory_bytes + done;
                ssize_t moved = work->kind == WORK_WRITE ? pwrite(work->fd, at, size - done, (off_t)(offset + done))
                                                         : pread(work->fd, at, size - done, (off_t)(offset + done));

                if (moved <= 0)
                        die(work->kind == WORK_WRITE ? "write" : "read");
                done += (size_t)moved;
        }
        if (work->copy_to)
                memcpy(work->copy_to + offset, work->memory + offset % work->memory_bytes, size);
}

static void *work_run(void *argument)
{
        const struct work *work = argument;
        size_t piece = work->kind == WORK_COPY ? work->block_bytes / work->threads : REQUEST_BYTES;
        size_t offset;

        if (work->kind == WORK_COPY) {
                /* Every thread copies its share of every block, like a capture of a few large tensors. */
                for (size_t i = 0; i * work->block_bytes < work->size; i++) {
                        size_t from = work->index * piece;
                        size_t size = work->index + 1 == work->threads ? work->block_bytes - from : piece;

                        sum_copy_stream(work->memory + i * work->block_bytes + from, work->blocks[i] + from, size);
                }
                return NULL;
        }
        for (offset = work->index * piece; offset < work->size; offset += (size_t)work->threads * piece) {
                size_t left = work->size - offset;

                transfer(work, offset, left < piece ? left : piece);
        }
        return NULL;
}

static double timed(const struct work *model, unsigned threads, int sync_fd)
{
        struct work works[THREADS_MAX];
        pthread_t ids[THREADS_MAX];
        double begun = now();

        for (unsigned i = 0; i < threads; i++) {
                works[i] = *model;
                works[i].index = i;
                works[i].threads = threads;
                if (i > 0 && pthread_create(&ids[i], NULL, work_run, &works[i]))
                        die("thread");
        }
        work_run(&works[0]);
        for (unsigned i = 1; i < threads; i++)
                pthread_join(ids[i], NULL);
        if (sync_fd >= 0 && fsync(sync_fd))
                die("fsync");
        return now() - begun;
}

static double sum_seconds(const struct work *work)
{
        double begun = cpu();
        uint32_t crc32 = 0;
        uint64_t crc64 = 0;

        for (size_t offset = 0; offset < work->size; offset += REQUEST_BYTES)
                sum_both(work->memory + offset, work->size - offset < REQUEST_BYTES ? work->size - offset : REQUEST_BYTES,
                         &crc32, &crc64);
        return cpu() - begun;
}

static int compare(const void *a, const void *b)
{
        double left = *(const double *)a, right = *(const double *)b;

        return left < right ? -1 : left > right;
}

/* One pass takes a tenth of a second, and a shared machine may be much faster or slower than usual for that time: hence the median. */
static void print_copy(struct work *work, unsigned threads)
{
        double seconds[COPIES], cpus[COPIES];

        timed(work, threads, -1); /* page tables */
        for (size_t i = 0; i < COPIES; i++) {
                double begun = cpu();

                seconds[i] = timed(work, threads, -1);
                cpus[i] = cpu() - begun;
        }
        qsort(seconds, COPIES, sizeof(*seconds), compare);
        qsort(cpus, COPIES, sizeof(*cpus), compare);
        printf("{\"copy\": %.6f, \"copy_cpu\": %.6f", seconds[COPIES / 2], cpus[COPIES / 2]);
}

static char *shared_pages(const char *directory, size_t size)
{
        char path[4096];
        char *memory;
        int fd;

        snprintf(path, sizeof(path), "%s/limits", directory);
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0 || unlink(path) || ftruncate(fd, (off_t)size))
                die(path);
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (memory == MAP_FAILED)
                die("mmap");
        close(fd);
        return memory;
}

static char **private_blocks(size_t count, size_t size)
{
        char **blocks = calloc(count, sizeof(*blocks));

        if (!blocks)
                die("memory");
        for (size_t i = 0; i < count; i++) {
                blocks[i] = malloc(size);
                if (!blocks[i])
                        die("memory");
                /* Makes bytes that no storage can compress or leave out. */
                for (size_t j = 0; j + 8 <= size; j += 8) {
                        uint64_t value = (i * size + j + 1) * UINT64_C(0x9E3779B97F4A7C15);

                        value ^= value >> 29;
                        memcpy(blocks[i] + j, &value, 8);
                }
        }
        return blocks;
}

static double write_once(struct work *work, const char *path, unsigned depth)
{
        double seconds;

        if (unlink(path) && errno != ENOENT)
                die(path);
        work->kind = WORK_WRITE;
        work->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
        if (work->fd < 0)
                die(path);
        /* Reserves the space in one piece if the file system can. That is part of the time of a write. */
        double begun = now();
        (void)!posix_fallocate(work->fd, 0, (off_t)work->size);
        seconds = now() - begun + timed(work, depth, work->fd);
        if (close(work->fd))
                die("close");
        return seconds;
}

/* Returns memory that is aligned to huge pages. Its pages exist. */
static char *huge_pages(size_t size)
{
        char *memory = mmap(NULL, size + HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (memory == MAP_FAILED)
                die("mmap");
        memory += -(uintptr_t)memory % HUGE_PAGE_BYTES;
        madvise(memory, size, MADV_HUGEPAGE);
        memset(memory, 1, size);
        return memory;
}

static double read_once(struct work *work, const char *path, unsigned depth)
{
        double seconds;

        work->kind = WORK_READ;
        work->fd = open(path, O_RDONLY | O_CLOEXEC | (depth ? O_DIRECT : 0));
        if (work->fd < 0)
                die(path);
        if (depth) {
                seconds = timed(work, depth, -1);
        } else {
                posix_fadvise(work->fd, 0, 0, POSIX_FADV_DONTNEED);
                posix_fadvise(work->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
                seconds = timed(work, 1, -1);
        }
        close(work->fd);
        return seconds;
}

static void *new_memory(size_t size)
{
        void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (memory == MAP_FAILED)
                die("mmap");
        return memory;
}

/* Reads into memory that has no pages yet. */
static double read_into_new(const struct work *model, const char *path, unsigned depth)
{
        struct work work = *model;
        double seconds;

        work.memory = new_memory(work.size);
        work.memory_bytes = work.size;
        seconds = read_once(&work, path, depth);
        munmap(work.memory, work.size);
        return seconds;
}

/* Reads into work->memory and copies from there into new memory. */
static double read_through(const struct work *model, const char *path, unsigned depth)
{
        struct work work = *model;
        double seconds;

        work.copy_to = new_memory(work.size);
        seconds = read_once(&work, path, depth);
        munmap(work.copy_to, work.size);
        return seconds;
}

static const unsigned depths[] = {1, 4, 8};

/* work->memory: as many bytes as the file has. Their pages exist. */
static void print_reads(struct work *work, const char *path)
{
        for (size_t i = 0; i < sizeof(depths) / sizeof(depths[0]); i++) {
                printf("\"read_%u\": %.6f, ", depths[i], read_once(work, path, depths[i]));
                printf("\"new_%u\": %.6f, ", depths[i], read_into_new(work, path, depths[i]));
        }
        printf("\"buffered\": %.6f, ", read_once(work, path, 0));
        printf("\"new_buffered\": %.6f, ", read_into_new(work, path, 0));
        work->memory_bytes = HUGE_DEPTH * REQUEST_BYTES;
        work->memory = huge_pages(work->memory_bytes);
        printf("\"read_huge\": %.6f, ", read_once(work, path, HUGE_DEPTH));
        printf("\"new_huge\": %.6f}\n", read_through(work, path, HUGE_DEPTH));
}

/* Reads the file without the bytes after its last whole page. */
static void read_file(const char *path, const char *shared)
{
        struct work work = {0};
        struct stat stat_of;

        if (stat(path, &stat_of))
                die(path);
        work.size = (size_t)stat_of.st_size / DIRECT_ALIGN * DIRECT_ALIGN;
        work.memory = shared_pages(shared, work.size);
        work.memory_bytes = work.size;
        printf("{");
        print_reads(&work, path);
}

/* Writes once for each line of the input, until it ends. */
static void write_when_asked(const char *path, size_t size)
{
        struct work work = { .kind = WORK_WRITE, .size = size / DIRECT_ALIGN * DIRECT_ALIGN };

        work.memory = huge_pages(work.size);
        work.memory_bytes = work.size;
        work.fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
        if (work.fd < 0 || posix_fallocate(work.fd, 0, (off_t)work.size))
                die(path);
        do {
                double begun = now();

                transfer(&work, 0, work.size);
                if (fsync(work.fd))
                        die("fsync");
                printf("%.6f\n", now() - begun);
                fflush(stdout);
        } while (getchar() != EOF);
        close(work.fd);
}

int main(int argc, char **argv)
{
        struct work work = {0};
        size_t count;
        unsigned threads;
        char path[4096];

        if (argc == 4 && !strcmp(argv[1], "read")) {
                read_file(argv[2], argv[3]);
                return 0;
        }
        if (argc == 4 && !strcmp(argv[1], "write")) {
                write_when_asked(argv[2], strtoul(argv[3], NULL, 10));
                return 0;
        }
        if (argc != 6) {
                fprintf(stderr, "usage: bench-limits BYTES BLOCKS THREADS SHARED-DIR STORAGE-DIR\n"
                                "       bench-limits read FILE SHARED-DIR\n"
                                "       bench-limits write FILE BYTES\n");
                return 2;
        }
        count = strtoul(argv[2], NULL, 10);
        threads = (unsigned)strtoul(argv[3], NULL, 10);
        if (!count || !threads || threads > THREADS_MAX || strtoul(argv[1], NULL, 10) < count) {
                fprintf(stderr, "bench-limits: counts are out of range\n");
                return 2;
        }
        work.block_bytes = strtoul(argv[1], NULL, 10) / count;
        /* O_DIRECT moves whole blocks, so the size is rounded up to them. */
        work.size = (work.block_bytes * count + DIRECT_ALIGN - 1) / DIRECT_ALIGN * DIRECT_ALIGN;
        work.memory = shared_pages(argv[4], work.size);
        work.memory_bytes = work.size;
        work.blocks = private_blocks(count, work.block_bytes);

        size_t padded = work.size;
        work.size = work.block_bytes * count;
        work.kind = WORK_COPY;
        print_copy(&work, threads);
        printf(", \"sum_cpu\": %.6f", sum_seconds(&work));
        work.size = padded;

        snprintf(path, sizeof(path), "%s/limits.bin", argv[5]);
        for (size_t i = 0; i < sizeof(depths) / sizeof(depths[0]); i++)
                printf(", \"write_%u\": %.6f", depths[i], write_once(&work, path, depths[i]));
        printf(", ");
        print_reads(&work, path);
        unlink(path);
        return 0;
}
