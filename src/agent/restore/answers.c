#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/restore/answers.h"
#include "agent/restore/slots_private.h"
#include "os/os.h"

#define NEW_QUESTION_NS (60 * SECOND_NS)
#define NONE_NS (10 * SECOND_NS)      /* ranks of one start ask so soon after each other. Later the first one may have copied a version to the path */
#define PATIENCE_NS (600 * SECOND_NS) /* ranks of one start do not ask later than that after each other: collectives would have failed */
#define ANSWERS_MAX 256               /* of a job; a program may ask for each tag */

static void drop(struct job *job, struct answer **link)
{
        struct answer *answer = *link;

        *link = answer->next;
        job->answers->count--;
        free(answer->path);
        free(answer->listed.tags);
        free(answer->ranks);
        free(answer);
}

void answers_end(struct job *job)
{
        while (job->answers->first)
                drop(job, &job->answers->first);
}

static uint32_t local_ranks(const struct session *session)
{
        uint32_t local_world = session->job->settings.local_world;

        return local_world ? local_world : session->world;
}

static bool is_own(const struct session *session, const struct version *version)
{
        return session->job == version->job ? ancestry_is_of_newest(version) : !strcmp(version->run, session->run);
}

/* Whether the session's run has, there. Its processes may have a session for each path. */
static bool has_committed(const struct session *session, const char *path)
{
        for (const struct job *job = session->job->lane->catalogue->jobs; job; job = job->next)
                for (const struct version *version = strcmp(job->persist_path, path) ? NULL : job->versions; version; version = version->next)
                        if (lifecycle_complete(version->life.state) && is_own(session, version))
                                return true;
        return false;
}

/* On several nodes the run may have committed a version of which this agent does not know. There the program agrees. */
bool answers_are_shared(const struct session *session, const char *path)
{
        const char *own = session->job->persist_path;

        return session->role == IPC_ROLE_TRAINER && local_ranks(session) > 1 && session->world <= local_ranks(session) &&
               !strcmp(session->run, ancestry_newest(session->job)) && !has_committed(session, own) &&
               (!*path || !strcmp(path, own) || !has_committed(session, path));
}

static bool has_got(const struct answer *answer, uint32_t rank)
{
        for (size_t i = 0; i < answer->rank_count; i++)
                if (answer->ranks[i] == rank)
                        return true;
        return false;
}

static bool has_full_turn(const struct session *session, const struct answer *answer)
{
        return answer->rank_count >= local_ranks(session);
}

static bool is_over(const struct session *session, const struct answer *answer)
{
        int64_t rested_ns = os->now_ns() - answer->last_ns;

        if (answer->is_none && has_got(answer, session->rank))
                return true; /* the program may have brought a version meanwhile */
        if (answer->is_earlier && (answer->was_full || has_got(answer, session->rank) || rested_ns >= PATIENCE_NS))
                return true;
        if (answer->was_full)
                return (has_full_turn(session, answer) ? os->now_ns() - answer->full_ns : rested_ns) >= NEW_QUESTION_NS;
        if (has_got(answer, session->rank))
                return rested_ns >= NEW_QUESTION_NS; /* the other ranks may never ask */
        return answer->is_none ? rested_ns >= NONE_NS : answer->is_list && rested_ns >= PATIENCE_NS;
}

/* The ranks of a job share the answer to it. */
struct question {
        const char *path, *tag;
        bool is_list;
};

static bool has_committed_before(const struct job *job)
{
        for (const struct version *version = job->versions; version; version = version->next)
                if (lifecycle_complete(version->life.state) && !strcmp(version->run, ancestry_newest(job)))
                        return true;
        return false;
}

/* A run begins again if a rank connects and no other one is connected: perhaps all have restarted, perhaps they come and go one by one. */
static void begin(struct job *job)
{
        struct job_answers *answers = job->answers;

        if (answers->run == ancestry_number(job))
                return;
        if (strcmp(answers->name, ancestry_newest(job)) != 0 || has_committed_before(job))
                answers_end(job);
        for (struct answer *answer = answers->first; answer; answer = answer->next)
                answer->is_earlier = true;
        answers->run = ancestry_number(job);
        strcpy(answers->name, ancestry_newest(job));
}

/* The link to the answer, or the one after the last. */
static struct answer **find(const struct session *session, const struct question *asked)
{
        struct job_answers *answers = session->job->answers;
        const char *path = strcmp(asked->path, session->job->persist_path) ? asked->path : "";
        struct answer **link = &answers->first;

        begin(session->job);
        while (*link && (strcmp((*link)->asked, asked->tag) || strcmp((*link)->path, path) || (*link)->is_list != asked->is_list))
                link = &(*link)->next;
        return link;
}

/* The answer that is still one; NULL: there is none. */
static struct answer *valid(const struct session *session, const struct question *asked)
{
        struct answer **link = find(session, asked);

        if (!*link || !is_over(session, *link))
                return *link;
        drop(session->job, link);
        return NULL;
}

/* NULL: no memory. */
static struct answer *add(const struct session *session, const struct question *asked)
{
        struct job_answers *answers = session->job->answers;
        struct answer *answer = calloc(1, sizeof *answer);

        if (!answer)
                return NULL;
        answer->path = strdup(strcmp(asked->path, session->job->persist_path) ? asked->path : "");
        if (!answer->path) {
                free(answer);
                return NULL;
        }
        strcpy(answer->asked, asked->tag);
        answer->is_list = asked->is_list;
        answer->last_ns = os->now_ns();
        if (answers->count == ANSWERS_MAX)
                drop(session->job, &answers->first);
        answers->count++;
        *find(session, asked) = answer;
        return answer;
}

static void note_rank(const struct session *session, struct answer *answer)
{
        uint32_t *grown;

        answer->is_earlier = false;
        if (has_got(answer, session->rank) && !has_full_turn(session, answer))
                return;
        if (has_full_turn(session, answer))
                answer->rank_count = 0;
        grown = realloc(answer->ranks, (answer->rank_count + 1) * sizeof *grown);
        if (!grown)
                return;
        answer->ranks = grown;
        grown[answer->rank_count++] = session->rank;
        answer->last_ns = os->now_ns();
        if (has_full_turn(session, answer) && !answer->was_full) {
                answer->was_full = true;
                answer->full_ns = answer->last_ns;
        }
}

static struct question question_of(const struct ipc_find *request)
{
        return (struct question){ .path = request->persist_path, .tag = request->tag };
}

enum answer_kind answers_given(const struct session *session, const struct ipc_find *request, struct ipc_found *ret_found)
{
        struct question asked = question_of(request);
        const struct answer *answer = valid(session, &asked);

        if (answer && !answer->is_none)
                *ret_found = answer->found;
        return !answer ? ANSWER_OPEN : answer->is_none ? ANSWER_NONE : ANSWER_VERSION;
}

/* is_given: its sequence may have changed since, now that storage was read. */
static bool is_answer(const struct answer *answer, const struct ipc_found *found, bool is_given)
{
        if (!found || answer->is_none)
                return !found && answer->is_none;
        return !strcmp(answer->found.tag, found->tag) && (is_given || answer->found.sequence == found->sequence);
}

bool answers_give(const struct session *session, const struct ipc_find *request, const struct ipc_found *found, bool was_given)
{
        struct question asked = question_of(request);
        struct answer *answer = *find(session, &asked);

        if (answer && !is_answer(answer, found, was_given))
                return false;
        if (!answer && (answer = add(session, &asked))) {
                answer->is_none = !found;
                if (found)
                        answer->found = *found;
        }
        if (!answer)
                return true;
        if (found)
                answer->found.sequence = found->sequence;
        note_rank(session, answer);
        return true;
}

bool answers_forget(const struct session *session, const struct ipc_find *request)
{
        struct question asked = question_of(request);
        struct answer **link = find(session, &asked);

        if (*link && ((*link)->was_full || (*link)->rank_count > 1 || !has_got(*link, session->rank)))
                return false;
        if (*link)
                drop(session->job, link);
        return true;
}

void answers_doubt(const struct session *session, const struct ipc_find *request)
{
        struct question asked = question_of(request);
        struct answer **link = find(session, &asked);

        if (*link)
                drop(session->job, link);
}

static int by_value(const void *a, const void *b)
{
        uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

        return (left > right) - (left < right);
}

void listed_sort(struct listed *listed)
{
        if (listed->count)
                qsort(listed->tags, listed->count, sizeof *listed->tags, by_value);
}

bool listed_has(const struct listed *listed, uint64_t tag)
{
        return listed->count && bsearch(&tag, listed->tags, listed->count, sizeof *listed->tags, by_value);
}

uint64_t listed_hash(const char *tag)
{
        uint64_t hash = 14695981039346656037u;

        for (; *tag; tag++)
                hash = (hash ^ (unsigned char)*tag) * 1099511628211u;
        return hash;
}

static bool copy_listed(const struct listed *from, struct listed *ret_listed)
{
        *ret_listed = (struct listed){ .tags = malloc((from->count + 1) * sizeof *from->tags), .count = from->count };
        if (ret_listed->tags && from->count)
                memcpy(ret_listed->tags, from->tags, from->count * sizeof *from->tags);
        return ret_listed->tags;
}

bool answers_listed(const struct session *session, const char *path, const struct listed *own, struct listed *ret_listed)
{
        struct question asked = { .path = path, .tag = "", .is_list = true };
        struct answer *answer = valid(session, &asked);

        if (!answer) {
                struct listed first;

                if (!copy_listed(own, &first) || !(answer = add(session, &asked))) {
                        free(first.tags);
                        return false;
                }
                answer->listed = first;
                answer->is_none = !own->count;
        }
        note_rank(session, answer);
        return copy_listed(&answer->listed, ret_listed);
}
