/*
 * nebula_mpi.h - Nebula for MPI jobs: collective calls, and arrays that another number of ranks can load.
 *
 * All functions are static and use only nebula.h and the program's own MPI. Each rank of the communicator calls them, in the same order, and
 * gets the same status; after a failure `ret_error` has the message of the lowest rank that failed.
 *
 *     nebula_mpi_open(MPI_COMM_WORLD, "/scratch/run7", &session, &error)
 *     nebula_mpi_latest(MPI_COMM_WORLD, session, &checkpoint, &error)       NEBULA_NOT_FOUND: begin from the start
 *     nebula_mpi_load_block(MPI_COMM_WORLD, checkpoint, "heat", &block, heat, &error)
 *     ...
 *     nebula_mpi_begin(MPI_COMM_WORLD, session, "step50", &checkpoint, &error)
 *     nebula_mpi_save_block(MPI_COMM_WORLD, checkpoint, "heat", &block, heat, &error)
 *     nebula_mpi_commit(MPI_COMM_WORLD, checkpoint, &error)                 waits for no copy and no storage
 *
 * A block is the part of a global array that one rank has. The blocks of a checkpoint cover the array, each element once. Each becomes a file
 * <name>.<rank> with the tensors "block" and "data", which torch.load reads, too.
 */
#ifndef NEBULA_MPI_H
#define NEBULA_MPI_H

#include <mpi.h>
#include <nebula.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* `size` elements from `from` of a global array in row-major order, in each dimension. A rank may have none: a size of 0. */
struct nebula_block {
        enum nebula_dtype dtype;
        uint32_t dim_count; /* at most NEBULA_MPI_DIM_MAX */
        uint64_t global[NEBULA_DIM_MAX], from[NEBULA_DIM_MAX], size[NEBULA_DIM_MAX];
};

#define NEBULA_MPI_DIM_MAX 8
#define NEBULA_MPI_NAME_MAX 200 /* bytes of an array's name */
#define NEBULA_MPI_NUMBERS (3 + 3 * NEBULA_MPI_DIM_MAX) /* how a block is described: ranks, dtype, dim_count, global, from, size */

#if defined(__GNUC__)
#define NEBULA_MPI_CALL static inline __attribute__((unused))
#else
#define NEBULA_MPI_CALL static inline
#endif

/* Gives all ranks the status of the lowest rank that failed, and its error. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_agree(MPI_Comm communicator, enum nebula_status status, struct nebula_error *ret_error)
{
        struct nebula_error said;
        int rank, world, first, mine;

        memset(&said, 0, sizeof said);
        if (status != NEBULA_OK && ret_error)
                said = *ret_error;
        MPI_Comm_rank(communicator, &rank);
        MPI_Comm_size(communicator, &world);
        mine = status == NEBULA_OK ? world : rank;
        MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, communicator);
        if (first == world)
                return NEBULA_OK;
        said.status = status;
        MPI_Bcast(&said, (int)sizeof said, MPI_BYTE, first, communicator);
        if (ret_error)
                *ret_error = said;
        return said.status;
}

NEBULA_MPI_CALL enum nebula_status nebula_mpi_fail(enum nebula_status status, const char *text, const char *name, struct nebula_error *ret_error)
{
        if (ret_error) {
                memset(ret_error, 0, sizeof *ret_error);
                ret_error->status = status;
                snprintf(ret_error->message, sizeof ret_error->message, "array \"%.200s\": %s", name, text);
        }
        return status;
}

/* Sets rank, world, local_rank, local_world and run. Call it after nebula_options_init. */
NEBULA_MPI_CALL void nebula_mpi_options(MPI_Comm communicator, struct nebula_options *options)
{
        static char run[64]; /* a new name at each start: what a killed start has left half saved is not completed by this one */
        MPI_Comm node;
        int rank, world, local_rank, local_world;

        MPI_Comm_rank(communicator, &rank);
        MPI_Comm_size(communicator, &world);
        MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
        MPI_Comm_rank(node, &local_rank);
        MPI_Comm_size(node, &local_world);
        MPI_Comm_free(&node);
        if (rank == 0 && !*run)
                snprintf(run, sizeof run, "%llx-%llx-%lx", (unsigned long long)time(NULL), (unsigned long long)(MPI_Wtime() * 1e6), (long)getpid());
        MPI_Bcast(run, (int)sizeof run, MPI_CHAR, 0, communicator);
        options->rank = (uint32_t)rank;
        options->world = (uint32_t)world;
        options->local_rank = (uint32_t)local_rank;
        options->local_world = (uint32_t)local_world;
        options->run = run;
}

NEBULA_MPI_CALL enum nebula_status nebula_mpi_open(MPI_Comm communicator, const char *persist_path, nebula_session **ret_session,
                                                   struct nebula_error *ret_error)
{
        struct nebula_options options;
        enum nebula_status status;

        nebula_options_init(&options);
        nebula_mpi_options(communicator, &options);
        options.persist_path = persist_path;
        *ret_session = NULL;
        status = nebula_mpi_agree(communicator, nebula_session_open(&options, ret_session, ret_error), ret_error);
        if (status != NEBULA_OK && *ret_session) {
                nebula_session_close(*ret_session);
                *ret_session = NULL;
        }
        return status;
}

NEBULA_MPI_CALL enum nebula_status nebula_mpi_begin(MPI_Comm communicator, nebula_session *session, const char *tag,
                                                    nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        enum nebula_status status;

        *ret_checkpoint = NULL;
        status = nebula_checkpoint_begin(session, tag, NEBULA_FILES_ALL_RANKS, ret_checkpoint, ret_error);
        status = nebula_mpi_agree(communicator, status, ret_error);
        if (status != NEBULA_OK && *ret_checkpoint) {
                nebula_checkpoint_free(*ret_checkpoint);
                *ret_checkpoint = NULL;
        }
        return status;
}

/* Closes the part of each rank. If a rank cannot, the checkpoint fails, and earlier ones stay. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_commit(MPI_Comm communicator, nebula_checkpoint *checkpoint, struct nebula_error *ret_error)
{
        struct nebula_error ignored;
        enum nebula_status status = nebula_mpi_agree(communicator, nebula_checkpoint_commit(checkpoint, ret_error), ret_error);

        if (status != NEBULA_OK)
                nebula_checkpoint_fail(checkpoint, "a rank could not commit", &ignored);
        return status;
}

/* A version that a rank has found. */
struct nebula_mpi_version {
        char tag[256];
        uint64_t sequence; /* 0: the rank has found none */
        uint32_t is_stored, unused;
};

/* The latest first. */
NEBULA_MPI_CALL int nebula_mpi_order(const void *left, const void *right)
{
        const struct nebula_mpi_version *a = (const struct nebula_mpi_version *)left, *b = (const struct nebula_mpi_version *)right;

        return a->sequence != b->sequence ? (a->sequence < b->sequence ? 1 : -1) : strcmp(a->tag, b->tag);
}

/* Opens the first of these versions that all ranks have. `versions` is the same on all ranks. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_first(MPI_Comm communicator, nebula_session *session, const struct nebula_mpi_version *versions,
                                                    int count, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        const struct nebula_mpi_version *stored = NULL;
        struct nebula_error why;

        for (int i = 0; i < count && versions[i].sequence; i++) {
                nebula_checkpoint *found = NULL;
                int has, all_have;

                if (i && !nebula_mpi_order(&versions[i], &versions[i - 1]))
                        continue;
                has = nebula_checkpoint_find_version(session, versions[i].tag, versions[i].sequence, NULL, &found, &why) == NEBULA_OK;
                MPI_Allreduce(&has, &all_have, 1, MPI_INT, MPI_MIN, communicator);
                if (all_have) {
                        *ret_checkpoint = found;
                        return NEBULA_OK;
                }
                nebula_checkpoint_free(found);
                if (versions[i].is_stored && !stored)
                        stored = &versions[i];
        }
        memset(&why, 0, sizeof why);
        why.status = stored ? NEBULA_UNAVAILABLE : NEBULA_NOT_FOUND;
        if (stored)
                snprintf(why.message, sizeof why.message, "storage has \"%.200s\" for some ranks, and no checkpoint is there for all: see that each node "
                         "sees the same storage", stored->tag);
        else
                snprintf(why.message, sizeof why.message, "there is no complete checkpoint that all ranks have");
        if (ret_error)
                *ret_error = why;
        return why.status;
}

/*
 * Finds the newest complete checkpoint that all ranks have: each rank searches, and all open the latest version found that each of them can open.
 * NEBULA_NOT_FOUND: there is none. NEBULA_UNAVAILABLE: storage has one for some ranks alone.
 */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_latest(MPI_Comm communicator, nebula_session *session, nebula_checkpoint **ret_checkpoint,
                                                     struct nebula_error *ret_error)
{
        struct nebula_mpi_version own, *all;
        nebula_checkpoint *found = NULL;
        enum nebula_state state;
        enum nebula_status searched, status;
        struct nebula_error why;
        int world;

        *ret_checkpoint = NULL;
        memset(&own, 0, sizeof own);
        MPI_Comm_size(communicator, &world);
        all = (struct nebula_mpi_version *)calloc((size_t)world, sizeof *all);
        searched = all ? nebula_checkpoint_latest(session, NULL, &found, ret_error) :
                         nebula_mpi_fail(NEBULA_NO_MEMORY, "no memory for the list of versions", "", ret_error);
        if (searched == NEBULA_OK) {
                snprintf(own.tag, sizeof own.tag, "%s", nebula_checkpoint_tag(found));
                own.sequence = nebula_checkpoint_sequence(found);
                own.is_stored = nebula_checkpoint_state(found, &state, &why) == NEBULA_OK && state == NEBULA_STATE_DURABLE;
        }
        status = nebula_mpi_agree(communicator, searched == NEBULA_NOT_FOUND ? NEBULA_OK : searched, ret_error);
        if (status == NEBULA_OK) {
                MPI_Allgather(&own, (int)sizeof own, MPI_BYTE, all, (int)sizeof own, MPI_BYTE, communicator);
                qsort(all, (size_t)world, sizeof *all, nebula_mpi_order);
                status = all[0].sequence ? nebula_mpi_first(communicator, session, all, world, ret_checkpoint, ret_error) :
                                           nebula_mpi_agree(communicator, searched, ret_error); /* no rank has found one */
        }
        if (status == NEBULA_OK && own.sequence == nebula_checkpoint_sequence(*ret_checkpoint) && !strcmp(own.tag, nebula_checkpoint_tag(*ret_checkpoint))) {
                nebula_checkpoint_free(*ret_checkpoint); /* the other one knows what the search has passed over */
                *ret_checkpoint = found;
                found = NULL;
        }
        nebula_checkpoint_free(found);
        free(all);
        return status;
}

/* Bytes of one element; 0: no such type. */
NEBULA_MPI_CALL uint64_t nebula_mpi_width(enum nebula_dtype dtype)
{
        switch (dtype) {
        case NEBULA_DTYPE_U8: case NEBULA_DTYPE_I8: case NEBULA_DTYPE_BOOL:
                return 1;
        case NEBULA_DTYPE_I16: case NEBULA_DTYPE_F16: case NEBULA_DTYPE_BF16:
                return 2;
        case NEBULA_DTYPE_I32: case NEBULA_DTYPE_F32:
                return 4;
        case NEBULA_DTYPE_I64: case NEBULA_DTYPE_F64: case NEBULA_DTYPE_C64:
                return 8;
        case NEBULA_DTYPE_C128:
                return 16;
        }
        return 0;
}

NEBULA_MPI_CALL int nebula_mpi_is_sound(const struct nebula_block *block)
{
        if (block->dim_count == 0 || block->dim_count > NEBULA_MPI_DIM_MAX || !nebula_mpi_width(block->dtype))
                return 0;
        for (uint32_t i = 0; i < block->dim_count; i++)
                if (block->from[i] > block->global[i] || block->size[i] > block->global[i] - block->from[i])
                        return 0;
        return 1;
}

NEBULA_MPI_CALL void nebula_mpi_describe(const struct nebula_block *block, int world, int64_t *ret_numbers)
{
        memset(ret_numbers, 0, NEBULA_MPI_NUMBERS * sizeof *ret_numbers);
        ret_numbers[0] = world;
        ret_numbers[1] = (int64_t)block->dtype;
        ret_numbers[2] = block->dim_count;
        for (uint32_t i = 0; i < block->dim_count; i++) {
                ret_numbers[3 + i] = (int64_t)block->global[i];
                ret_numbers[3 + NEBULA_MPI_DIM_MAX + i] = (int64_t)block->from[i];
                ret_numbers[3 + 2 * NEBULA_MPI_DIM_MAX + i] = (int64_t)block->size[i];
        }
}

/* Returns 0 if the numbers describe no block. */
NEBULA_MPI_CALL int nebula_mpi_parse(const int64_t *numbers, struct nebula_block *ret_block)
{
        memset(ret_block, 0, sizeof *ret_block);
        ret_block->dtype = (enum nebula_dtype)numbers[1];
        if (numbers[2] < 1 || numbers[2] > NEBULA_MPI_DIM_MAX)
                return 0;
        ret_block->dim_count = (uint32_t)numbers[2];
        for (uint32_t i = 0; i < ret_block->dim_count; i++) {
                ret_block->global[i] = (uint64_t)numbers[3 + i];
                ret_block->from[i] = (uint64_t)numbers[3 + NEBULA_MPI_DIM_MAX + i];
                ret_block->size[i] = (uint64_t)numbers[3 + 2 * NEBULA_MPI_DIM_MAX + i];
        }
        return nebula_mpi_is_sound(ret_block);
}

/* The file of a rank. A name that were cut off could be that of another array. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_file(const char *name, int rank, char ret_file[256], struct nebula_error *ret_error)
{
        if (strlen(name) > NEBULA_MPI_NAME_MAX)
                return nebula_mpi_fail(NEBULA_INVALID, "its name is longer than 200 bytes", name, ret_error);
        snprintf(ret_file, 256, "%.200s.%d", name, rank);
        return NEBULA_OK;
}

/* Saves the block of each rank. `data`: its elements, without gaps, in row-major order. The program may change them after the call. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_save_block(MPI_Comm communicator, nebula_checkpoint *checkpoint, const char *name,
                                                         const struct nebula_block *block, const void *data, struct nebula_error *ret_error)
{
        struct nebula_tensor tensors[2];
        int64_t numbers[NEBULA_MPI_NUMBERS];
        enum nebula_status status = NEBULA_OK;
        char file[256];
        int rank, world;

        MPI_Comm_rank(communicator, &rank);
        MPI_Comm_size(communicator, &world);
        if (!nebula_mpi_is_sound(block))
                status = nebula_mpi_fail(NEBULA_INVALID, "the block does not lie within the global array, or has no known type", name, ret_error);
        if (status == NEBULA_OK)
                status = nebula_mpi_file(name, rank, file, ret_error);
        if (status == NEBULA_OK) {
                nebula_mpi_describe(block, world, numbers);
                memset(tensors, 0, sizeof tensors);
                tensors[0].name = "block", tensors[0].dtype = NEBULA_DTYPE_I64, tensors[0].dim_count = 1;
                tensors[0].shape[0] = NEBULA_MPI_NUMBERS, tensors[0].data = numbers;
                tensors[1].name = "data", tensors[1].dtype = block->dtype, tensors[1].dim_count = block->dim_count, tensors[1].data = data;
                for (uint32_t i = 0; i < block->dim_count; i++)
                        tensors[1].shape[i] = block->size[i];
                status = nebula_checkpoint_save_tensors(checkpoint, file, tensors, 2, ret_error);
        }
        return nebula_mpi_agree(communicator, status, ret_error);
}

/* Reads the description of the block that rank `rank` of the saving job had. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_read_block(nebula_checkpoint *checkpoint, const char *name, int rank, int64_t *ret_numbers,
                                                         struct nebula_error *ret_error)
{
        struct nebula_tensor found;
        struct nebula_part part;
        nebula_map *map = NULL;
        enum nebula_status status;
        char file[256];

        status = nebula_mpi_file(name, rank, file, ret_error);
        if (status == NEBULA_OK)
                status = nebula_checkpoint_map_lazily(checkpoint, file, &map, ret_error);
        if (status == NEBULA_OK)
                status = nebula_map_fetch_headers(map, ret_error);
        if (status == NEBULA_OK)
                status = nebula_map_tensor(map, "block", &found, ret_error);
        if (status == NEBULA_OK && (found.dtype != NEBULA_DTYPE_I64 || found.dim_count != 1 || found.shape[0] != NEBULA_MPI_NUMBERS))
                status = nebula_mpi_fail(NEBULA_CORRUPT, "a file does not say which block it has", name, ret_error);
        if (status == NEBULA_OK) {
                part.offset = (uint64_t)((const char *)found.data - (const char *)nebula_map_data(map));
                part.size = NEBULA_MPI_NUMBERS * sizeof *ret_numbers;
                part.data = ret_numbers;
                status = nebula_map_read(map, &part, 1, ret_error);
        }
        nebula_map_free(map);
        return status;
}

/* The runs of elements that lie in both blocks: where they begin in the saved block and in ours. Returns their number; `ret_parts` may be NULL. */
NEBULA_MPI_CALL size_t nebula_mpi_overlap(const struct nebula_block *saved, const struct nebula_block *own, uint64_t offset, char *data,
                                          struct nebula_part *ret_parts)
{
        uint64_t width = nebula_mpi_width(own->dtype), from[NEBULA_MPI_DIM_MAX], end[NEBULA_MPI_DIM_MAX], at[NEBULA_MPI_DIM_MAX];
        uint32_t last = own->dim_count - 1, i;
        size_t count = 0;

        for (i = 0; i <= last; i++) {
                uint64_t saved_end = saved->from[i] + saved->size[i], own_end = own->from[i] + own->size[i];

                from[i] = saved->from[i] > own->from[i] ? saved->from[i] : own->from[i];
                end[i] = saved_end < own_end ? saved_end : own_end;
                if (from[i] >= end[i])
                        return 0;
                at[i] = from[i];
        }
        for (;;) {
                uint64_t in_saved = 0, in_own = 0;

                for (i = 0; i <= last; i++) {
                        in_saved = in_saved * saved->size[i] + at[i] - saved->from[i];
                        in_own = in_own * own->size[i] + at[i] - own->from[i];
                }
                if (ret_parts) {
                        ret_parts[count].offset = offset + in_saved * width;
                        ret_parts[count].size = (end[last] - from[last]) * width;
                        ret_parts[count].data = data + in_own * width;
                }
                count++;
                for (i = last; i > 0 && ++at[i - 1] == end[i - 1]; i--)
                        at[i - 1] = from[i - 1];
                if (i == 0)
                        return count;
        }
}

/* The blocks of which an array consists that no saved block has been found to have. */
struct nebula_mpi_rest {
        struct nebula_block *blocks;
        size_t count;
};

/* The parts of `block` that `saved` does not have, to ret_parts, which has room for two for each dimension. Returns their number. */
NEBULA_MPI_CALL size_t nebula_mpi_without(const struct nebula_block *block, const struct nebula_block *saved, struct nebula_block *ret_parts)
{
        struct nebula_block left = *block;
        size_t count = 0;

        ret_parts[0] = *block;
        for (uint32_t i = 0; i < block->dim_count; i++)
                if (saved->from[i] + saved->size[i] <= block->from[i] || block->from[i] + block->size[i] <= saved->from[i] || !saved->size[i])
                        return 1;
        for (uint32_t i = 0; i < block->dim_count; i++) {
                uint64_t begin = saved->from[i], end = begin + saved->size[i], left_end = left.from[i] + left.size[i];

                if (begin > left.from[i]) {
                        ret_parts[count] = left;
                        ret_parts[count++].size[i] = begin - left.from[i];
                        left.from[i] = begin;
                }
                if (end < left_end) {
                        ret_parts[count] = left;
                        ret_parts[count].from[i] = end;
                        ret_parts[count++].size[i] = left_end - end;
                        left_end = end;
                }
                left.size[i] = left_end - left.from[i];
        }
        return count;
}

/* Takes what `saved` has from the rest. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_take(struct nebula_mpi_rest *rest, const struct nebula_block *saved, const char *name,
                                                   struct nebula_error *ret_error)
{
        struct nebula_block parts[2 * NEBULA_MPI_DIM_MAX], *grown;
        struct nebula_mpi_rest left = { NULL, 0 };

        for (size_t i = 0; i < rest->count; i++) {
                size_t count = nebula_mpi_without(&rest->blocks[i], saved, parts);

                grown = (struct nebula_block *)realloc(left.blocks, (left.count + count + 1) * sizeof *grown);
                if (!grown) {
                        free(left.blocks);
                        return nebula_mpi_fail(NEBULA_NO_MEMORY, "no memory for the list of its blocks", name, ret_error);
                }
                left.blocks = grown;
                memcpy(left.blocks + left.count, parts, count * sizeof *parts);
                left.count += count;
        }
        free(rest->blocks);
        *rest = left;
        return NEBULA_OK;
}

/* Reads what the file of one saved block has of ours, and nothing else. */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_read_data(nebula_checkpoint *checkpoint, const char *name, int rank, const struct nebula_block *saved,
                                                        const struct nebula_block *own, char *data, struct nebula_error *ret_error)
{
        size_t count = nebula_mpi_overlap(saved, own, 0, data, NULL);
        struct nebula_part *parts;
        struct nebula_tensor found;
        nebula_map *map = NULL;
        enum nebula_status status;
        char file[256];

        if (!count)
                return NEBULA_OK;
        parts = (struct nebula_part *)malloc(count * sizeof *parts);
        if (!parts)
                return nebula_mpi_fail(NEBULA_NO_MEMORY, "no memory for the list of its runs", name, ret_error);
        status = nebula_mpi_file(name, rank, file, ret_error);
        if (status == NEBULA_OK)
                status = nebula_checkpoint_map_lazily(checkpoint, file, &map, ret_error);
        if (status == NEBULA_OK)
                status = nebula_map_fetch_headers(map, ret_error);
        if (status == NEBULA_OK)
                status = nebula_map_tensor(map, "data", &found, ret_error);
        if (status == NEBULA_OK && (found.dtype != saved->dtype || found.dim_count != saved->dim_count ||
                                    memcmp(found.shape, saved->size, saved->dim_count * sizeof *saved->size)))
                status = nebula_mpi_fail(NEBULA_CORRUPT, "a file has other data than the block that it names", name, ret_error);
        if (status == NEBULA_OK) {
                nebula_mpi_overlap(saved, own, (uint64_t)((const char *)found.data - (const char *)nebula_map_data(map)), data, parts);
                status = nebula_map_read(map, parts, count, ret_error);
        }
        nebula_map_free(map);
        free(parts);
        return status;
}

/*
 * Loads each rank's block of an array that any number of ranks has saved. A rank reads only what it needs. NEBULA_INVALID: the checkpoint has
 * an array of another type or shape. NEBULA_CORRUPT: its blocks do not cover this one. If blocks overlap, an element is that of the last rank
 * that saved it.
 */
NEBULA_MPI_CALL enum nebula_status nebula_mpi_load_block(MPI_Comm communicator, nebula_checkpoint *checkpoint, const char *name,
                                                         const struct nebula_block *block, void *data, struct nebula_error *ret_error)
{
        enum nebula_status status = NEBULA_OK;
        int64_t first[NEBULA_MPI_NUMBERS], *all = NULL;
        struct nebula_mpi_rest rest = { NULL, 0 };
        int is_empty = 0;
        int rank, world, saved_world = 0, *counts = NULL, *places = NULL;

        MPI_Comm_rank(communicator, &rank);
        MPI_Comm_size(communicator, &world);
        if (!nebula_mpi_is_sound(block))
                status = nebula_mpi_fail(NEBULA_INVALID, "the block does not lie within the global array, or has no known type", name, ret_error);
        if (rank == 0 && status == NEBULA_OK)
                status = nebula_mpi_read_block(checkpoint, name, 0, first, ret_error);
        if (rank == 0 && status == NEBULA_OK && (first[0] < 1 || first[0] > 1 << 24))
                status = nebula_mpi_fail(NEBULA_CORRUPT, "a file names an impossible number of ranks", name, ret_error);
        status = nebula_mpi_agree(communicator, status, ret_error);
        if (status != NEBULA_OK)
                return status;
        if (rank == 0)
                saved_world = (int)first[0];
        MPI_Bcast(&saved_world, 1, MPI_INT, 0, communicator);
        /* Each rank reads its share of the descriptions, and all get them. */
        all = (int64_t *)malloc((size_t)saved_world * sizeof first);
        counts = (int *)malloc((size_t)world * sizeof *counts);
        places = (int *)malloc((size_t)world * sizeof *places);
        if (!all || !counts || !places)
                status = nebula_mpi_fail(NEBULA_NO_MEMORY, "no memory for the list of its blocks", name, ret_error);
        for (int i = 0; i < world && status == NEBULA_OK; i++) {
                int begin = (int)((int64_t)saved_world * i / world), end = (int)((int64_t)saved_world * (i + 1) / world);

                counts[i] = (end - begin) * NEBULA_MPI_NUMBERS;
                places[i] = begin * NEBULA_MPI_NUMBERS;
                for (int k = begin; i == rank && k < end && status == NEBULA_OK; k++)
                        status = nebula_mpi_read_block(checkpoint, name, k, all + (size_t)k * NEBULA_MPI_NUMBERS, ret_error);
        }
        for (uint32_t i = 0; i < block->dim_count; i++)
                is_empty = is_empty || !block->size[i];
        if (status == NEBULA_OK && !is_empty) {
                rest.blocks = (struct nebula_block *)malloc(sizeof *rest.blocks);
                rest.count = rest.blocks != NULL;
                if (rest.blocks)
                        rest.blocks[0] = *block;
                else
                        status = nebula_mpi_fail(NEBULA_NO_MEMORY, "no memory for the list of its blocks", name, ret_error);
        }
        status = nebula_mpi_agree(communicator, status, ret_error);
        if (status == NEBULA_OK)
                MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, counts, places, MPI_INT64_T, communicator);
        for (int k = 0; k < saved_world && status == NEBULA_OK; k++) {
                struct nebula_block saved;

                if (!nebula_mpi_parse(all + (size_t)k * NEBULA_MPI_NUMBERS, &saved))
                        status = nebula_mpi_fail(NEBULA_CORRUPT, "a file names an impossible block", name, ret_error);
                else if (saved.dtype != block->dtype || saved.dim_count != block->dim_count ||
                         memcmp(saved.global, block->global, block->dim_count * sizeof *saved.global))
                        status = nebula_mpi_fail(NEBULA_INVALID, "the checkpoint has it with another type or shape", name, ret_error);
                if (status == NEBULA_OK)
                        status = nebula_mpi_read_data(checkpoint, name, k, &saved, block, (char *)data, ret_error);
                if (status == NEBULA_OK)
                        status = nebula_mpi_take(&rest, &saved, name, ret_error);
        }
        if (status == NEBULA_OK && rest.count)
                status = nebula_mpi_fail(NEBULA_CORRUPT, "the blocks of the checkpoint do not cover it", name, ret_error);
        free(rest.blocks);
        free(all);
        free(counts);
        free(places);
        return nebula_mpi_agree(communicator, status, ret_error);
}

#endif
