#include "agent/memory/memory.h"
#include "agent/memory/memory_files.h"
#include "agent/memory/slots_private.h"
#include "agent/memory/survival_log.h"
#include "agent/rooms.h"

static void version_ends(struct version *version)
{
        memory_file_drop(version->survival->file);
}

const struct room memory_room = {
        .version_slots = { { offsetof(struct version, survival), sizeof(struct version_survival) } },
        .version_ends = version_ends,
        .describe = survival_log_write,
        .file_failed = survival_log_mend,
};
