/* Rooms: what each one keeps of a job or a version, and the calls that the catalogue makes. */
#include <stdint.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/catalogue/room.h"
#include "agent/memory/memory.h"
#include "tap.h"

struct thing {
        long double number; /* needs the strictest alignment */
        char bytes[33];
};

static int jobs, versions, described;

static void job_begins(struct job *job)
{
        (void)job;
        jobs++;
}

static void job_ends(struct job *job)
{
        (void)job;
        jobs--;
}

static void version_begins(struct version *version)
{
        (void)version;
        versions++;
}

static void version_ends(struct version *version)
{
        (void)version;
        versions--;
}

static void describe(struct catalogue *catalogue, struct version *version)
{
        CHECK(!catalogue->marked && !version->is_marked);
        described++;
}

/* These rooms are in place of the agent's, so their slots may have any pointer. */
static const struct room one = {
        .job_slots = { { offsetof(struct job, storage), 1 }, { offsetof(struct job, persist), sizeof(struct thing) } },
        .version_slots = { { offsetof(struct version, persist), sizeof(struct thing) } },
        .job_begins = job_begins,
        .job_ends = job_ends,
};
static const struct room other = {
        .job_slots = { { offsetof(struct job, runs), sizeof(struct thing) } },
        .version_slots = { { offsetof(struct version, nodes), sizeof(struct thing) }, { offsetof(struct version, copies), 3 } },
        .version_begins = version_begins,
        .version_ends = version_ends,
        .describe = describe,
};
static const struct room *const rooms[] = { &one, &other, NULL };

static bool is_zeroed(const void *data, size_t size)
{
        const char *bytes = data;

        for (size_t i = 0; i < size; i++)
                if (bytes[i])
                        return false;
        return true;
}

static void slots_begin_zeroed_and_do_not_overlap(void)
{
        static struct memory memory;
        static struct catalogue catalogue;
        struct version *version;
        struct job *job;

        catalogue_init(&catalogue, rooms, &memory);
        job = catalogue_job_get(&catalogue, "", "");
        version = job ? version_new(&catalogue, job, "t", NULL) : NULL;
        REQUIRE(version && job->storage && job->persist && job->runs && version->persist && version->nodes && version->copies);
        CHECK(!job->copies && !version->survival);
        CHECK((uintptr_t)job->persist % _Alignof(struct thing) == 0 && (uintptr_t)version->nodes % _Alignof(struct thing) == 0);
        CHECK(is_zeroed(job->persist, sizeof(struct thing)) && is_zeroed(job->runs, sizeof(struct thing)));
        memset(job->storage, 1, 1);
        memset(job->persist, 2, sizeof(struct thing));
        memset(version->persist, 3, sizeof(struct thing));
        memset(version->copies, 4, 3);
        CHECK(is_zeroed(job->runs, sizeof(struct thing)) && is_zeroed(version->nodes, sizeof(struct thing)));
        CHECK(*(char *)job->storage == 1 && !strcmp(version->tag, "t") && job->versions == version);
        catalogue_done(&catalogue);
}

static void rooms_are_called_once_for_each_beginning_and_end(void)
{
        static struct memory memory;
        static struct catalogue catalogue;
        struct version *version;
        struct job *job;

        memory_files_init(&memory.files);
        catalogue_init(&catalogue, rooms, &memory);
        job = catalogue_job_get(&catalogue, "", "");
        REQUIRE(job && catalogue_job_get(&catalogue, "", "") == job && jobs == 1);
        version = version_new(&catalogue, job, "t", NULL);
        REQUIRE(version && version_new(&catalogue, job, "u", NULL) && versions == 2);
        catalogue_lock(&catalogue);
        version_mark(&catalogue, version);
        version_mark(&catalogue, version);
        CHECK(!described);
        catalogue_unlock(&catalogue);
        CHECK(described == 1);
        catalogue_lock(&catalogue);
        version_mark(&catalogue, version);
        version_free(&catalogue, version);
        CHECK(described == 2 && versions == 1);
        catalogue_unlock(&catalogue);
        CHECK(described == 2);
        catalogue_done(&catalogue);
        CHECK(!jobs && !versions);
}

TAP_MAIN(TEST(slots_begin_zeroed_and_do_not_overlap), TEST(rooms_are_called_once_for_each_beginning_and_end))
