/*
 * agent_publish.h - shared by the tests of publishing: a bench (agent_catalogue.h) whose versions are published below `out`, and a
 * letter that describes the published files.
 */
#ifndef NB_TESTS_AGENT_PUBLISH_H
#define NB_TESTS_AGENT_PUBLISH_H

#include <errno.h>

#include "agent/agent_catalogue.h"
#include "agent/publish/publish.h"

static inline void put_text(const char *path, const char *text)
{
        int fd = os->open(path, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_SHARED);

        if (fd < 0 || os_write_at(fd, text, strlen(text), 0) || os->close(fd))
                abort();
}

/* Writes a file of the framework beside the checkpoint's files. It is not synced, as frameworks do not sync either. */
static inline void stage(const char *staging, const char *text)
{
        char path[300];

        snprintf(path, sizeof path, "%s/sub", staging);
        if (os_make_dirs(path, 0755))
                abort();
        snprintf(path, sizeof path, "%s/sub/config", staging);
        put_text(path, text);
}

static inline enum nebula_status ask(struct bench *bench, struct version *version, const char *name, const char *path,
                                     const char *staging)
{
        static struct ipc_publish request; /* too large for a stack */
        enum nebula_status status;

        memset(&request, 0, sizeof request);
        snprintf(request.name, sizeof request.name, "%s", name);
        snprintf(request.path, sizeof request.path, "%s", path);
        snprintf(request.staging, sizeof request.staging, "%s", staging);
        catalogue_lock(&bench->catalogue);
        status = publish_request(&bench->catalogue, version, &request, &bench->error);
        catalogue_unlock(&bench->catalogue);
        return status;
}

static inline enum nebula_status ask_removal(struct bench *bench, const char *path)
{
        enum nebula_status status;

        catalogue_lock(&bench->catalogue);
        status = publish_remove(&bench->catalogue, bench->job, path, &bench->error);
        catalogue_unlock(&bench->catalogue);
        return status;
}

/* Does the worker's part, without its pauses: at most `tries` pieces of work. True: nothing is left to do. */
static inline bool work(struct bench *bench, int tries)
{
        int64_t due = INT64_MAX;
        bool more = true;

        catalogue_lock(&bench->catalogue);
        while (tries-- > 0 && (more = publish_work(&bench->catalogue, bench->job, INT64_MAX, &due)))
                ;
        catalogue_unlock(&bench->catalogue);
        return !more;
}

/* Returns '-': the file is absent; 'a' for the bytes of seeds[0], 'b' for those of seeds[1] and so on; '!': other bytes. */
static inline char look_file(const char *path, const unsigned *seeds)
{
        char *data, found = '!';
        size_t size;
        int result = os_read_file(path, 1 << 20, &data, &size);

        if (result)
                return result == -ENOENT || result == -ENOTDIR ? '-' : '!';
        for (size_t k = 0; seeds[k] && size == BENCH_FILE_BYTES && found == '!'; k++) {
                size_t i = 0;

                while (i < size && (unsigned char)data[i] == bench_byte(seeds[k], i))
                        i++;
                if (i == size)
                        found = (char)('a' + k);
        }
        free(data);
        return found;
}

/* Returns the same for a whole directory. File a, the staged file (which holds the letter) and the label must be of one version. */
static inline char look_directory(const char *path, const unsigned *seeds)
{
        char inner[400], found, *text;
        struct os_stat stat;
        size_t size;

        if (os->stat(path, false, &stat) == -ENOENT)
                return '-';
        snprintf(inner, sizeof inner, "%s/a", path);
        found = look_file(inner, seeds);
        if (found == '-')
                return '!';
        snprintf(inner, sizeof inner, "%s/sub/config", path);
        if (os_read_file(inner, 100, &text, &size))
                return '!';
        if (size != 1 || text[0] != found)
                found = '!';
        free(text);
        snprintf(inner, sizeof inner, "%s/.nebula.json", path);
        return os->stat(inner, false, &stat) ? '!' : found;
}

/* Returns the number of Nebula's temporary names in the directory, which an interrupted try leaves. */
static inline int debris_in(const char *path)
{
        struct os_dir *dir;
        char name[300];
        int count = 0;

        if (os->opendir(path, &dir))
                return 0;
        while (os->readdir(dir, name, sizeof name) > 0)
                count += !strncmp(name, ".nebula-", 8);
        os->closedir(dir);
        return count;
}

#endif
