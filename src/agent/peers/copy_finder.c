#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/retention.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/peers/copy_finder.h"
#include "agent/peers/joint_read.h"
#include "agent/peers/replica_private.h"
#include "agent/peers/slots_private.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define ASKED_AT_ONCE 16              /* a node that is gone uses all of this time */
#define LOCATING_NS (10 * SECOND_NS)  /* as PEER_LISTING_NS, where storage has the file, too: nodes that are gone cost time at each listing */
#define GATHERING_NODES 16u           /* in a job of at most so many nodes, each asks all others */

static void peer_copies_clear(struct peer_copies *peers)
{
        for (size_t i = 0; i < peers->count; i++)
                peer_listing_done(&peers->members[i].listing);
        free(peers->members);
        peers->members = NULL;
        peers->count = 0;
}

void replica_forget(struct replica *replica, const struct job *job)
{
        joint_forget(replica, job);
        lock_take(&replica->peer_copies_lock);
        for (struct peer_copies **link = &replica->peer_copies, *peers; (peers = *link);) {
                if (job && peers->job != job) {
                        link = &peers->next;
                        continue;
                }
                *link = peers->next;
                peer_copies_clear(peers);
                free(peers);
        }
        lock_give(&replica->peer_copies_lock);
}

static enum nebula_status ask_listing_once(const struct member *member, const struct tls_key *key, const struct peer_hello *hello,
                                           uint64_t own_nonce, struct peer_listing *ret_listing, struct nebula_error *error)
{
        struct peer *peer;
        enum nebula_status status = peer_open(member, key, hello, &peer, error);

        if (status)
                return status;
        if (peer->hello.nonce == own_nonce) {
                peer_free(peer);
                return error_set(error, NEBULA_NOT_FOUND, 0, "the peer is this node itself");
        }
        status = peer_send(peer, PEER_LIST, "", 0, error);
        if (!status)
                status = peer_receive(peer, error);
        if (!status && peer->header.type != PEER_LISTED)
                status = error_set(error, NEBULA_CORRUPT, 0, "the peer sent a frame of type %u instead of a listing", (unsigned)peer->header.type);
        if (!status)
                status = peer_listing_parse(peer->body, peer->header.size, ret_listing, error);
        peer_free(peer);
        return status;
}

/* A connection that breaks must not cost all copies of a node: the job would go on from an older version. A node that is gone is asked once, as
 * that takes time. */
static enum nebula_status ask_listing(const struct member *member, const struct tls_key *key, const struct peer_hello *hello,
                                      uint64_t own_nonce, struct peer_listing *ret_listing, struct nebula_error *error)
{
        int64_t begun_ns = os->now_ns();
        enum nebula_status status = ask_listing_once(member, key, hello, own_nonce, ret_listing, error);

        if (!status || status == NEBULA_NOT_FOUND || os->now_ns() - begun_ns > SECOND_NS)
                return status;
        return ask_listing_once(member, key, hello, own_nonce, ret_listing, error);
}

struct question {
        struct replica *replica;
        const struct job *job;
        struct store *store; /* the job's; NULL: it has none */
        const struct tls_key *key;
        const struct peer_hello *hello;
        const char *name; /* of the member; NULL: this node */
        bool is_spare;
        struct member_copies found;
        enum nebula_status status;
        struct nebula_error error;
};

/* Asks this node at its own listener: a copy that it keeps for another node may be one that the other has lost. */
static void ask_own(struct question *question)
{
        struct replica *replica = question->replica;
        struct member_copies *found = &question->found;

        lock_take(&replica->own_lock);
        found->member = replica->own;
        lock_give(&replica->own_lock);
        question->status = !found->member.port ? NEBULA_NOT_FOUND /* it was not opened yet */ :
                           ask_listing(&found->member, question->key, question->hello, 0, &found->listing, &question->error);
}

static void *ask_one(void *argument)
{
        struct question *question = argument;
        struct member_copies *found = &question->found;

        if (!question->name) {
                ask_own(question);
                return NULL;
        }
        question->status = member_load(question->store, question->name, question->is_spare, &found->member, &question->error);
        if (!question->status)
                question->status = ask_listing(&found->member, question->key, question->hello, question->replica->catalogue->agent_nonce,
                                               &found->listing, &question->error);
        if (question->status == NEBULA_UNAVAILABLE && !question->hello->is_reader)
                member_remove_gone(question->store, question->name, question->is_spare, question->replica->node);
        return NULL;
}

static void ask_at_once(struct question *questions, size_t count)
{
        pthread_t threads[ASKED_AT_ONCE];
        bool started[ASKED_AT_ONCE];

        for (size_t i = 0; i < count; i++) {
                started[i] = !os_thread_start(&threads[i], ask_one, &questions[i], false);
                if (!started[i])
                        ask_one(&questions[i]);
        }
        for (size_t i = 0; i < count; i++)
                if (started[i])
                        pthread_join(threads[i], NULL);
}

/* Adds the answers, in the order of the questions. */
static void peer_copies_add(struct peer_copies *peers, const struct question *questions, size_t count)
{
        for (size_t i = 0; i < count; i++) {
                if (!questions[i].status)
                        peers->members[peers->count++] = questions[i].found;
                else if (questions[i].status != NEBULA_NOT_FOUND)
                        log_event(LOG_LEVEL_WARN, "the agent could not learn which copies node \"%s\" holds: %s",
                                  questions[i].name ? questions[i].name : questions[i].replica->node, questions[i].error.message);
        }
}

/* peer_copies_lock held. Asks this node, and then every member, in the order in which the lost copies are likely to be found. */
static enum nebula_status peer_copies_fill(struct replica *replica, struct peer_copies *peers, struct nebula_error *error)
{
        struct job *job = peers->job;
        bool only_reads = replica_only_reads(replica, job);
        struct peer_hello *hello = replica_hello(replica, job, only_reads);
        struct question *questions = calloc(ASKED_AT_ONCE, sizeof *questions);
        struct member_list members = { 0 };
        size_t *order = NULL, count = 0, at = 0;
        struct store *store = NULL;
        struct tls_key key;
        int64_t until = os->now_ns() + ASKING_NS;
        enum nebula_status status = hello && questions ? replica_store(replica, job, &store, error) :
                                                         error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");

        peer_copies_clear(peers);
        if (!status)
                status = secret_take(store, !only_reads, &key, error);
        if (status && only_reads) /* this user may read the storage, and may not ask the agents of the job */
                status = NEBULA_NOT_FOUND;
        if (!status)
                status = replica_members(replica, store, &members, &order, &count, error);
        if (!status) {
                peers->members = calloc(count + 1, sizeof *peers->members);
                if (!peers->members)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of copies");
        }
        if (!status) {
                questions[0] = (struct question){ replica, job, store, &key, hello, NULL };
                ask_at_once(questions, 1);
                peer_copies_add(peers, questions, 1);
        }
        while (!status && at < count && os->now_ns() <= until) {
                size_t some = 0;

                for (; some < ASKED_AT_ONCE && at < count; some++, at++)
                        questions[some] = (struct question){ replica, job, store, &key, hello, members.names[order[at]], order[at] >= members.count };
                ask_at_once(questions, some);
                peer_copies_add(peers, questions, some);
        }
        if (!status && at < count)
                log_event(LOG_LEVEL_WARN, "the agent did not ask %zu of %zu nodes for copies: its time for that was up", count - at, count);
        peers->at_ns = os->now_ns();
        free(order);
        free(questions);
        member_list_done(&members);
        free(hello);
        return status;
}

enum nebula_status peer_copies_get(struct replica *replica, struct job *job, int64_t oldest_ns, struct peer_copies **ret_peers, struct nebula_error *error)
{
        struct peer_copies *peers = replica->peer_copies;
        enum nebula_status status = NEBULA_OK;

        while (peers && peers->job != job)
                peers = peers->next;
        if (!peers) {
                peers = calloc(1, sizeof *peers);
                if (!peers)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of copies");
                peers->job = job;
                peers->at_ns = INT64_MIN / 2;
                peers->next = replica->peer_copies;
                replica->peer_copies = peers;
        }
        if (os->now_ns() - peers->at_ns > oldest_ns)
                status = peer_copies_fill(replica, peers, error);
        *ret_peers = peers;
        return status;
}

/* The ranks of one node. Copies must have files of at least one of them. */
struct share {
        uint32_t first, count;
};

static struct share share_of(const struct session *session, const struct job *job)
{
        uint32_t count = job->settings.local_world ? job->settings.local_world : 1;

        return (struct share){ session->rank / count * count, count };
}

static bool is_of(const struct share *share, uint32_t rank)
{
        return rank >= share->first && rank - share->first < share->count;
}

bool replica_serves(const struct session *session, const struct version *version)
{
        struct share share;

        if (!version->is_remote || !session)
                return version->is_remote;
        if (session->role == IPC_ROLE_READER)
                return version->copies->world_heard > 0;
        share = share_of(session, version->job);
        if (version->world <= share.count)
                return true;
        for (size_t i = 0; i < version->file_count; i++)
                if (is_of(&share, version->files[i].rank))
                        return true;
        return false;
}

bool copy_is_of(const struct peer_copy *copy, const char *tag, uint64_t sequence)
{
        return copy->sequence == sequence && !strcmp(copy->tag, tag);
}

/* Whether the copies of all members, of the version that `one` is a share of, serve the session. */
static bool copies_serve(const struct peer_copies *peers, const struct peer_copy *one, const struct share *share)
{
        if (one->world <= share->count)
                return true;
        for (size_t i = 0; i < peers->count; i++)
                for (size_t j = 0; j < peers->members[i].listing.count; j++) {
                        const struct peer_copy *copy = &peers->members[i].listing.copies[j];

                        for (size_t k = 0; copy_is_of(copy, one->tag, one->sequence) && k < copy->file_count; k++)
                                if (is_of(share, copy->files[k].rank))
                                        return true;
                }
        return false;
}

/* Whether the copies of all members have the shares of all ranks: a reader loads the whole version, or not at all. */
static bool copies_are_whole(const struct peer_copies *peers, const struct peer_copy *one)
{
        uint8_t *has = calloc(one->world / 8 + 1, 1);
        uint32_t count = 0;

        for (size_t i = 0; has && i < peers->count; i++)
                for (size_t j = 0; j < peers->members[i].listing.count; j++) {
                        const struct peer_copy *copy = &peers->members[i].listing.copies[j];

                        for (size_t k = 0; copy_is_of(copy, one->tag, one->sequence) && k < copy->rank_count; k++) {
                                uint32_t rank = copy->ranks[k];

                                if (rank >= one->world || has[rank / 8] & 1u << rank % 8)
                                        continue;
                                has[rank / 8] |= (uint8_t)(1u << rank % 8);
                                count++;
                        }
                }
        free(has);
        return count == one->world;
}

/* share NULL: a reader asks. */
static bool serves(const struct peer_copies *peers, const struct peer_copy *one, const struct share *share)
{
        return share ? copies_serve(peers, one, share) : copies_are_whole(peers, one);
}

static const struct peer_copy *newest_copy(const struct peer_copies *peers, const struct ipc_find *wanted, const struct share *share)
{
        const char *tag = wanted->tag;
        const struct peer_copy *best = NULL;
        struct order_best newest = { 0 };

        for (size_t i = 0; i < peers->count; i++)
                for (size_t j = 0; j < peers->members[i].listing.count; j++) {
                        const struct peer_copy *copy = &peers->members[i].listing.copies[j];
                        const struct order_entry entry = order_entry(copy->tag, copy->sequence, &copy->line);

                        if ((*tag && strcmp(tag, copy->tag)) || !version_wanted(wanted, copy->sequence))
                                continue;
                        if (best && *tag && copy->sequence <= best->sequence)
                                continue;
                        if (!serves(peers, copy, share))
                                continue;
                        best = copy;
                        order_add(&newest, &entry, copy);
                }
        return *tag ? best : order_best(&newest, NULL);
}

/* A copy of it that any member has; NULL: none. */
static const struct peer_copy *any_copy(const struct peer_copies *peers, const char *tag, uint64_t sequence)
{
        for (size_t i = 0; i < peers->count; i++)
                for (size_t j = 0; j < peers->members[i].listing.count; j++)
                        if (copy_is_of(&peers->members[i].listing.copies[j], tag, sequence))
                                return &peers->members[i].listing.copies[j];
        return NULL;
}

/* This node's version of the same writing, even without its memory, or one that a peer learned to be complete before this node did. */
static struct version *own_share(const struct job *job, const struct peer_copy *copy)
{
        struct version *own = job->versions;

        while (own && (own->is_remote || !(copy_is_of(copy, own->tag, own->sequence) ||
                                        (!own->sequence && !strcmp(own->tag, copy->tag) && !strcmp(own->run, copy->run)))))
                own = own->next;
        return own;
}

/* Puts the version behind this node's own share. The search for the newest version of a tag begins at the head of the list, and the
 * next save of the tag must find the own share. */
static void put_behind(struct version *version, struct version *own)
{
        struct job *job = version->job;

        job->versions = version->next;
        version->next = own->next;
        own->next = version;
        if (own->is_tombstone)
                return;
        job->live = version->next_live;
        version->next_live = own->next_live;
        own->next_live = version;
}

/* A member that holds a file knows more about it than one that only learned of it. */
static void learn_file(struct version *version, const struct peer_file *what)
{
        struct agent_file *file = version_file(version, what->name);

        if (file && (!what->held || file->image || file->reading))
                return;
        if (!file)
                file = version_file_add(version, what->name);
        if (!file)
                return;
        file->rank = what->rank;
        file->format = what->format;
        file->size = what->size;
        file->origin = what->origin;
}

/* Lock held. One version with the files of all nodes' copies of it. */
static struct version *remote_version(struct catalogue *catalogue, struct job *job, const struct peer_copies *peers,
                                      const struct peer_copy *best, struct nebula_error *error)
{
        struct version *version = job->versions, *own;

        while (version && !(version->is_remote && copy_is_of(best, version->tag, version->sequence)))
                version = version->next;
        if (!version) {
                version = version_new(catalogue, job, best->tag, error);
                if (!version)
                        return NULL;
                version->is_remote = version->recorded = true;
                version->sequence = best->sequence;
                version->line = best->line;
                version->world = best->world;
                strcpy(version->run, best->run);
                version->writing = best->writing;
                own = own_share(job, best);
                if (own)
                        put_behind(version, own);
                lifecycle_init(&version->life, NEBULA_STATE_REPLICATED, (double)best->sequence / 1e9);
                job_saw_sequence(job, best->sequence);
        }
        for (size_t i = 0; i < peers->count; i++)
                for (size_t j = 0; j < peers->members[i].listing.count; j++) {
                        const struct peer_copy *copy = &peers->members[i].listing.copies[j];

                        for (size_t k = 0; copy_is_of(copy, best->tag, best->sequence) && k < copy->file_count; k++)
                                learn_file(version, &copy->files[k]);
                }
        if (version->copies->world_heard < peers->count)
                version->copies->world_heard = (uint32_t)peers->count;
        return version;
}

enum nebula_status replica_find(struct catalogue *catalogue, struct job *job, const struct session *session, const struct ipc_find *wanted,
                                uint64_t *ret_version_id, struct nebula_error *error)
{
        struct replica *replica = catalogue->replica;
        const struct peer_copy *best = NULL;
        struct peer_copies *peers;
        struct version *version;
        struct share share;
        bool asked, is_reader = session->role == IPC_ROLE_READER;
        enum nebula_status status;

        catalogue_lock(catalogue);
        asked = replica && (job->settings.replica_count || is_reader);
        share = share_of(session, job);
        catalogue_unlock(catalogue);
        if (!asked)
                return error_set(error, NEBULA_NOT_FOUND, 0, "this job asks for no copies in other nodes' memory (replica_count)");
        lock_take(&replica->peer_copies_lock);
        status = peer_copies_get(replica, job, PEER_LISTING_NS, &peers, error);
        if (!status) {
                best = newest_copy(peers, wanted, is_reader ? NULL : &share);
                if (!best)
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "no peer holds a copy of a checkpoint of this job");
        }
        if (!status) {
                catalogue_lock(catalogue);
                version = remote_version(catalogue, job, peers, best, error);
                if (version)
                        *ret_version_id = version->id;
                else
                        status = NEBULA_NO_MEMORY;
                catalogue_unlock(catalogue);
        }
        lock_give(&replica->peer_copies_lock);
        return status;
}

/* Lock held. The versions that peers do not hold any more serve no reader. */
static void forget_gone(struct job *job, const struct peer_copies *peers)
{
        for (struct version *version = job->versions; version; version = version->next)
                if (version->is_remote && !any_copy(peers, version->tag, version->sequence))
                        version->copies->world_heard = 0;
}

void replica_learn(struct catalogue *catalogue, struct job *job, bool is_reader)
{
        struct replica *replica = catalogue->replica;
        struct nebula_error error = { 0 };
        struct peer_copies *peers;
        enum nebula_status status;
        bool asked;

        catalogue_lock(catalogue);
        asked = replica && (job->settings.replica_count || is_reader);
        for (const struct version *version = job->versions; version && asked && !is_reader; version = version->next)
                asked = !version_whole_in_memory(version);
        catalogue_unlock(catalogue);
        if (!asked)
                return;
        lock_take(&replica->peer_copies_lock);
        status = peer_copies_get(replica, job, PEER_LISTING_NS, &peers, &error);
        if (status && status != NEBULA_NOT_FOUND) {
                log_event(LOG_LEVEL_WARN, "the agent could not ask peers for copies: %s", error.message);
        } else if (!status) {
                catalogue_lock(catalogue);
                if (is_reader)
                        forget_gone(job, peers);
                for (size_t i = 0; i < peers->count; i++)
                        for (size_t j = 0; j < peers->members[i].listing.count; j++)
                                if (!is_reader || copies_are_whole(peers, &peers->members[i].listing.copies[j]))
                                        remote_version(catalogue, job, peers, &peers->members[i].listing.copies[j], NULL);
                catalogue_unlock(catalogue);
        }
        lock_give(&replica->peer_copies_lock);
}

void replica_kept(struct catalogue *catalogue, const struct job *job, struct peer_listing *ret_listing)
{
        struct replica *replica = catalogue->replica;
        struct nebula_error error = { 0 };

        *ret_listing = (struct peer_listing){ 0 };
        if (replica && copy_server_kept(replica->server, job, ret_listing, &error))
                log_event(LOG_LEVEL_WARN, "the ranks do not learn which copies this node keeps: %s", error.message);
}

static bool is_small(const struct job *job)
{
        return job->settings.world <= (uint64_t)GATHERING_NODES * (job->settings.local_world ? job->settings.local_world : 1);
}

/* In a large job every node would ask all others, and then one of them for its file. So its nodes wait for storage, unless storage
 * will never have the version. */
static bool may_gather(const struct version *version)
{
        const struct job *job = version->job;

        if (!job->settings.replica_count || version->stored || !version->sequence)
                return false;
        return version->is_remote || (version->is_spread && (is_small(job) || version->life.state == NEBULA_STATE_FAILED));
}

bool replica_gather(struct catalogue *catalogue, struct version *version)
{
        struct replica *replica = catalogue->replica;
        const struct peer_copy *one = NULL;
        struct nebula_error error = { 0 };
        struct peer_copies *peers;

        if (!replica || !may_gather(version))
                return false;
        version->pins++;
        catalogue_unlock(catalogue);
        lock_take(&replica->peer_copies_lock);
        if (peer_copies_get(replica, version->job, PEER_LISTING_NS, &peers, &error))
                log_event(LOG_LEVEL_WARN, "the agent could not ask peers for copies: %s", error.message);
        else
                one = any_copy(peers, version->tag, version->sequence);
        catalogue_lock(catalogue);
        if (one)
                remote_version(catalogue, version->job, peers, one, NULL);
        version->pins--;
        catalogue_signal(catalogue); /* a thread may wait until the version is released */
        lock_give(&replica->peer_copies_lock);
        return true;
}

/* The file in a copy that is held; NULL: none is. */
static const struct peer_file *held_file(const struct peer_listing *listing, const struct version *version, const char *name)
{
        for (size_t i = 0; i < listing->count; i++) {
                const struct peer_copy *copy = &listing->copies[i];

                for (size_t k = 0; copy_is_of(copy, version->tag, version->sequence) && k < copy->file_count; k++)
                        if (copy->files[k].held && !strcmp(copy->files[k].name, name))
                                return &copy->files[k];
        }
        return NULL;
}

bool replica_locate(struct catalogue *catalogue, struct version *version, const char *name, uint64_t *ret_size, enum ipc_format *ret_format)
{
        struct replica *replica = catalogue->replica;
        const struct peer_file *file;
        struct peer_copies *peers;
        struct peer_listing kept;
        bool asks_others = version->in_memory && is_small(version->job);

        if (!replica || !version->job->settings.replica_count)
                return false;
        version->pins++;
        catalogue_unlock(catalogue);
        replica_kept(catalogue, version->job, &kept);
        lock_take(&replica->peer_copies_lock);
        file = held_file(&kept, version, name);
        if (!file && asks_others && !peer_copies_get(replica, version->job, LOCATING_NS, &peers, NULL))
                for (size_t i = 0; i < peers->count && !file; i++)
                        file = held_file(&peers->members[i].listing, version, name);
        if (file) {
                *ret_size = file->size;
                *ret_format = file->format;
        }
        lock_give(&replica->peer_copies_lock);
        peer_listing_done(&kept);
        catalogue_lock(catalogue);
        version->pins--;
        catalogue_signal(catalogue); /* a thread may wait until the version is released */
        return file;
}

const struct version *replica_rest(const struct version *version)
{
        const struct version *other = version->sequence ? version->job->versions : NULL;

        while (other && !(other->is_remote != version->is_remote && (other->is_remote || other->in_memory) && !strcmp(other->tag, version->tag) &&
                          version_is(other, version->sequence)))
                other = other->next;
        return other;
}

static bool has_file_of(const struct version *version, uint32_t rank)
{
        for (size_t i = 0; i < version->file_count; i++)
                if (version->files[i].rank == rank)
                        return true;
        return false;
}

bool replica_gathered_all(const struct version *version)
{
        const struct version *rest = replica_rest(version);
        uint32_t local_world = version->job->settings.local_world ? version->job->settings.local_world : 1;

        if (!rest || !rest->is_remote)
                return false;
        if ((uint64_t)rest->copies->world_heard * local_world >= version->world)
                return true;
        for (uint32_t rank = 0; rank < version->world; rank++)
                if (!has_file_of(version, rank) && !has_file_of(rest, rank))
                        return false;
        return true;
}
