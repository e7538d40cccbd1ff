#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/clients/location.h"
#include "agent/log.h"
#include "base/text.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/place.h"

#define WAIT_MS 1000  /* less than the command's 5 s for an answer to its greeting */
#define LINKS_MAX 40  /* the kernel's limit */
#define PLACES_MAX 256 /* some hundred bytes each; jobs know their own */

/* A spelling and the path that it led to, newest first. */
struct place {
        struct place *next;
        char *spelling, *path;
        uint64_t device, inode; /* of the directory; inode 0: the directory did not exist */
};
/* A path that a job uses, to compare with. */
struct known {
        char *path;
        uint64_t device, inode;
};
/* A look at one path, by a thread that may outlive the caller. */
struct look {
        atomic_uint holders;
        _Atomic uint32_t is_done;
        size_t kept;                /* bytes at the end that are not resolved */
        struct known *known;
        size_t known_count;
        uint64_t device, inode;
        char spelling[IPC_PATH_MAX], path[IPC_PATH_MAX]; /* path: the result; "": the spelling itself */
};

static void look_drop(struct look *look)
{
        if (atomic_fetch_sub(&look->holders, 1) > 1)
                return;
        for (size_t i = 0; i < look->known_count; i++)
                free(look->known[i].path);
        free(look->known);
        free(look);
}

/* Puts the target of the link `path` in front of `todo`. False: the result is too long. */
static bool follow(char *path, char *todo, size_t size)
{
        char target[IPC_PATH_MAX], rest[IPC_PATH_MAX];
        int length = os->readlink(path, target, sizeof target - 1);

        if (length <= 0)
                return false;
        target[length] = 0;
        snprintf(rest, sizeof rest, "%s", todo);
        if (target[0] == '/')
                *path = 0;
        else
                *strrchr(path, '/') = 0;
        return (size_t)snprintf(todo, size, "%s/%s", target, rest) < size;
}

/*
 * Resolves links as realpath does, but a part that does not exist or may not be searched keeps its spelling. A link whose
 * target is not mounted yet must not become a directory of that name on the disk below. False: too many links, or too
 * long.
 */
static bool without_links(const char *spelling, char *path, size_t size)
{
        char todo[IPC_PATH_MAX];
        unsigned links = 0;
        struct os_stat stat, target;

        snprintf(todo, sizeof todo, "%s", spelling);
        *path = 0;
        while (*todo) {
                size_t skipped = strspn(todo, "/"), length = strcspn(todo + skipped, "/"), used = strlen(path);
                char name[IPC_PATH_MAX];

                snprintf(name, sizeof name, "%.*s", (int)length, todo + skipped);
                memmove(todo, todo + skipped + length, strlen(todo + skipped + length) + 1);
                if (!*name || !strcmp(name, "."))
                        continue;
                if (!strcmp(name, "..")) {
                        if (used)
                                *strrchr(path, '/') = 0;
                        continue;
                }
                if ((size_t)snprintf(path + used, size - used, "/%s", name) >= size - used)
                        return false;
                if (!os->stat(path, false, &stat) && stat.kind == OS_KIND_LINK && !os->stat(path, true, &target) &&
                    (++links > LINKS_MAX || !follow(path, todo, sizeof todo)))
                        return false;
        }
        if (!*path)
                snprintf(path, size, "/");
        return true;
}

/* Takes the path of another mount of the same directory, if a job uses one. Inode numbers are reused, so both
 * directories are looked at now. */
static void take_known(struct look *look)
{
        struct os_stat own, other;

        if (os->stat(look->path, true, &own))
                return;
        look->device = own.device;
        look->inode = own.inode;
        for (size_t i = 0; i < look->known_count; i++)
                if (!strcmp(look->known[i].path, look->path))
                        return;
        for (size_t i = 0; i < look->known_count; i++) {
                const struct known *known = &look->known[i];

                if (known->device != own.device || known->inode != own.inode || os->stat(known->path, true, &other) ||
                    other.device != own.device || other.inode != own.inode)
                        continue;
                strcpy(look->path, known->path);
                return;
        }
}

static void *look_main(void *argument)
{
        struct look *look = argument;
        size_t length = strlen(look->spelling) - look->kept;
        char head[IPC_PATH_MAX];
        int (*wake)(const void *word) = os->futex_wake; /* a test may replace the table as soon as the look is done */

        snprintf(head, sizeof head, "%.*s", (int)length, look->spelling);
        if (!without_links(head, look->path, sizeof look->path))
                look->path[0] = 0;
        else if (!look->kept)
                take_known(look);
        else if ((size_t)snprintf(head, sizeof head, "%s%s", strcmp(look->path, "/") ? look->path : "", look->spelling + length) < sizeof head)
                strcpy(look->path, head);
        else
                look->path[0] = 0;
        atomic_store(&look->is_done, 1);
        wake(&look->is_done);
        look_drop(look);
        return NULL;
}

/* Lists the directories that jobs use, as many as memory allows. Lock held. */
static void list_known(struct catalogue *catalogue, struct look *look)
{
        size_t count = 0;

        for (const struct job *job = catalogue->jobs; job; job = job->next)
                count += job->location->inode != 0;
        look->known = calloc(count + 1, sizeof *look->known);
        for (const struct job *job = look->known ? catalogue->jobs : NULL; job; job = job->next) {
                char *path = job->location->inode ? strdup(job->persist_path) : NULL;

                if (path)
                        look->known[look->known_count++] = (struct known){ path, job->location->device, job->location->inode };
        }
}

static void place_free(struct place *place)
{
        if (place) {
                free(place->spelling);
                free(place->path);
        }
        free(place);
}

/* Also for the jobs at the path: their directory may have been removed, or made again. Lock held. */
static void remember(struct catalogue *catalogue, const char *spelling, const char *path, uint64_t device, uint64_t inode)
{
        struct place *place = calloc(1, sizeof *place), **link = &catalogue->places;

        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (!strcmp(job->persist_path, path))
                        *job->location = (struct job_location){ device, inode };
        for (size_t count = 1; *link; count++) {
                struct place *old = *link;

                if (count < PLACES_MAX && strcmp(old->spelling, spelling)) {
                        link = &old->next;
                        continue;
                }
                *link = old->next;
                place_free(old);
        }
        if (!place)
                return;
        *place = (struct place){ .next = catalogue->places, .spelling = strdup(spelling), .path = strdup(path), .device = device, .inode = inode };
        if (place->spelling && place->path)
                catalogue->places = place;
        else
                place_free(place);
}

/* Replaces a spelling by the path that it led to when that could last be seen. Lock held. */
static void recall(const struct catalogue *catalogue, char *path)
{
        for (const struct place *place = catalogue->places; place; place = place->next)
                if (!strcmp(place->spelling, path)) {
                        snprintf(path, IPC_PATH_MAX, "%s", place->path);
                        return;
                }
        for (const struct job *job = catalogue->jobs; job; job = job->next) /* there were more spellings since */
                if (!strcmp(job->spelling, path)) {
                        snprintf(path, IPC_PATH_MAX, "%s", job->persist_path);
                        return;
                }
}

/* kept: so many bytes at the end are a name that is not resolved. */
static void resolve(struct catalogue *catalogue, char *path, size_t kept)
{
        struct look *look = calloc(1, sizeof *look);
        int64_t until_ns = os->now_ns() + (int64_t)WAIT_MS * 1000000, left_ns;

        if (!look)
                return;
        atomic_init(&look->holders, 2);
        look->kept = kept;
        snprintf(look->spelling, sizeof look->spelling, "%s", path);
        catalogue_lock(catalogue);
        if (!kept)
                list_known(catalogue, look);
        catalogue_unlock(catalogue);
        if (os_thread_start(NULL, look_main, look, false))
                look_main(look);
        while (!atomic_load(&look->is_done) && (left_ns = until_ns - os->now_ns()) > 0)
                os->futex_wait(&look->is_done, 0, left_ns / 1000000 + 1);
        catalogue_lock(catalogue);
        if (!atomic_load(&look->is_done)) {
                recall(catalogue, path);
                log_event(LOG_LEVEL_WARN, "%s does not answer: the agent takes it for %s", look->spelling, path);
        } else if (look->path[0]) {
                if (!kept)
                        remember(catalogue, look->spelling, look->path, look->device, look->inode);
                strcpy(path, look->path);
        }
        catalogue_unlock(catalogue);
        look_drop(look);
}

void location_resolve(struct catalogue *catalogue, char *path)
{
        const char *local = text_local_path(path);

        if (*local == '/')
                memmove(path, local, strlen(local) + 1);
        if (path[0] == '/')
                resolve(catalogue, path, 0);
        else
                place_normalize(path);
}

void location_resolve_parent(struct catalogue *catalogue, char *path)
{
        const char *slash = strrchr(path, '/');

        if (path[0] == '/' && slash != path && slash[1])
                resolve(catalogue, path, strlen(slash));
}

void location_note(struct job *job)
{
        for (const struct place *place = job->lane->catalogue->places; place; place = place->next)
                if (!strcmp(place->path, job->persist_path)) {
                        *job->location = (struct job_location){ place->device, place->inode };
                        return;
                }
}

void location_learn(struct catalogue *catalogue, struct job *job)
{
        struct os_stat stat;
        bool is_known;

        catalogue_lock(catalogue);
        is_known = job->location->inode != 0;
        catalogue_unlock(catalogue);
        if (is_known || job->persist_path[0] != '/' || os->stat(job->persist_path, true, &stat))
                return;
        catalogue_lock(catalogue);
        *job->location = (struct job_location){ stat.device, stat.inode };
        catalogue_unlock(catalogue);
}

bool location_same(struct catalogue *catalogue, const char *a, const char *b)
{
        char first[IPC_PATH_MAX], second[IPC_PATH_MAX];

        if (!strcmp(a, b))
                return true;
        snprintf(first, sizeof first, "%s", a);
        snprintf(second, sizeof second, "%s", b);
        location_resolve(catalogue, first);
        location_resolve(catalogue, second);
        return !strcmp(first, second);
}

void location_done(struct catalogue *catalogue)
{
        while (catalogue->places) {
                struct place *place = catalogue->places;

                catalogue->places = place->next;
                place_free(place);
        }
}
