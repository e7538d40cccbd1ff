#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/peers/replica_private.h"
#include "agent/catalogue/retention.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define ASKED_AT_ONCE 16              /* a node that is gone uses all of this time */
#define LISTING_NS (2 * SECOND_NS)    /* age after which a listing is asked for again */
#define LOCATING_NS (10 * SECOND_NS)  /* the same where storage has the file, too: nodes that are gone cost time at each listing */
#define WINDOW 4                      /* pieces requested ahead */
#define GATHERING_NODES 16u           /* in a job of at most so many nodes, each asks all others */

/* The copies of a job that one member holds. */
struct source {
        struct member member;
        struct peer_listing listing;
};
struct inventory {
        struct inventory *next;
        struct job *job;
        struct source *sources;
        size_t count;
        int64_t at_ns;
};
static void inventory_clear(struct inventory *inventory)
{
        for (size_t i = 0; i < inventory->count; i++)
                peer_listing_done(&inventory->sources[i].listing);
        free(inventory->sources);
        inventory->sources = NULL;
        inventory->count = 0;
}
void replica_forget(struct replica *replica)
{
        while (replica->inventories) {
                struct inventory *inventory = replica->inventories;

                replica->inventories = inventory->next;
                inventory_clear(inventory);
                free(inventory);
        }
}

static enum nebula_status ask_listing(const struct member *member, const struct tls_key *key, const struct peer_hello *hello,
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

struct question {
        struct replica *replica;
        const struct job *job;
        struct store *store; /* the job's; NULL: it has none */
        const struct tls_key *key;
        const struct peer_hello *hello;
        const char *name; /* of the member; NULL: this node */
        struct source source;
        enum nebula_status status;
        struct nebula_error error;
};

/* Asks this node at its own listener: a copy that it keeps for another node may be one that the other has lost. */
static void ask_own(struct question *question)
{
        struct replica *replica = question->replica;
        struct source *source = &question->source;

        lock_take(&replica->own_lock);
        source->member = replica->own;
        lock_give(&replica->own_lock);
        question->status = !source->member.port ? NEBULA_NOT_FOUND /* it was not opened yet */ :
                           ask_listing(&source->member, question->key, question->hello, 0, &source->listing, &question->error);
}

static void *ask_one(void *argument)
{
        struct question *question = argument;
        struct source *source = &question->source;

        if (!question->name) {
                ask_own(question);
                return NULL;
        }
        question->status = member_load(question->store, question->name, &source->member, &question->error);
        if (!question->status)
                question->status = ask_listing(&source->member, question->key, question->hello, question->replica->catalogue->agent_nonce,
                                               &source->listing, &question->error);
        if (question->status == NEBULA_UNAVAILABLE)
                member_remove_gone(question->store, question->name, question->replica->node);
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
static void inventory_add(struct inventory *inventory, const struct question *questions, size_t count)
{
        for (size_t i = 0; i < count; i++) {
                if (!questions[i].status)
                        inventory->sources[inventory->count++] = questions[i].source;
                else if (questions[i].status != NEBULA_NOT_FOUND)
                        log_event(LOG_LEVEL_WARN, "the agent cannot tell which copies a peer holds: %s", questions[i].error.message);
        }
}

/* inventory_lock held. Asks this node, and then every member, in the order in which the lost copies are likely to be found. */
static enum nebula_status inventory_fill(struct replica *replica, struct inventory *inventory, struct nebula_error *error)
{
        struct job *job = inventory->job;
        struct peer_hello *hello = replica_hello(replica, job);
        struct question *questions = calloc(ASKED_AT_ONCE, sizeof *questions);
        struct member_list members = { 0 };
        size_t *order = NULL, count = 0, at = 0;
        struct store *store = NULL;
        struct tls_key key;
        int64_t until = os->now_ns() + ASKING_NS;
        enum nebula_status status = hello && questions ? replica_store(replica, job, &store, error) :
                                                         error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");

        inventory_clear(inventory);
        if (!status)
                status = secret_take(store, &key, error);
        if (!status)
                status = replica_members(replica, store, &members, &order, &count, error);
        if (!status) {
                inventory->sources = calloc(count + 1, sizeof *inventory->sources);
                if (!inventory->sources)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of copies");
        }
        if (!status) {
                questions[0] = (struct question){ replica, job, store, &key, hello, NULL };
                ask_at_once(questions, 1);
                inventory_add(inventory, questions, 1);
        }
        while (!status && at < count && os->now_ns() <= until) {
                size_t some = 0;

                for (; some < ASKED_AT_ONCE && at < count; some++)
                        questions[some] = (struct question){ replica, job, store, &key, hello, members.names[order[at++]] };
                ask_at_once(questions, some);
                inventory_add(inventory, questions, some);
        }
        if (!status && at < count)
                log_event(LOG_LEVEL_WARN, "the agent did not ask %zu of %zu nodes for copies: its time for that was up", count - at, count);
        inventory->at_ns = os->now_ns();
        free(order);
        free(questions);
        member_list_done(&members);
        free(hello);
        return status;
}

/* inventory_lock held. */
static enum nebula_status inventory_get(struct replica *replica, struct job *job, int64_t oldest_ns, struct inventory **ret_inventory,
                                        struct nebula_error *error)
{
        struct inventory *inventory = replica->inventories;
        enum nebula_status status = NEBULA_OK;

        while (inventory && inventory->job != job)
                inventory = inventory->next;
        if (!inventory) {
                inventory = calloc(1, sizeof *inventory);
                if (!inventory)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of copies");
                inventory->job = job;
                inventory->at_ns = INT64_MIN / 2;
                inventory->next = replica->inventories;
                replica->inventories = inventory;
        }
        if (os->now_ns() - inventory->at_ns > oldest_ns)
                status = inventory_fill(replica, inventory, error);
        *ret_inventory = inventory;
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

        if (!version->copies.is_remote || !session)
                return version->copies.is_remote;
        share = share_of(session, version->job);
        if (version->world <= share.count)
                return true;
        for (size_t i = 0; i < version->file_count; i++)
                if (is_of(&share, version->files[i].rank))
                        return true;
        return false;
}

static bool same_version(const struct peer_copy *copy, const char *tag, uint64_t generation, uint64_t sequence)
{
        return copy->generation == generation && copy->sequence == sequence && !strcmp(copy->tag, tag);
}

/* Whether the copies of all members, of the version that `one` is a share of, serve the session. */
static bool copies_serve(const struct inventory *inventory, const struct peer_copy *one, const struct share *share)
{
        if (one->world <= share->count)
                return true;
        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++) {
                        const struct peer_copy *copy = &inventory->sources[i].listing.copies[j];

                        for (size_t k = 0; same_version(copy, one->tag, one->generation, one->sequence) && k < copy->file_count; k++)
                                if (is_of(share, copy->files[k].rank))
                                        return true;
                }
        return false;
}

static const struct peer_copy *newest_copy(const struct inventory *inventory, const struct ipc_find *wanted, const struct share *share)
{
        const char *tag = wanted->tag;
        const struct peer_copy *best = NULL;
        struct retain_entry newest = { 0 };

        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++) {
                        const struct peer_copy *copy = &inventory->sources[i].listing.copies[j];
                        const struct retain_entry entry = retain_complete(copy->tag, copy->sequence, &copy->line);

                        if ((*tag && strcmp(tag, copy->tag)) || !version_wanted(wanted, copy->generation, copy->sequence))
                                continue;
                        if (best && *tag && copy->sequence <= best->sequence)
                                continue;
                        if ((!best || *tag || retain_is_newer(&entry, &newest)) && copies_serve(inventory, copy, share)) {
                                best = copy;
                                newest = entry;
                        }
                }
        return best;
}

/* A copy of it that any member has; NULL: none. */
static const struct peer_copy *any_copy(const struct inventory *inventory, const char *tag, uint64_t generation, uint64_t sequence)
{
        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++)
                        if (same_version(&inventory->sources[i].listing.copies[j], tag, generation, sequence))
                                return &inventory->sources[i].listing.copies[j];
        return NULL;
}

/* This node's version of the same writing, even without its memory, or one that a peer learned to be complete before this node did. */
static struct version *own_share(const struct job *job, const struct peer_copy *copy)
{
        struct version *own = job->versions;

        while (own && (own->copies.is_remote || !(same_version(copy, own->tag, own->generation, own->sequence) ||
                                        (!own->sequence && !strcmp(own->tag, copy->tag) && !strcmp(own->run, copy->run)))))
                own = own->next;
        return own;
}

/* Puts the version behind this node's own share. The search for the newest version of a tag begins at the head of the list, and the
 * next save of the tag must find the own share. */
static void put_behind(struct version *version, struct version *own)
{
        struct job *job = version->job;

        version->nodes.writing = own->nodes.writing;
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
        file->generation = what->generation;
}

/* Lock held. One version with the files of all nodes' copies of it. */
static struct version *remote_version(struct catalogue *catalogue, struct job *job, const struct inventory *inventory,
                                      const struct peer_copy *best, struct nebula_error *error)
{
        struct version *version = job->versions, *own;

        while (version && !(version->copies.is_remote && same_version(best, version->tag, version->generation, version->sequence)))
                version = version->next;
        if (!version) {
                version = version_new(catalogue, job, best->tag, error);
                if (!version)
                        return NULL;
                version->copies.is_remote = version->recorded = true;
                version->generation = best->generation;
                version->sequence = best->sequence;
                version->line = best->line;
                version->world = best->world;
                strcpy(version->run, best->run);
                version->nodes.writing = 0; /* no version of this node, or the same */
                own = own_share(job, best);
                if (own)
                        put_behind(version, own);
                lifecycle_init(&version->life, NEBULA_STATE_REPLICATED, (double)best->sequence / 1e9);
                commit_saw_sequence(job, best->sequence);
        }
        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++) {
                        const struct peer_copy *copy = &inventory->sources[i].listing.copies[j];

                        for (size_t k = 0; same_version(copy, best->tag, best->generation, best->sequence) && k < copy->file_count; k++)
                                learn_file(version, &copy->files[k]);
                }
        if (version->copies.world_heard < inventory->count)
                version->copies.world_heard = (uint32_t)inventory->count;
        return version;
}

enum nebula_status replica_find(struct catalogue *catalogue, struct job *job, const struct session *session, const struct ipc_find *wanted,
                                uint64_t *ret_version_id, struct nebula_error *error)
{
        struct replica *replica = catalogue->replica;
        const struct peer_copy *best = NULL;
        struct inventory *inventory;
        struct version *version;
        struct share share;
        bool asked;
        enum nebula_status status;

        catalogue_lock(catalogue);
        asked = replica && job->copies.count;
        share = share_of(session, job);
        catalogue_unlock(catalogue);
        if (!asked)
                return error_set(error, NEBULA_NOT_FOUND, 0, "this job asks for no copies in other nodes' memory (replica_count)");
        lock_take(&replica->inventory_lock);
        status = inventory_get(replica, job, LISTING_NS, &inventory, error);
        if (!status) {
                best = newest_copy(inventory, wanted, &share);
                if (!best)
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "no peer holds a copy of a checkpoint of this job");
        }
        if (!status) {
                catalogue_lock(catalogue);
                version = remote_version(catalogue, job, inventory, best, error);
                if (version)
                        *ret_version_id = version->id;
                else
                        status = NEBULA_NO_MEMORY;
                catalogue_unlock(catalogue);
        }
        lock_give(&replica->inventory_lock);
        return status;
}

void replica_learn(struct catalogue *catalogue, struct job *job)
{
        struct replica *replica = catalogue->replica;
        struct nebula_error error = { 0 };
        struct inventory *inventory;
        bool asked;

        catalogue_lock(catalogue);
        asked = replica && job->copies.count;
        for (const struct version *version = job->versions; version && asked; version = version->next)
                asked = !version_whole_in_memory(version);
        catalogue_unlock(catalogue);
        if (!asked)
                return;
        lock_take(&replica->inventory_lock);
        if (inventory_get(replica, job, LISTING_NS, &inventory, &error)) {
                log_event(LOG_LEVEL_WARN, "the agent could not ask peers for copies: %s", error.message);
        } else {
                catalogue_lock(catalogue);
                for (size_t i = 0; i < inventory->count; i++)
                        for (size_t j = 0; j < inventory->sources[i].listing.count; j++)
                                remote_version(catalogue, job, inventory, &inventory->sources[i].listing.copies[j], NULL);
                catalogue_unlock(catalogue);
        }
        lock_give(&replica->inventory_lock);
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

        if (!job->copies.count || version->stored || !version->sequence)
                return false;
        return version->copies.is_remote || (version->nodes.spread && (is_small(job) || version->life.state == NEBULA_STATE_FAILED));
}

bool replica_gather(struct catalogue *catalogue, struct version *version)
{
        struct replica *replica = catalogue->replica;
        const struct peer_copy *one = NULL;
        struct nebula_error error = { 0 };
        struct inventory *inventory;

        if (!replica || !may_gather(version))
                return false;
        version->pins++;
        catalogue_unlock(catalogue);
        lock_take(&replica->inventory_lock);
        if (inventory_get(replica, version->job, LISTING_NS, &inventory, &error))
                log_event(LOG_LEVEL_WARN, "the agent could not ask peers for copies: %s", error.message);
        else
                one = any_copy(inventory, version->tag, version->generation, version->sequence);
        catalogue_lock(catalogue);
        if (one)
                remote_version(catalogue, version->job, inventory, one, NULL);
        version->pins--;
        catalogue_signal(catalogue); /* a thread may wait until the version is released */
        lock_give(&replica->inventory_lock);
        return true;
}

/* The file in a copy that is held; NULL: none is. */
static const struct peer_file *held_file(const struct peer_listing *listing, const struct version *version, const char *name)
{
        for (size_t i = 0; i < listing->count; i++) {
                const struct peer_copy *copy = &listing->copies[i];

                for (size_t k = 0; same_version(copy, version->tag, version->generation, version->sequence) && k < copy->file_count; k++)
                        if (copy->files[k].held && !strcmp(copy->files[k].name, name))
                                return &copy->files[k];
        }
        return NULL;
}

bool replica_locate(struct catalogue *catalogue, struct version *version, const char *name, uint64_t *ret_size, enum ipc_format *ret_format)
{
        struct replica *replica = catalogue->replica;
        const struct peer_file *file;
        struct inventory *inventory;
        struct peer_listing kept;

        if (!replica || !version->job->copies.count || !version->in_memory || !is_small(version->job))
                return false;
        version->pins++;
        catalogue_unlock(catalogue);
        replica_kept(catalogue, version->job, &kept);
        lock_take(&replica->inventory_lock);
        file = held_file(&kept, version, name);
        if (!file && !inventory_get(replica, version->job, LOCATING_NS, &inventory, NULL))
                for (size_t i = 0; i < inventory->count && !file; i++)
                        file = held_file(&inventory->sources[i].listing, version, name);
        if (file) {
                *ret_size = file->size;
                *ret_format = file->format;
        }
        lock_give(&replica->inventory_lock);
        peer_listing_done(&kept);
        catalogue_lock(catalogue);
        version->pins--;
        catalogue_signal(catalogue); /* a thread may wait until the version is released */
        return file;
}

const struct version *replica_rest(const struct version *version)
{
        const struct version *other = version->sequence ? version->job->versions : NULL;

        while (other && !(other->copies.is_remote != version->copies.is_remote && (other->copies.is_remote || other->in_memory) && !strcmp(other->tag, version->tag) &&
                          version_is(other, version->generation, version->sequence)))
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

        if (!rest || !rest->copies.is_remote)
                return false;
        if ((uint64_t)rest->copies.world_heard * local_world >= version->world)
                return true;
        for (uint32_t rank = 0; rank < version->world; rank++)
                if (!has_file_of(version, rank) && !has_file_of(rest, rank))
                        return false;
        return true;
}

/* Fetching. */

static enum nebula_status ask_piece(struct peer *peer, uint64_t copy, uint32_t file, uint64_t offset, struct nebula_error *error)
{
        struct peer_fetch fetch = { .copy = copy, .file = file, .offset = offset };
        char *text;
        size_t size;
        enum nebula_status status = peer_fetch_format(&fetch, &text, &size, error);

        if (status)
                return status;
        status = peer_send(peer, PEER_FETCH, text, size, error);
        free(text);
        return status;
}

static enum nebula_status take_piece(struct peer *peer, uint64_t copy, uint32_t file, uint64_t offset, char *data, uint64_t size,
                                     struct nebula_error *error)
{
        uint64_t left = size - offset;
        struct peer_answer answer;
        enum nebula_status status = peer_receive(peer, error);

        if (status)
                return status;
        if (peer->header.type == PEER_ANSWER) {
                status = peer_answer_parse(peer->body, peer->header.size, &answer, error);
                return status ? status : error_set(error, NEBULA_NOT_FOUND, 0, "%s", answer.message);
        }
        if (peer->header.type != PEER_DATA || peer->data.copy != copy || peer->data.file != file || peer->data.offset != offset ||
            peer_take_size(peer) != (left < PEER_PIECE_BYTES ? left : PEER_PIECE_BYTES))
                return error_set(error, NEBULA_CORRUPT, 0, "the peer sent another part of a file than the agent asked for");
        return peer_take(peer, data + offset, error);
}

static enum nebula_status fetch_from(struct replica *replica, struct job *job, const struct member *member, uint64_t copy,
                                     uint32_t file, char *data, uint64_t size, struct nebula_error *error)
{
        struct peer_hello *hello = replica_hello(replica, job);
        struct peer *peer = NULL;
        struct store *store;
        struct tls_key key;
        uint64_t asked = 0;
        enum nebula_status status = hello ? replica_store(replica, job, &store, error) :
                                            error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");

        if (!status)
                status = secret_take(store, &key, error);

        if (!status)
                status = peer_open(member, &key, hello, &peer, error);
        for (uint64_t at = 0; !status && at < size; at += PEER_PIECE_BYTES) {
                while (!status && asked < size && asked < at + WINDOW * (uint64_t)PEER_PIECE_BYTES) {
                        status = ask_piece(peer, copy, file, asked, error);
                        asked += PEER_PIECE_BYTES;
                }
                if (!status)
                        status = take_piece(peer, copy, file, at, data, size, error);
        }
        peer_free(peer);
        free(hello);
        return status;
}

struct place {
        struct member member;
        uint64_t copy;
        uint32_t file;
};

/* All known places that hold the file. */
static struct place *find_places(struct replica *replica, struct job *job, bool is_again, const char *tag, uint64_t generation,
                                 uint64_t sequence, const char *name, uint64_t size, size_t *ret_count)
{
        struct inventory *inventory;
        struct place *places = NULL, *grown;
        size_t count = 0;

        lock_take(&replica->inventory_lock);
        if (inventory_get(replica, job, is_again ? LISTING_NS : INT64_MAX, &inventory, NULL))
                goto done;
        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++) {
                        const struct peer_copy *copy = &inventory->sources[i].listing.copies[j];

                        for (size_t k = 0; same_version(copy, tag, generation, sequence) && k < copy->file_count; k++) {
                                if (!copy->files[k].held || copy->files[k].size != size || strcmp(copy->files[k].name, name))
                                        continue;
                                grown = realloc(places, (count + 1) * sizeof *places);
                                if (!grown)
                                        goto done;
                                places = grown;
                                places[count++] = (struct place){ inventory->sources[i].member, copy->id, (uint32_t)k };
                        }
                }
done:
        lock_give(&replica->inventory_lock);
        *ret_count = count;
        return places;
}

enum nebula_status replica_fetch(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t generation, uint64_t sequence,
                                 const char *name, void *data, uint64_t size, struct nebula_error *error)
{
        struct replica *replica = catalogue->replica;
        enum nebula_status status = NEBULA_NOT_FOUND;

        if (!replica)
                return error_set(error, NEBULA_NOT_FOUND, 0, "there are no peers");
        error_set(error, NEBULA_NOT_FOUND, 0, "no peer holds \"%.100s\" of \"%.100s\" any more", name, tag);
        /* A copy may have moved since the listing: then all members are asked once more. */
        for (int round = 0; round < 2 && status; round++) {
                size_t count = 0;
                struct place *places = find_places(replica, job, round > 0, tag, generation, sequence, name, size, &count);

                for (size_t i = 0; status && i < count; i++) {
                        status = fetch_from(replica, job, &places[i].member, places[i].copy, places[i].file, data, size, error);
                        if (status)
                                log_event(LOG_LEVEL_WARN, "\"%s\" of %s could not be read from node \"%s\": %s", name, tag, places[i].member.node,
                                          error ? error->message : "");
                }
                free(places);
        }
        return status;
}
