#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/restore/answers.h"
#include "agent/restore/slots_private.h"
#include "os/os.h"

#define NEW_QUESTION_NS (60 * SECOND_NS)

static void drop(struct answer **link)
{
        struct answer *answer = *link;

        *link = answer->next;
        free(answer->ranks);
        free(answer);
}

void answers_end(struct job *job)
{
        while (job->answers->first)
                drop(&job->answers->first);
}

static uint32_t local_ranks(const struct session *session)
{
        uint32_t local_world = session->job->settings.local_world;

        return local_world ? local_world : session->world;
}

static bool has_committed(const struct job *job)
{
        for (const struct version *version = job->versions; version; version = version->next)
                if (lifecycle_complete(version->life.state) && ancestry_is_of_newest(version))
                        return true;
        return false;
}

bool answers_are_shared(const struct session *session, const struct ipc_find *request)
{
        const struct job *job = session->job;

        return session->role == IPC_ROLE_TRAINER && local_ranks(session) > 1 && !request->sequence &&
               (!*request->persist_path || !strcmp(request->persist_path, job->persist_path)) && !strcmp(session->run, ancestry_newest(job)) &&
               !has_committed(job);
}

static bool has_got(const struct answer *answer, uint32_t rank)
{
        for (size_t i = 0; i < answer->rank_count; i++)
                if (answer->ranks[i] == rank)
                        return true;
        return false;
}

/* The link to the answer, or the one after the last. */
static struct answer **find(const struct session *session, const struct ipc_find *request)
{
        struct job_answers *answers = session->job->answers;
        struct answer **link = &answers->first;

        if (answers->run != ancestry_number(session->job))
                answers_end(session->job);
        answers->run = ancestry_number(session->job);
        while (*link && strcmp((*link)->asked, request->tag))
                link = &(*link)->next;
        return link;
}

bool answers_given(const struct session *session, const struct ipc_find *request, struct ipc_found *ret_found)
{
        struct answer **link = find(session, request);

        if (*link && has_got(*link, session->rank) && os->now_ns() - (*link)->last_ns >= NEW_QUESTION_NS) {
                drop(link);
                return false;
        }
        if (!*link)
                return false;
        *ret_found = (*link)->found;
        return true;
}

bool answers_give(const struct session *session, const struct ipc_find *request, const struct ipc_found *found, bool was_given)
{
        struct answer **link = find(session, request), *answer = *link;
        uint32_t *grown;

        if (answer && !was_given && (strcmp(answer->found.tag, found->tag) || answer->found.sequence != found->sequence))
                return false;
        if (!answer && (answer = calloc(1, sizeof *answer))) {
                strcpy(answer->asked, request->tag);
                answer->found = *found;
                *link = answer;
        }
        if (answer)
                answer->found.sequence = found->sequence; /* it may have a new number, now that storage was read */
        if (!answer || has_got(answer, session->rank))
                return true;
        grown = realloc(answer->ranks, (answer->rank_count + 1) * sizeof *grown);
        if (!grown)
                return true;
        answer->ranks = grown;
        grown[answer->rank_count++] = session->rank;
        answer->last_ns = os->now_ns();
        return true;
}

bool answers_forget(const struct session *session, const struct ipc_find *request)
{
        struct answer **link = find(session, request);

        if (*link && ((*link)->rank_count > 1 || !has_got(*link, session->rank)))
                return false;
        if (*link)
                drop(link);
        return true;
}

void answers_doubt(const struct session *session, const struct ipc_find *request)
{
        struct answer **link = find(session, request);

        if (*link)
                drop(link);
}
