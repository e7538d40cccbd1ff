#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/peers/share.h"
#include "base/error.h"

bool share_holds(const struct agent_file *file)
{
        return file->image && !file->image->restored;
}

enum nebula_status share_describe(const struct version *version, struct peer_copy *ret_copy, struct nebula_error *error)
{
        *ret_copy = (struct peer_copy){ .id = version->id, .writing = version->writing, .sequence = version->sequence, .line = version->line,
                                        .world = version->world };
        strcpy(ret_copy->tag, version->tag);
        strcpy(ret_copy->run, version->run);
        ret_copy->files = calloc(version->file_count + 1, sizeof *ret_copy->files);
        ret_copy->ranks = calloc(version->part_count + 1, sizeof *ret_copy->ranks);
        if (!ret_copy->files || !ret_copy->ranks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe \"%.200s\"", version->tag);
        for (size_t i = 0; i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];
                struct peer_file *to = &ret_copy->files[ret_copy->file_count++];

                *to = (struct peer_file){ .size = file->size, .origin = file->origin, .rank = file->rank, .format = file->format,
                                          .held = share_holds(file) };
                strcpy(to->name, file->name);
        }
        for (size_t i = 0; i < version->part_count; i++)
                ret_copy->ranks[ret_copy->rank_count++] = version->parts[i].rank;
        return NEBULA_OK;
}
