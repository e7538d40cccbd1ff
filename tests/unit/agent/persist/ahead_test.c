/* Files that the agent writes to storage while the trainer is still copying them. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include "agent/agent_client.h"
#include "image/image.h"
#include "sum/sum.h"
#include "tap.h"

#define MIB ((size_t)1 << 20)
#define SIZE (24 * MIB + 77)
#define PART (16 * MIB)
#define TRIES 2000 /* each of 10 ms */

static struct test_place place;
static struct test_client client;
static struct agent *agent;

/* An image into which the test copies a file. */
struct copying {
        uint64_t version, image;
        unsigned char *data;
        size_t capacity;
};

static bool open_all(uint64_t nonce, uint32_t world, uint32_t rank, struct test_client *ret_client)
{
        client_init(ret_client, &place, nonce);
        ret_client->hello.world = ret_client->hello.local_world = world;
        ret_client->hello.rank = rank;
        return !client_connect(ret_client, &place);
}

/* The simulated behaviour of storage. */
enum mood { STORAGE_WORKS, STORAGE_FAILS, STORAGE_HANGS, STORAGE_IS_FULL };
static _Atomic enum mood mood;
static _Atomic int moody_count; /* calls that the mood has changed */

static int moody_opendir(const char *root, const char *key, struct os_dir **ret_dir)
{
        if (!strncmp(root, place.storage, strlen(place.storage)) && mood != STORAGE_WORKS) {
                moody_count++;
                while (mood == STORAGE_HANGS)
                        usleep(1000);
                if (mood == STORAGE_FAILS)
                        return -EIO;
        }
        return os_linux.opendir_below(root, key, ret_dir);
}

static int moody_allocate(int fd, uint64_t offset, uint64_t size)
{
        if (size == SIZE && mood != STORAGE_WORKS) { /* reservations of memory come in whole MiB */
                moody_count++;
                while (mood == STORAGE_HANGS)
                        usleep(1000);
                if (mood == STORAGE_IS_FULL)
                        return -ENOSPC;
        }
        return os_linux.allocate(fd, offset, size);
}

/* The agent gives up on a copy that stops for a second, and this process may stand still for longer. So the agent's clock is slow, but in
 * tests of that second. */
static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t clock_since_ns, clock_shown_ns, clock_slowness = 1;

static int64_t shown_ns(void)
{
        return clock_shown_ns + (os_linux.now_ns() - clock_since_ns) / clock_slowness;
}

static int64_t slow_now_ns(void)
{
        int64_t now;

        pthread_mutex_lock(&clock_lock);
        now = shown_ns();
        pthread_mutex_unlock(&clock_lock);
        return now;
}

static void set_clock(int64_t slowness)
{
        pthread_mutex_lock(&clock_lock);
        clock_shown_ns = shown_ns();
        clock_since_ns = os_linux.now_ns();
        clock_slowness = slowness;
        pthread_mutex_unlock(&clock_lock);
}

static bool set_up(uint64_t nonce, uint32_t world)
{
        static struct os_table table;
        struct nebula_error error;

        if (!table.allocate) { /* once: a thread of the agent before may still read the table */
                table = os_linux;
                table.opendir_below = moody_opendir;
                table.allocate = moody_allocate;
                table.now_ns = slow_now_ns;
        }
        set_clock(100);
        os = &table;
        place_init(&place);
        agent = NULL;
        return !agent_start(&place.place, true, &agent, &error) && open_all(nonce, world, 0, &client);
}

static void tear_down(void)
{
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
        os = &os_linux;
        mood = STORAGE_WORKS;
        moody_count = 0;
}

/* Returns the bytes of a file of this seed. They are made once: under a sanitizer that is slow, and the agent waits only a second for a
 * copy. */
static const unsigned char *content(unsigned seed)
{
        static unsigned char bytes[SIZE];
        static unsigned made;

        for (size_t i = 0; made != seed && i < SIZE; i++)
                bytes[i] = byte_at(seed, i);
        made = seed;
        return bytes;
}

static void fill(const struct copying *copying, unsigned seed, size_t from, size_t end)
{
        memcpy(copying->data + from, content(seed) + from, end - from);
}

/* Asks for an image and maps it. */
static bool lend(struct test_client *from, const char *tag, const char *name, int64_t goal, uint64_t size, enum ipc_format format,
                 struct copying *ret_copying)
{
        struct ipc_image request = { .size = size, .format = format, .file_count = goal };
        struct ipc_granted *granted;

        strcpy(request.name, name);
        strcpy(request.tag, tag);
        if (ask(from, IPC_IMAGE, &request, sizeof request))
                return false;
        granted = from->frame.payload;
        *ret_copying = (struct copying){ granted->version_id, granted->image_id, NULL, granted->capacity_bytes };
        ret_copying->data = mmap(NULL, ret_copying->capacity, PROT_READ | PROT_WRITE, MAP_SHARED, from->frame.fd, 0);
        return ret_copying->data != MAP_FAILED;
}

/* Asks for an image and copies the beginning of the file. Other bytes follow. */
static bool copy_some_of(struct test_client *from, const char *tag, const char *name, int64_t goal, struct copying *ret_copying)
{
        if (!lend(from, tag, name, goal, SIZE, IPC_FORMAT_RAW, ret_copying))
                return false;
        memset(ret_copying->data, 0xee, SIZE);
        fill(ret_copying, 1, 0, PART);
        return true;
}

static bool copy_some(struct test_client *from, const char *tag, int64_t goal, struct copying *ret_copying)
{
        return copy_some_of(from, tag, "m", goal, ret_copying);
}

static enum nebula_status copied(struct test_client *from, const struct copying *copying, uint64_t size, bool commits)
{
        struct ipc_copied request = { .image_id = copying->image, .size = size, .commits = commits };

        return ask(from, IPC_COPIED, &request, sizeof request);
}

static enum nebula_status captured_all(struct test_client *from, const struct copying *copying, bool commits)
{
        struct ipc_captured request = { .image_id = copying->image, .commits = commits };

        return ask(from, IPC_CAPTURED, &request, sizeof request);
}

/* Returns the inode of the largest object of the directory whose name begins with `begins`, also of a temporary file. 0: there is none. */
static ino_t inode_of(const char *directory, const char *begins, char ret_path[512])
{
        char path[256], found[512];
        struct stat largest = { 0 }, stat;
        struct dirent *entry;
        DIR *list;

        if (storage_is_mem()) {
                snprintf(path, sizeof path, "%s%s%s", directory, *directory ? "/" : "", begins);
                return storage_count(place.storage, path, "", ret_path) > 0;
        }
        snprintf(path, sizeof path, "%s/%s", place.storage, directory);
        list = opendir(path);
        while (list && (entry = readdir(list))) {
                snprintf(found, sizeof found, "%s/%s", path, entry->d_name);
                if (!strncmp(entry->d_name, begins, strlen(begins)) && !lstat(found, &stat) &&
                    (!largest.st_ino || stat.st_size > largest.st_size)) {
                        largest = stat;
                        strcpy(ret_path, found);
                }
        }
        if (list)
                closedir(list);
        return largest.st_ino;
}

static bool object_holds(const char *key, const unsigned char *bytes, size_t from, size_t end)
{
        size_t size;
        char *data = storage_read(place.storage, key, &size);
        bool same = data && size >= end && !memcmp(data + from, bytes + from, end - from);

        free(data);
        return same;
}

/* path: from inode_of. */
static bool holds_bytes(const char *path, const unsigned char *bytes, size_t from, size_t end)
{
        unsigned char *data = malloc(end - from);
        int fd = storage_is_mem() ? -1 : open(path, O_RDONLY);
        bool same = fd >= 0 && data && pread(fd, data, end - from, (off_t)from) == (ssize_t)(end - from) &&
                    !memcmp(data, bytes + from, end - from);

        if (fd >= 0)
                close(fd);
        free(data);
        return same || (storage_is_mem() && object_holds(path, bytes, from, end));
}

static bool holds(const char *path, unsigned seed, size_t from, size_t end)
{
        return holds_bytes(path, content(seed), from, end);
}

/*
 * Waits until a temporary file of the tag has the copied bytes, and returns its inode. Meanwhile it copies on slowly, because the agent
 * gives up on a copy that stops for a second. The test cannot see an upload to an object store: there it waits for a time that is usually
 * long enough.
 */
static ino_t await_written(const struct copying *copying, const char *tag)
{
        char directory[64], path[512];

        snprintf(directory, sizeof directory, "%s/.nebula", tag);
        for (size_t i = 0; i < TRIES; i++) {
                ino_t inode = storage_is_mem() ? i > 20 : inode_of(directory, "tmp-", path);

                if (inode && (storage_is_mem() || holds(path, 1, 0, PART)))
                        return inode;
                fill(copying, 1, PART + i, PART + i + 1);
                if (copied(&client, copying, PART + i + 1, true))
                        break;
                usleep(10000);
        }
        return 0;
}

/* Copies one more byte in 10 ms, as a slow trainer. */
static bool copy_slowly(const struct copying *copying, size_t i)
{
        fill(copying, 1, PART + i, PART + i + 1);
        usleep(10000);
        return !copied(&client, copying, PART + i + 1, true);
}

/* Copies the rest. Then the file is durable, with the saved bytes. */
static void copy_rest(const struct copying *copying)
{
        fill(copying, 1, PART, SIZE);
        CHECK(!captured_all(&client, copying, false));
        CHECK(!wait_for(&client, copying->version, NEBULA_STATE_DURABLE, 20000));
        CHECK(!load(&client, copying->version, "m", 1, SIZE, NULL));
        munmap(copying->data, copying->capacity);
}

static void copied_bytes_are_written_while_the_rest_is_copied(void)
{
        struct copying copying;
        char path[512];
        ino_t written;

        REQUIRE(set_up(31, 1) && copy_some(&client, "global_step1", 1, &copying));
        CHECK(!copied(&client, &copying, PART, false));
        written = await_written(&copying, "global_step1");
        CHECK(written);
        CHECK(!inode_of("global_step1/.nebula", "manifest", path) && !inode_of("global_step1/.nebula", "record", path));
        CHECK(state_of(&client, copying.version) == NEBULA_STATE_CAPTURING);
        copy_rest(&copying);
        CHECK(storage_is_mem() || inode_of("global_step1", "m", path) == written);
        CHECK(inode_of("global_step1", "m", path));
        CHECK(holds(path, 1, 0, SIZE));
        tear_down();
}

/* fault: as test_kills_while_a_large_file_is_copied_and_written */
static void an_abandoned_copy_leaves_nothing_in_storage(void)
{
        struct ipc_abandon abandon = { .reason = "no more" };
        struct copying copying;
        char path[512];

        REQUIRE(set_up(32, 1) && copy_some(&client, "global_step1", 1, &copying));
        CHECK(!copied(&client, &copying, PART, false) && await_written(&copying, "global_step1"));
        abandon.image_id = copying.image;
        CHECK(!ask(&client, IPC_ABANDON, &abandon, sizeof abandon));
        CHECK(state_of(&client, copying.version) == NEBULA_STATE_FAILED);
        memset(copying.data, 0x11, SIZE); /* a trainer may not know yet that its copy is no longer needed */
        for (int i = 0; i < TRIES && inode_of("", "global_step1", path); i++)
                usleep(10000);
        CHECK(!inode_of("", "global_step1", path));
        munmap(copying.data, copying.capacity);

        REQUIRE(copy_some(&client, "global_step2", 1, &copying));
        CHECK(!copied(&client, &copying, PART, false) && await_written(&copying, "global_step2"));
        set_clock(1);
        client_done(&client); /* as if the trainer was killed */
        client.hello.pid = 0;
        for (int i = 0; i < TRIES && inode_of("", "global_step2", path); i++)
                usleep(10000);
        CHECK(!inode_of("", "global_step2", path));
        munmap(copying.data, copying.capacity);
        tear_down();
}

static void a_trainer_that_stands_still_holds_up_no_other_version(void)
{
        struct copying copying;
        uint64_t other;

        REQUIRE(set_up(33, 1) && copy_some(&client, "global_step1", 1, &copying));
        CHECK(!copied(&client, &copying, PART, false) && await_written(&copying, "global_step1"));
        set_clock(1);
        CHECK(!save_whole(&client, "global_step2", 2, &other));
        CHECK(!wait_for(&client, other, NEBULA_STATE_DURABLE, 20000));
        CHECK(state_of(&client, copying.version) == NEBULA_STATE_CAPTURING);
        copy_rest(&copying);
        tear_down();
}

static void a_file_that_is_asked_for_again_is_written_as_it_was_saved_last(void)
{
        struct copying first, second;
        char path[512];

        REQUIRE(set_up(34, 1) && copy_some(&client, "global_step1", 1, &first));
        CHECK(!copied(&client, &first, PART, false) && await_written(&first, "global_step1"));
        REQUIRE(copy_some(&client, "global_step1", 1, &second)); /* the trainer has not received the answer */
        CHECK(second.version == first.version && second.image != first.image);
        fill(&second, 7, 0, SIZE);
        CHECK(!captured_all(&client, &second, false));
        memset(first.data, 0x11, SIZE);
        CHECK(!wait_for(&client, second.version, NEBULA_STATE_DURABLE, 20000));
        CHECK(inode_of("global_step1", "m", path) && holds(path, 7, 0, SIZE));
        munmap(first.data, first.capacity);
        munmap(second.data, second.capacity);
        tear_down();
}

static void nothing_is_written_before_all_ranks_will_have_closed(void)
{
        static struct test_client other;
        struct copying mine;
        struct ipc_granted loan;
        char path[512];

        REQUIRE(set_up(35, 2) && open_all(36, 2, 1, &other));
        REQUIRE(copy_some(&client, "global_step1", NEBULA_FILES_ALL_RANKS, &mine));
        CHECK(!copied(&client, &mine, PART / 2, false) && !copied(&client, &mine, PART, true));
        usleep(100000);
        CHECK(!inode_of("", "global_step1", path)); /* the other rank has not begun */
        CHECK(!copy_image(&other, mine.version, "o", 3, 5000, &loan) && !captured(&other, loan.image_id));
        usleep(100000);
        CHECK(!inode_of("", "global_step1", path)); /* this rank may save more */
        CHECK(!of_version(&other, IPC_COMMIT, mine.version));
        CHECK(await_written(&mine, "global_step1"));
        fill(&mine, 1, PART, SIZE);
        CHECK(!captured_all(&client, &mine, true));
        CHECK(!wait_for(&client, mine.version, NEBULA_STATE_DURABLE, 20000));
        CHECK(!load(&client, mine.version, "m", 1, SIZE, NULL) && !load(&client, mine.version, "o", 3, 5000, NULL));
        munmap(mine.data, mine.capacity);
        client_done(&other);
        tear_down();
}

/* A tag that is written again may carry files over. Only its commit decides that. */
static void a_tag_written_again_is_not_written_ahead(void)
{
        struct copying copying;
        uint64_t version;
        char path[512];

        REQUIRE(set_up(37, 1));
        CHECK(!save_whole(&client, "t", 2, &version) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 20000));
        REQUIRE(copy_some(&client, "t", 1, &copying));
        CHECK(copying.version != version && !copied(&client, &copying, PART, false));
        usleep(200000);
        CHECK(!inode_of("t/.nebula", "tmp-", path));
        copy_rest(&copying);
        CHECK(!load(&client, copying.version, "model.pt", 2, FILE_BYTES, NULL));
        tear_down();
}

static void more_than_a_file_has_cannot_be_copied(void)
{
        struct copying copying;

        REQUIRE(set_up(38, 1) && copy_some(&client, "global_step1", 1, &copying));
        CHECK(copied(&client, &copying, SIZE + 1, false) == NEBULA_INVALID);
        copying.image++;
        CHECK(copied(&client, &copying, PART, false) == NEBULA_NOT_FOUND);
        munmap(copying.data, copying.capacity);
        tear_down();
}

/* Between the choice of a version and its writing the worker lists storage, which can take long. */
static void a_version_that_failed_before_its_turn_is_not_written(void)
{
        struct ipc_abandon abandon = { .reason = "no more" };
        struct copying copying;
        uint64_t other;
        char path[512];

        NEEDS_FILES("system calls are held up");
        mood = STORAGE_FAILS;
        REQUIRE(set_up(39, 1));
        set_clock(1);
        for (int i = 0; i < TRIES && !moody_count; i++)
                usleep(10000);
        mood = STORAGE_HANGS;
        moody_count = 0;
        REQUIRE(copy_some(&client, "global_step1", 1, &copying));
        CHECK(!copied(&client, &copying, PART, false));
        for (int i = 0; i < TRIES && !moody_count; i++)
                usleep(10000);
        CHECK(moody_count);
        abandon.image_id = copying.image;
        CHECK(!ask(&client, IPC_ABANDON, &abandon, sizeof abandon));
        mood = STORAGE_WORKS;
        CHECK(!save_whole(&client, "global_step2", 2, &other));
        CHECK(!wait_for(&client, other, NEBULA_STATE_DURABLE, 20000));
        CHECK(state_of(&client, copying.version) == NEBULA_STATE_FAILED);
        CHECK(!inode_of("", "global_step1", path));
        munmap(copying.data, copying.capacity);
        tear_down();
}

static void files_are_written_in_the_order_in_which_they_are_copied(void)
{
        struct copying first, second;

        REQUIRE(set_up(40, 1));
        REQUIRE(copy_some_of(&client, "global_step1", "first", 2, &first) && copy_some_of(&client, "global_step1", "second", 2, &second));
        CHECK(!copied(&client, &first, PART, false) && await_written(&first, "global_step1"));
        fill(&first, 1, PART, SIZE);
        fill(&second, 1, PART, SIZE);
        CHECK(!captured_all(&client, &first, false) && !captured_all(&client, &second, false));
        CHECK(!wait_for(&client, first.version, NEBULA_STATE_DURABLE, 20000));
        CHECK(!load(&client, first.version, "first", 1, SIZE, NULL) && !load(&client, first.version, "second", 1, SIZE, NULL));
        munmap(first.data, first.capacity);
        munmap(second.data, second.capacity);
        tear_down();
}

/* Makes a zip file of two tensors, with the layout of save(). */
static uint64_t lay_out(const uint64_t sizes[2], unsigned char *image)
{
        struct nebula_error error;
        struct zip_layout layout;
        uint64_t size;

        if (zip_layout_init(&layout, 2, sizes, 2, &error))
                return 0;
        if (image)
                zip_layout_write(&layout, "}.", image);
        for (size_t k = 0; image && k < 2; k++)
                memset(image + layout.storage_offsets[k], (int)k + 1, (size_t)sizes[k]);
        size = layout.size;
        zip_layout_done(&layout);
        return size;
}

/* An image that was used before holds a valid file. The trainer may write the headers of the next one late. */
static void old_bytes_of_an_image_are_not_taken_for_its_file(void)
{
        const uint64_t before[] = { 70000, 30000 }, now[] = { 30000, 70000 };
        unsigned char *wanted = calloc(1, 200000);
        struct copying first, second;
        struct nebula_error error;
        uint64_t size, *chunks;
        size_t chunk_count;
        char path[512];

        REQUIRE(set_up(47, 1) && copy_some_of(&client, "global_step1", "first", 2, &first));
        REQUIRE(wanted && (size = lay_out(now, wanted)));
        REQUIRE(!image_seal(wanted, size, true, IMAGE_CHUNK_BYTES, &chunks, &chunk_count, &error));
        free(chunks);
        REQUIRE(lend(&client, "global_step1", "second", 2, size, IPC_FORMAT_ZIP, &second));
        REQUIRE(lay_out(before, second.data) == size);
        CHECK(!copied(&client, &first, PART, false) && await_written(&first, "global_step1"));
        fill(&first, 1, PART, SIZE);
        CHECK(!captured_all(&client, &first, false));
        usleep(300000); /* so that the worker comes to the second file */
        memset(second.data, 0, size);
        lay_out(now, second.data);
        CHECK(!captured_all(&client, &second, false));
        CHECK(!wait_for(&client, first.version, NEBULA_STATE_DURABLE, 20000));
        CHECK(!memcmp(second.data, wanted, size));
        CHECK(inode_of("global_step1", "second", path) && holds_bytes(path, wanted, 0, size));
        munmap(first.data, first.capacity);
        munmap(second.data, second.capacity);
        free(wanted);
        tear_down();
}

static void others_wait_for_no_trainer_that_copies_slowly(void)
{
        struct copying copying;
        uint64_t other;
        size_t i = 0;

        REQUIRE(set_up(41, 1) && copy_some(&client, "global_step1", 1, &copying));
        CHECK(!copied(&client, &copying, PART, false) && await_written(&copying, "global_step1"));
        set_clock(1);
        CHECK(!save_whole(&client, "global_step2", 2, &other));
        while (i < TRIES && copy_slowly(&copying, TRIES + i) && state_of(&client, other) != NEBULA_STATE_DURABLE)
                i++;
        CHECK(state_of(&client, other) == NEBULA_STATE_DURABLE);
        CHECK(state_of(&client, copying.version) == NEBULA_STATE_CAPTURING);
        copy_rest(&copying);
        tear_down();
}

static bool persists(struct test_client *from)
{
        const struct ipc_report request = { .report = NEBULA_REPORT_STATUS };
        char *text = ask(from, IPC_REPORT, &request, sizeof request) ? NULL : strndup(from->frame.payload, from->frame.header.size);
        bool result = text && strstr(text, "\"persisting\":true");

        free(text);
        return result;
}

static void a_full_disk_is_not_waited_for_a_trainer(void)
{
        struct copying copying;
        size_t i = 0;

        NEEDS_FILES("system calls are held up");
        REQUIRE(set_up(42, 1) && copy_some(&client, "global_step1", 1, &copying));
        set_clock(1);
        mood = STORAGE_IS_FULL;
        CHECK(!copied(&client, &copying, PART, false));
        while (i < TRIES && copy_slowly(&copying, i) && !(moody_count && !persists(&client)))
                i++;
        CHECK(moody_count && !persists(&client));
        CHECK(state_of(&client, copying.version) == NEBULA_STATE_CAPTURING);
        fill(&copying, 1, PART, SIZE);
        CHECK(!captured_all(&client, &copying, false));
        mood = STORAGE_WORKS;
        CHECK(!flush(&client, "", 20000));
        CHECK(!load(&client, copying.version, "m", 1, SIZE, NULL));
        munmap(copying.data, copying.capacity);
        tear_down();
}

/* Begins the write of a version, which hangs until the mood of storage changes. */
static bool hold_up_storage(struct test_client *from, struct copying *ret_copying)
{
        mood = STORAGE_HANGS;
        if (!copy_some(from, "global_step1", 1, ret_copying) || captured_all(from, ret_copying, false))
                return false;
        for (int i = 0; i < TRIES && !moody_count; i++)
                usleep(10000);
        return moody_count;
}

static void an_ending_agent_begins_no_more_writes_ahead(void)
{
        static struct test_client stopper;
        const struct ipc_stop stop = { 0 };
        struct pollfd answer = { .events = POLLIN };
        struct copying first, second;
        size_t i = 0;

        NEEDS_FILES("system calls are held up");
        REQUIRE(set_up(43, 1) && hold_up_storage(&client, &first) && open_all(44, 1, 0, &stopper));
        set_clock(1);
        REQUIRE(copy_some(&client, "global_step2", 1, &second));
        REQUIRE(!ipc_send(stopper.fd, IPC_STOP, NEBULA_OK, &stop, sizeof stop, -1, &stopper.error));
        while (i < 20 && copy_slowly(&second, i))
                i++;
        mood = STORAGE_WORKS;
        answer.fd = stopper.fd;
        while (i < TRIES && !poll(&answer, 1, 0) && copy_slowly(&second, i))
                i++;
        CHECK(poll(&answer, 1, 0) == 1);
        munmap(first.data, first.capacity);
        munmap(second.data, second.capacity);
        client_done(&stopper);
        tear_down();
}

static void a_complete_version_is_written_before_an_incomplete_one(void)
{
        static struct test_client other;
        struct copying first, ahead;
        uint64_t whole;
        size_t i = 0;
        char path[512];

        NEEDS_FILES("system calls are held up");
        REQUIRE(set_up(45, 1));
        set_clock(1);
        client_init(&other, &place, 46);
        strcpy(other.hello.job, "other");
        REQUIRE(!client_connect(&other, &place) && hold_up_storage(&other, &first));
        REQUIRE(copy_some(&client, "global_step2", 1, &ahead)); /* of a job without versions in storage */
        CHECK(!copied(&client, &ahead, PART, false) && !save_whole(&other, "global_step3", 2, &whole));
        mood = STORAGE_WORKS;
        while (i < TRIES && copy_slowly(&ahead, i) && state_of(&other, whole) != NEBULA_STATE_DURABLE) {
                CHECK(!inode_of("global_step2/.nebula", "tmp-", path));
                i++;
        }
        CHECK(state_of(&other, whole) == NEBULA_STATE_DURABLE);
        munmap(first.data, first.capacity);
        munmap(ahead.data, ahead.capacity);
        client_done(&other);
        tear_down();
}

/* For example after a trainer has overwritten the image by mistake. A load then finds the older version. */
static void an_image_that_cannot_be_sealed_is_never_loaded(void)
{
        struct copying bad;
        struct ipc_found found;
        uint64_t version;

        REQUIRE(set_up(48, 1));
        CHECK(!save_whole(&client, "global_step1", 1, &version) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 20000));
        REQUIRE(lend(&client, "global_step2", "m", NEBULA_FILES_ALL_RANKS, 100000, IPC_FORMAT_ZIP, &bad));
        memset(bad.data, 7, 100000);
        CHECK(!captured_all(&client, &bad, true));
        CHECK(wait_for(&client, bad.version, NEBULA_STATE_DURABLE, 20000) == NEBULA_FAILED);
        CHECK(strstr(client.error.message, "not what its trainer promised") != NULL);
        CHECK(find(&client, "", "global_step2", &found) == NEBULA_NOT_FOUND);
        CHECK(!find(&client, "", "", &found) && found.version_id == version);
        munmap(bad.data, bad.capacity);
        tear_down();
}

/* Saves a file with the trainer's sum of a piece. Returns the result of a load after memory is lost. */
static enum nebula_status load_after_sums(uint64_t nonce, uint64_t crc64_is_off_by)
{
        struct ipc_captured request = { .commits = true, .sum_count = 1 };
        struct nebula_error error;
        struct image_sum *sum;
        struct copying copying;
        struct ipc_found found;
        enum nebula_status status;

        if (!set_up(nonce, 1) || !lend(&client, "global_step1", "m", 1, SIZE, IPC_FORMAT_RAW, &copying))
                return NEBULA_INTERNAL;
        fill(&copying, 1, 0, SIZE);
        sum = (struct image_sum *)(void *)(copying.data + image_sums_offset(SIZE));
        *sum = (struct image_sum){ .offset = 5 * MIB, .size = MIB, .crc64 = sum_crc64(0, copying.data + 5 * MIB, MIB) + crc64_is_off_by };
        request.image_id = copying.image;
        request.sum_count = image_sums_room(SIZE, copying.capacity) + 1;
        CHECK(ask(&client, IPC_CAPTURED, &request, sizeof request) == NEBULA_INVALID && strstr(client.error.message, "sums"));
        request.sum_count = 1;
        CHECK(!ask(&client, IPC_CAPTURED, &request, sizeof request));
        CHECK(!wait_for(&client, copying.version, NEBULA_STATE_DURABLE, 20000));
        munmap(copying.data, copying.capacity);
        client_done(&client);
        agent_stop(agent, true);
        if (agent_start(&place.place, true, &agent, &error) || !open_all(nonce + 1, 1, 0, &client) ||
            find(&client, "", "global_step1", &found))
                return NEBULA_INTERNAL;
        status = load(&client, found.version_id, "m", 1, SIZE, NULL);
        tear_down();
        return status;
}

/* The agent writes the trainer's sums into the record and does not read the bytes for them. So damage between the copy and storage is
 * found. */
static void the_sums_of_a_trainer_s_copy_are_those_of_its_file(void)
{
        CHECK(load_after_sums(51, 0) == NEBULA_OK);
        CHECK(load_after_sums(53, 1) == NEBULA_CORRUPT);
}

TAP_MAIN(TEST(the_sums_of_a_trainer_s_copy_are_those_of_its_file), TEST(copied_bytes_are_written_while_the_rest_is_copied), TEST(an_abandoned_copy_leaves_nothing_in_storage),
         TEST(a_trainer_that_stands_still_holds_up_no_other_version),
         TEST(a_file_that_is_asked_for_again_is_written_as_it_was_saved_last),
         TEST(nothing_is_written_before_all_ranks_will_have_closed), TEST(a_tag_written_again_is_not_written_ahead),
         TEST(more_than_a_file_has_cannot_be_copied), TEST(a_version_that_failed_before_its_turn_is_not_written),
         TEST(files_are_written_in_the_order_in_which_they_are_copied),
         TEST(old_bytes_of_an_image_are_not_taken_for_its_file), TEST(others_wait_for_no_trainer_that_copies_slowly),
         TEST(a_full_disk_is_not_waited_for_a_trainer), TEST(an_ending_agent_begins_no_more_writes_ahead),
         TEST(a_complete_version_is_written_before_an_incomplete_one),
         TEST(an_image_that_cannot_be_sealed_is_never_loaded))
