/*
 * slots_private.h - the survival log of a version, as survival_log.c keeps it. The catalogue's lock
 * guards it. Only the files of this room see these structs (catalogue/room.h).
 */
#ifndef NB_AGENT_MEMORY_SLOTS_PRIVATE_H
#define NB_AGENT_MEMORY_SLOTS_PRIVATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct memory_file;

struct version_survival {
        bool is_logged;           /* it has a survival log */
        bool is_forgotten;        /* it gets none any more */
        struct memory_file *file; /* that log, for the thread that writes it; never NULL while `is_logged` is set */
        uint64_t bytes;           /* size of the log as this agent has described it; 0: begin a new log */
        uint64_t begun_bytes;     /* size of the log's first record */
        size_t file_count;        /* files of the version that the log already describes */
};

#endif
