/* The copy: a few threads share the bytes in pieces. Between captures the threads are parked. */
#include <pthread.h>
#include <stdint.h>

#include "capture/capture.h"
#include "os/lock.h"
#include "os/os.h"
#include "os/thread.h"
#include "sum/sum.h"

/* A few threads use the whole memory bandwidth; more would only disturb the trainer. */
#define THREAD_COUNT_MAX 4u
/* Long enough that handing out pieces costs nothing; short enough that all threads end together. */
#define PIECE_BYTES (4u << 20)
#define PIECE_PART_COUNT 512u
#define PAGE_BYTES 4096u

struct piece {
        size_t first_part;
        uint64_t first_offset;
        size_t part_count;
        uint64_t size;
};

static struct lock turn_lock = LOCK_INIT(LOCK_TURN); /* held for the length of one capture */
static struct lock crew_lock = LOCK_INIT(LOCK_CREW); /* guards `crew`, the cursor of its job, and lists of sums */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static struct {
        pthread_cond_t called, finished;
        pthread_t helpers[THREAD_COUNT_MAX - 1];
        uint32_t helper_count, busy_count;
        uint64_t round; /* a new number for each job */
        struct capture_job *job;
        bool is_ending;
} crew = { .called = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER };

/* A forked child has none of the threads, and may find the locks in any state. */
static void forget_in_child(void)
{
        lock_init(&turn_lock, LOCK_TURN);
        lock_init(&crew_lock, LOCK_CREW);
        pthread_cond_init(&crew.called, NULL);
        pthread_cond_init(&crew.finished, NULL);
        crew.helper_count = crew.busy_count = 0;
        crew.job = NULL;
        crew.is_ending = false;
}

static void watch_forks(void)
{
        pthread_atfork(NULL, NULL, forget_in_child);
}

/* A piece is many small parts or a slice of a large one. The caller holds crew_lock. */
static bool take_piece(struct capture_job *job, struct piece *piece)
{
        *piece = (struct piece){ .first_part = job->next_part, .first_offset = job->next_offset };
        while (job->next_part < job->count && piece->size < PIECE_BYTES && piece->part_count < PIECE_PART_COUNT) {
                uint64_t left = job->parts[job->next_part].size - job->next_offset;
                uint64_t room = PIECE_BYTES - piece->size;

                piece->part_count++;
                if (left > room) {
                        piece->size += room;
                        job->next_offset += room;
                } else {
                        piece->size += left;
                        job->next_part++;
                        job->next_offset = 0;
                }
        }
        return piece->part_count > 0;
}

/* How many bytes of part `index` belong to the piece. */
static uint64_t slice(const struct piece *piece, const struct capture_part *part, size_t index, uint64_t left)
{
        uint64_t size = part->size - (index == 0 ? piece->first_offset : 0);

        return size < left ? size : left;
}

/*
 * Makes the pages of a piece in one call: page faults in the middle of the copy cost a third more. Parts of a piece
 * usually lie side by side, so they are one range. If they do not, or the kernel refuses, the copy takes page faults.
 */
static void populate(struct capture_job *job, const struct piece *piece)
{
        const struct capture_part *first = job->parts + piece->first_part;
        const struct capture_part *last = first + piece->part_count - 1;
        uintptr_t begin = (uintptr_t)job->image + first->image_offset + piece->first_offset;
        uintptr_t end = piece->part_count == 1 ? begin + piece->size : (uintptr_t)job->image + last->image_offset +
                        (last->size < PIECE_BYTES ? last->size : PIECE_BYTES);

        if (end <= begin || end - begin > 2 * PIECE_BYTES)
                return;
        begin &= ~(uintptr_t)(PAGE_BYTES - 1);
        end = (end + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1);
        if (os->advise((void *)begin, end - begin, OS_ADVISE_POPULATE_WRITE) < 0)
                atomic_store(&job->lacks_pages, true);
}

static void copy_and_sum(const struct capture_job *job, uint64_t image_offset, const void *from, uint64_t size)
{
        struct image_sum sum = { .offset = image_offset, .size = (uint32_t)size };

        sum_copy_both(job->image + image_offset, from, size, &sum.crc32, &sum.crc64);
        lock_take(&crew_lock);
        image_sums_add(job->sums, &sum);
        lock_give(&crew_lock);
}

static void copy_slice(const struct capture_job *job, uint64_t image_offset, const char *from, uint64_t size)
{
        while (size > 0) {
                uint64_t some = job->sums ? image_sum_size(image_offset, size) : size;

                if (job->sums && some >= IMAGE_SUM_MIN)
                        copy_and_sum(job, image_offset, from, some);
                else
                        sum_copy_stream(job->image + image_offset, from, some);
                image_offset += some;
                from += some;
                size -= some;
        }
}

static void copy_piece(struct capture_job *job, const struct piece *piece)
{
        const struct capture_part *part = job->parts + piece->first_part;
        uint64_t left = piece->size;

        if (job->is_fresh && piece->size > 0)
                populate(job, piece);
        for (size_t i = 0; i < piece->part_count; i++, part++) {
                uint64_t offset = i == 0 ? piece->first_offset : 0;
                uint64_t size = slice(piece, part, i, left);

                if (part->data)
                        copy_slice(job, part->image_offset + offset, (const char *)part->data + offset, size);
                left -= size;
        }
}

static void copy_pieces(struct capture_job *job)
{
        struct piece piece;

        lock_take(&crew_lock);
        while (take_piece(job, &piece)) {
                lock_give(&crew_lock);
                copy_piece(job, &piece);
                lock_take(&crew_lock);
        }
        lock_give(&crew_lock);
}

static void *helper_main(void *unused)
{
        uint64_t seen = 0;

        (void)unused;
        lock_take(&crew_lock);
        while (!crew.is_ending) {
                int64_t begun_ns;
                struct capture_job *job = crew.job;

                if (!job || crew.round == seen) {
                        lock_wait(&crew_lock, &crew.called);
                        continue;
                }
                seen = crew.round;
                crew.busy_count++;
                lock_give(&crew_lock);
                begun_ns = os->thread_cpu_ns();
                copy_pieces(job);
                begun_ns = os->thread_cpu_ns() - begun_ns;
                lock_take(&crew_lock);
                job->cpu_ns += begun_ns;
                if (--crew.busy_count == 0)
                        pthread_cond_signal(&crew.finished);
        }
        lock_give(&crew_lock);
        return NULL;
}

/* The caller holds turn_lock. If a thread cannot be started, the caller copies its share. */
static void gather_crew(void)
{
        uint32_t want = os->cpu_count();

        want = want < THREAD_COUNT_MAX ? want : THREAD_COUNT_MAX;
        while (crew.helper_count + 1 < want) {
                if (os_thread_start(&crew.helpers[crew.helper_count], helper_main, NULL, false) != 0)
                        break;
                crew.helper_count++;
        }
}

/* The caller holds turn_lock but not crew_lock, because helpers that wake up need crew_lock. */
static void wake_crew(void)
{
        cpu_set_t before[THREAD_COUNT_MAX - 1];
        bool is_kept_off[THREAD_COUNT_MAX - 1];

        for (uint32_t i = 0; i < crew.helper_count; i++)
                is_kept_off[i] = os_thread_keep_off(crew.helpers[i], &before[i]);
        pthread_cond_broadcast(&crew.called);
        for (uint32_t i = 0; i < crew.helper_count; i++)
                if (is_kept_off[i])
                        pthread_setaffinity_np(crew.helpers[i], sizeof before[i], &before[i]);
}

void capture_copy_begin(struct capture_job *job)
{
        uint64_t size = 0;

        for (size_t i = 0; i < job->count; i++)
                size += job->parts[i].size;
        job->has_crew = size > PIECE_BYTES; /* a single piece is copied before a helper would wake up */
        if (!job->has_crew)
                return;
        pthread_once(&fork_once, watch_forks);
        lock_take(&turn_lock);
        gather_crew();
        lock_take(&crew_lock);
        crew.job = job;
        crew.round++;
        lock_give(&crew_lock);
        wake_crew();
}

int64_t capture_copy_end(struct capture_job *job)
{
        int64_t begun_ns = os->thread_cpu_ns();
        struct piece piece;
        int64_t cpu_ns;

        if (!job->has_crew) {
                while (take_piece(job, &piece))
                        copy_piece(job, &piece);
                return os->thread_cpu_ns() - begun_ns;
        }
        copy_pieces(job);

        lock_take(&crew_lock);
        crew.job = NULL; /* a helper that wakes up later finds no job */
        while (crew.busy_count > 0)
                lock_wait(&crew_lock, &crew.finished);
        cpu_ns = job->cpu_ns;
        lock_give(&crew_lock);
        lock_give(&turn_lock);
        return cpu_ns + os->thread_cpu_ns() - begun_ns;
}

bool capture_populate(void *image, uint64_t size)
{
        struct capture_part whole = { .size = size };
        struct capture_job job = { .image = image, .parts = &whole, .count = 1, .is_fresh = true };

        capture_copy_begin(&job);
        capture_copy_end(&job);
        return !atomic_load(&job.lacks_pages);
}

bool capture_make_pages(void *image, uint64_t offset, uint64_t size)
{
        uint64_t begin = offset & ~(uint64_t)(PAGE_BYTES - 1), end = (offset + size + PAGE_BYTES - 1) & ~(uint64_t)(PAGE_BYTES - 1);

        return !size || os->advise((char *)image + begin, end - begin, OS_ADVISE_POPULATE_WRITE) >= 0;
}

int64_t capture_copy(void *image, const struct capture_part *parts, size_t count)
{
        struct capture_job job = { .image = image, .parts = parts, .count = count };

        capture_copy_begin(&job);
        return capture_copy_end(&job);
}

void capture_copy_rest(void)
{
        lock_take(&turn_lock);
        lock_take(&crew_lock);
        crew.is_ending = true;
        pthread_cond_broadcast(&crew.called);
        lock_give(&crew_lock);
        while (crew.helper_count > 0)
                pthread_join(crew.helpers[--crew.helper_count], NULL);
        crew.is_ending = false; /* all helpers have read it */
        lock_give(&turn_lock);
}
