/*
 * room.h - what the catalogue asks of the other rooms, which it does not know.
 *
 * Each room keeps its own fields of a job or a version in a slot: a struct that <room>/slots_private.h declares, so that no other room can
 * change it. The catalogue makes the slots, zeroed, together with the job or version. It calls the functions of all rooms, in the
 * order of their list (agent/rooms.c), with its lock held. A NULL function is not called.
 */
#ifndef NB_AGENT_CATALOGUE_ROOM_H
#define NB_AGENT_CATALOGUE_ROOM_H

#include <stdbool.h>
#include <stddef.h>

#define ROOM_SLOTS 2

struct catalogue;
struct job;
struct memory_file_task;
struct version;

struct slot {
        size_t at, size; /* at: of the pointer to it, in struct job or struct version; size 0: there is no slot */
};
struct room {
        struct slot job_slots[ROOM_SLOTS], version_slots[ROOM_SLOTS];
        void (*job_begins)(struct job *job);
        /* A trainer's settings were applied. */
        void (*job_configured)(const struct catalogue *catalogue, struct job *job);
        /* Whether the room has work for the job. */
        bool (*job_works)(const struct job *job);
        void (*job_ends)(struct job *job);
        void (*version_begins)(struct version *version); /* not yet in the job's list */
        void (*version_leaves_memory)(struct version *version);
        void (*version_ends)(struct version *version);
        /* The lock is about to be released: describe the marked version for the next agent. */
        void (*describe)(struct catalogue *catalogue, struct version *version);
        /* A file of the memory directory could not be written. The caller frees the task. */
        void (*file_failed)(struct catalogue *catalogue, const struct memory_file_task *failed);
        void (*catalogue_ends)(struct catalogue *catalogue);
};

/* A zeroed struct job or version of `size` bytes with its slots; free() frees it. NULL: no memory. */
void *room_new_job(const struct room *const *rooms, size_t size);
void *room_new_version(const struct room *const *rooms, size_t size);

#endif
