/*
 * The files of a version, found by name: there may be tens of thousands. A hash table beside the array holds their
 * indices. It uses open addressing and is twice as large as the array can become; files are removed only together with
 * their version.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/memory/memory.h"

#define SLOT_COUNT_MIN 16u

static uint64_t hash(const char *name)
{
        uint64_t value = 14695981039346656037u; /* FNV-1a */

        while (*name)
                value = (value ^ (unsigned char)*name++) * 1099511628211u;
        return value;
}

/* The slot that holds index + 1 of this name, or the empty slot where it would be. */
static uint32_t *find_slot(const struct version *version, const char *name)
{
        size_t at = hash(name) & (version->slot_count - 1);

        while (version->slots[at] && strcmp(version->files[version->slots[at] - 1].name, name))
                at = (at + 1) & (version->slot_count - 1);
        return &version->slots[at];
}

static bool grow(struct version *version)
{
        size_t count = version->slot_count ? 2 * version->slot_count : SLOT_COUNT_MIN;
        struct agent_file *files = realloc(version->files, count / 2 * sizeof *files);
        uint32_t *slots = files ? calloc(count, sizeof *slots) : NULL;

        if (files)
                version->files = files;
        if (!slots)
                return false;
        free(version->slots);
        version->slots = slots;
        version->slot_count = count;
        for (size_t i = 0; i < version->file_count; i++)
                *find_slot(version, files[i].name) = (uint32_t)i + 1;
        return true;
}

struct agent_file *version_file(struct version *version, const char *name)
{
        uint32_t place = version->slot_count ? *find_slot(version, name) : 0;

        return place ? &version->files[place - 1] : NULL;
}

struct agent_file *version_file_add(struct version *version, const char *name)
{
        struct agent_file *file;

        if (version->file_count == version->slot_count / 2 && !grow(version))
                return NULL;
        *find_slot(version, name) = (uint32_t)version->file_count + 1;
        file = &version->files[version->file_count++];
        memset(file, 0, sizeof *file);
        snprintf(file->name, sizeof file->name, "%s", name);
        return file;
}

void version_file_change(struct catalogue *catalogue, struct version *version, struct agent_file *file)
{
        version_file_done(catalogue, file);
        version_mark_files(catalogue, version);
}

void version_file_done(struct catalogue *catalogue, struct agent_file *file)
{
        if (file->image)
                memory_drop(catalogue->memory, file->image);
        if (file->sparse)
                memory_drop(catalogue->memory, file->sparse);
        free(file->chunks);
        file->image = file->sparse = NULL;
        file->chunks = NULL;
        file->chunk_count = 0;
        file->stored = false;
}

void version_files_done(struct catalogue *catalogue, struct version *version)
{
        for (size_t i = 0; i < version->file_count; i++)
                version_file_done(catalogue, &version->files[i]);
        free(version->files);
        free(version->slots);
}
