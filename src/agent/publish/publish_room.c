#include "agent/memory/memory_files.h"
#include "agent/publish/publish.h"
#include "agent/publish/publish_list.h"
#include "agent/rooms.h"

static bool job_works(const struct job *job)
{
        return job->publishes != NULL;
}

/* A file with a struct memory_file is a survival log. */
static void file_failed(struct catalogue *catalogue, const struct memory_file_task *failed)
{
        (void)catalogue;
        if (!failed->file)
                publish_lose_list(failed->result);
}

const struct room publish_room = { .job_works = job_works, .file_failed = file_failed };
