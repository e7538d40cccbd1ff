/*
 * files.h - the files of a version, found by name: there may be tens of thousands. Pointers to a file are valid until the next file is
 * added. The catalogue's lock guards them.
 */
#ifndef NB_AGENT_CATALOGUE_FILES_H
#define NB_AGENT_CATALOGUE_FILES_H

#include "ipc/ipc.h"

struct catalogue;
struct image;
struct version;

struct agent_file {
        char name[IPC_NAME_MAX];
        uint32_t rank;
        enum ipc_format format;
        uint64_t size, origin;      /* origin: the sequence of the earlier version that wrote the file; 0: this version writes it */
        struct image *image;        /* NULL: only storage has the file */
        struct image *sparse;       /* has the chunks of the stored file that trainers asked for; NULL: none (restore_chunks.c) */
        uint64_t *chunks;           /* checksums of its chunks; NULL until sealed */
        size_t chunk_count;
        bool stored;                /* storage is known to have the file */
        bool reading;               /* a thread is reading it back from storage */
        bool lent;                  /* a trainer has read it from storage by itself */
};

struct agent_file *version_file(struct version *version, const char *name); /* NULL: there is none */
/* The name must be new; the file is zeroed. NULL: an allocation failed. */
struct agent_file *version_file_add(struct version *version, const char *name);
void version_file_done(struct catalogue *catalogue, struct agent_file *file); /* frees its image and checksums; the file stays in the list */
/* version_file_done and version_mark_files: another file takes its place. */
void version_file_change(struct catalogue *catalogue, struct version *version, struct agent_file *file);
void version_files_done(struct catalogue *catalogue, struct version *version);

#endif
