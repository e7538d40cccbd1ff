#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/holder.h"
#include "agent/log.h"
#include "agent/peer.h"
#include "agent/placement.h"
#include "agent/replica.h"
#include "agent/retain.h"
#include "agent/storage.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "sum/sum.h"

#define SECOND_NS INT64_C(1000000000)
#define RETRY_NS (5 * SECOND_NS)      /* after a failure; also how long a member that does not answer is passed over */
#define LOOK_MS 1000                  /* while a connection is open: whether the peer is still there */
#define LISTING_NS (2 * SECOND_NS)    /* what peers hold is asked anew after this */
#define ASKING_NS (10 * SECOND_NS)    /* all members together */
#define WINDOW 4                      /* pieces that are asked for ahead */

/* The connection through which one job's versions are sent. Only the replica thread uses it. */
struct link {
        struct link *next;
        struct job *job;
        struct tls_key key;
        bool announced;
        struct peer *peer;        /* NULL: none */
        int64_t retry_at_ns;
        char failed_text[512];    /* said already */
};
/* What one member holds of a job. */
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
struct replica {
        struct catalogue *catalogue;
        struct holder *holder;
        char node[IPC_NAME_MAX];
        struct member own;
        pthread_t thread;
        struct link *links;
        uint64_t bytes_per_s; /* 0: no bound */
        pthread_mutex_t inventory_lock; /* guards inventories; held while members are asked, so that ranks ask once */
        struct inventory *inventories;
};

static struct peer_hello *own_hello(const struct replica *replica, const struct job *job)
{
        struct peer_hello *hello = calloc(1, sizeof *hello);

        if (!hello)
                return NULL;
        snprintf(hello->node, sizeof hello->node, "%s", replica->node);
        snprintf(hello->job, sizeof hello->job, "%s", job->name);
        snprintf(hello->path, sizeof hello->path, "%s", job->persist_path);
        hello->nonce = replica->catalogue->agent_nonce;
        return hello;
}

/* Sending. */

struct outgoing_file {
        struct peer_file what;
        const char *data; /* mapped; NULL: not held */
        uint64_t *chunks; /* the version's; a piece is a chunk */
};
struct outgoing {
        struct peer_copy what;
        struct outgoing_file *files;
};

_Static_assert(PEER_PIECE_BYTES == IMAGE_CHUNK_BYTES, "a piece of a copy is a chunk of its image");

static void outgoing_done(struct outgoing *outgoing)
{
        peer_copy_done(&outgoing->what);
        free(outgoing->files);
}

/* What goes out of a pinned version; its images get their checksums on the way. No lock held. */
static enum nebula_status outgoing_init(struct catalogue *catalogue, struct version *version, struct outgoing *outgoing,
                                        struct nebula_error *error)
{
        struct peer_copy *what = &outgoing->what;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(catalogue);
        what->id = version->id;
        what->generation = version->generation;
        what->sequence = version->sequence;
        what->world = version->world;
        strcpy(what->tag, version->tag);
        strcpy(what->run, version->run);
        what->files = calloc(version->file_count + 1, sizeof *what->files);
        outgoing->files = calloc(version->file_count + 1, sizeof *outgoing->files);
        if (!what->files || !outgoing->files)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to copy \"%.200s\"", version->tag);
        for (size_t i = 0; !status && i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];
                struct peer_file *to = &what->files[what->file_count++];

                *to = (struct peer_file){ .size = file->size, .generation = file->generation, .rank = file->rank, .format = file->format,
                                          .held = file->image && !file->image->restored };
                strcpy(to->name, file->name);
        }
        catalogue_unlock(catalogue);
        for (size_t i = 0; !status && i < what->file_count; i++) {
                const void *data;

                if (!what->files[i].held)
                        continue;
                status = storage_seal(catalogue, version, what->files[i].name, &data, &outgoing->files[i].chunks, error);
                outgoing->files[i].data = data;
        }
        return status;
}

static bool is_stopping(struct catalogue *catalogue)
{
        bool stopping;

        catalogue_lock(catalogue);
        stopping = catalogue->stopping;
        catalogue_unlock(catalogue);
        return stopping;
}

/* Sleeps so long that `sent` bytes since `start_ns` are no more than the bound allows. */
static void pace(const struct replica *replica, uint64_t sent, int64_t start_ns)
{
        int64_t due;

        if (!replica->bytes_per_s)
                return;
        due = start_ns + (int64_t)((double)sent / (double)replica->bytes_per_s * 1e9);
        if (due > os->now_ns())
                os->sleep_ms((due - os->now_ns()) / 1000000);
}

static enum nebula_status send_pieces(struct replica *replica, struct peer *peer, const struct outgoing *outgoing, uint64_t *ret_sent,
                                      struct nebula_error *error)
{
        int64_t start = os->now_ns();
        uint64_t sent = 0;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; !status && i < outgoing->what.file_count; i++) {
                const struct peer_file *file = &outgoing->what.files[i];

                for (uint64_t at = 0; !status && file->held && at < file->size; at += PEER_PIECE_BYTES) {
                        uint64_t left = file->size - at;
                        size_t size = left < PEER_PIECE_BYTES ? (size_t)left : PEER_PIECE_BYTES;
                        struct peer_data data = { .copy = outgoing->what.id, .file = (uint32_t)i, .offset = at,
                                                  .crc64 = outgoing->files[i].chunks[at / PEER_PIECE_BYTES] };

                        status = peer_send_data(peer, &data, outgoing->files[i].data + at, size, error);
                        sent += size;
                        pace(replica, sent, start);
                        if (!status && is_stopping(replica->catalogue))
                                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the agent is ending");
                }
        }
        *ret_sent = sent;
        return status;
}

/* What the peer is to keep: the copies that it has of versions that lie in memory here. */
static enum nebula_status send_keep(struct replica *replica, struct link *link, uint64_t newest, size_t most, struct nebula_error *error)
{
        struct catalogue *catalogue = replica->catalogue;
        struct peer_keep keep = { 0 };
        struct peer_answer answer;
        size_t count = 0, size;
        char *text;
        enum nebula_status status;

        catalogue_lock(catalogue);
        for (const struct version *version = link->job->versions; version; version = version->next)
                count++;
        keep.ids = calloc(count + 1, sizeof *keep.ids);
        for (const struct version *version = link->job->versions; keep.ids && version && keep.count < most; version = version->next)
                if (version->in_memory && (version->id == newest || version->replica_nonce == link->peer->hello.nonce))
                        keep.ids[keep.count++] = version->id;
        catalogue_unlock(catalogue);
        status = keep.ids ? peer_keep_format(&keep, &text, &size, error) : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list");
        if (!status) {
                status = peer_ask(link->peer, PEER_KEEP, text, size, &answer, error);
                free(text);
        }
        peer_keep_done(&keep);
        return status;
}

static enum nebula_status offer(struct replica *replica, struct link *link, const struct outgoing *outgoing, struct peer_answer *answer,
                                struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = peer_copy_format(&outgoing->what, &text, &size, error);

        if (status)
                return status;
        status = peer_ask(link->peer, PEER_OFFER, text, size, answer, error);
        if (!status && answer->status == NEBULA_NO_MEMORY) {
                /* No room beside the older ones: then without them. Better the newest alone than an old one. */
                status = send_keep(replica, link, outgoing->what.id, 0, error);
                if (!status)
                        status = peer_ask(link->peer, PEER_OFFER, text, size, answer, error);
        }
        free(text);
        return status;
}

/* All of it, acknowledged. A failure with *ret_broken unset leaves the connection whole. */
static enum nebula_status send_version(struct replica *replica, struct link *link, struct version *version, bool *ret_broken,
                                       struct nebula_error *error)
{
        struct outgoing outgoing = { 0 };
        struct peer_keep seal = { .ids = &outgoing.what.id, .count = 1 };
        struct peer_answer answer = { 0 };
        int64_t start = os->now_ns();
        uint64_t sent = 0;
        char *text;
        size_t size;
        enum nebula_status status = outgoing_init(replica->catalogue, version, &outgoing, error);

        *ret_broken = false;
        if (status)
                goto done;
        strcpy(outgoing.what.owner, replica->node);
        *ret_broken = true;
        status = offer(replica, link, &outgoing, &answer, error);
        if (!status && answer.status != NEBULA_BUSY) {
                if (!answer.status) {
                        status = send_pieces(replica, link->peer, &outgoing, &sent, error);
                        if (!status)
                                status = peer_keep_format(&seal, &text, &size, error);
                        if (!status) {
                                status = peer_ask(link->peer, PEER_SEAL, text, size, &answer, error);
                                free(text);
                        }
                }
                if (!status && answer.status) {
                        *ret_broken = false;
                        status = error_set(error, answer.status, 0, "node \"%.60s\" does not keep it: %.380s", link->peer->hello.node,
                                           answer.message);
                }
        }
        if (!status)
                status = send_keep(replica, link, version->id, SIZE_MAX, error);
        if (!status)
                log_event(LOG_LEVEL_INFO, "%s generation %" PRIu64 " is replicated on node \"%s\": %" PRIu64 " MiB in %.2f s", outgoing.what.tag,
                          outgoing.what.generation, link->peer->hello.node, sent >> 20, (double)(os->now_ns() - start) / 1e9);
done:
        outgoing_done(&outgoing);
        return status;
}

/* Links. */

static struct link *link_get(struct replica *replica, struct job *job)
{
        struct link *link = replica->links;

        while (link && link->job != job)
                link = link->next;
        if (link)
                return link;
        link = calloc(1, sizeof *link);
        if (!link)
                return NULL;
        link->job = job;
        link->next = replica->links;
        replica->links = link;
        return link;
}

static void link_close(struct link *link)
{
        peer_free(link->peer);
        link->peer = NULL;
}

/* The door, the key and the record of this node, once per job. */
static enum nebula_status announce(struct replica *replica, struct link *link, struct nebula_error *error)
{
        enum nebula_status status;

        if (link->announced)
                return NEBULA_OK;
        status = member_key(link->job->persist_path, &link->key, error);
        if (!status)
                status = holder_add_key(replica->holder, &link->key, error);
        if (!status)
                status = holder_open(replica->holder, &replica->own, error);
        if (!status)
                status = member_announce(link->job->persist_path, &replica->own, error);
        link->announced = !status;
        return status;
}

/* Members but this one, best first. */
static enum nebula_status members_in_order(const struct replica *replica, const struct job *job, struct member_list *ret_list,
                                           size_t **ret_order, size_t *ret_count, struct nebula_error *error)
{
        char self[IPC_NAME_MAX + 16];
        enum nebula_status status = member_names(job->persist_path, ret_list, error);

        if (status)
                return status;
        *ret_order = calloc(ret_list->count + 1, sizeof **ret_order);
        if (!*ret_order) {
                member_list_done(ret_list);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");
        }
        if (conf_env("NEBULA_PEERS"))
                snprintf(self, sizeof self, "%s:%u", replica->own.address, replica->own.port);
        else
                snprintf(self, sizeof self, "%s", replica->node);
        *ret_count = placement_order((const char *const *)ret_list->names, ret_list->count, self, *ret_order);
        return NEBULA_OK;
}

/* To the first member in order that answers. */
static enum nebula_status link_open(struct replica *replica, struct link *link, struct nebula_error *error)
{
        struct peer_hello *hello = own_hello(replica, link->job);
        struct member_list members = { 0 };
        struct nebula_error first = { 0 }, failure;
        size_t *order = NULL, count = 0;
        enum nebula_status status = hello ? members_in_order(replica, link->job, &members, &order, &count, error) :
                                            error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");
        int64_t until = os->now_ns() + ASKING_NS;

        for (size_t i = 0; !status && !link->peer && i < count && os->now_ns() < until; i++) {
                struct member member;
                enum nebula_status result = member_load(link->job->persist_path, members.names[order[i]], &member, &failure);

                if (!result)
                        result = peer_open(&member, &link->key, hello, &link->peer, &failure);
                if (!result && link->peer->hello.nonce == replica->catalogue->agent_nonce) {
                        link_close(link); /* NEBULA_PEERS names this node by another word */
                        continue;
                }
                if (result && !first.status)
                        first = failure;
        }
        if (!status && !link->peer) {
                status = NEBULA_UNAVAILABLE;
                if (first.status && error)
                        *error = first;
                else
                        error_set(error, status, 0, "there is no other node yet");
        }
        if (link->peer && first.status)
                log_event(LOG_LEVEL_WARN, "copies of job \"%s\" go to node \"%s\" instead: %s", link->job->name, link->peer->hello.node, first.message);
        free(order);
        member_list_done(&members);
        free(hello);
        return status;
}

/* Once per reason. */
static void complain(struct link *link, const char *what, const struct nebula_error *error)
{
        if (!strcmp(link->failed_text, error->message))
                return;
        snprintf(link->failed_text, sizeof link->failed_text, "%s", error->message);
        log_event(LOG_LEVEL_WARN, "%s has no copy in another node's memory yet: %s", what, error->message);
}

/* Lock held. The next version to send: any that is waited for, oldest first, else the newest. */
static struct version *candidate(struct job *job, uint64_t nonce)
{
        struct version *newest = NULL, *wanted = NULL;

        for (struct version *version = job->versions; version; version = version->next) {
                if (!version->in_memory || version->remote || !lifecycle_complete(version->life.state))
                        continue;
                if (!newest || version->sequence > newest->sequence)
                        newest = version;
                if (version->replica_wanted && !version->replica_nonce && (!wanted || version->sequence < wanted->sequence))
                        wanted = version;
        }
        if (wanted)
                return wanted;
        return newest && (!newest->replica_nonce || (nonce && newest->replica_nonce != nonce)) ? newest : NULL;
}

/* Lock held; dropped while sending. */
static void replicate_one(struct replica *replica, struct link *link, struct version *version)
{
        struct catalogue *catalogue = replica->catalogue;
        struct job *job = link->job;
        struct nebula_error error = { 0 };
        bool broken = true;
        enum nebula_status status;

        version->pins++;
        catalogue_unlock(catalogue);
        status = link->peer ? NEBULA_OK : link_open(replica, link, &error);
        if (!status)
                status = send_version(replica, link, version, &broken, &error);
        if (status)
                complain(link, version->tag, &error);
        else
                link->failed_text[0] = 0;
        if (status && broken && link->peer)
                link_close(link);
        catalogue_lock(catalogue);
        version->pins--;
        job->replica_error = error;
        if (status) {
                link->retry_at_ns = os->now_ns() + RETRY_NS;
        } else {
                link->retry_at_ns = 0;
                version->replica_nonce = link->peer->hello.nonce;
                version->replica_wanted = false;
                if (version->life.state == NEBULA_STATE_COMMITTED)
                        version_move(catalogue, version, NEBULA_STATE_REPLICATED);
        }
        catalogue_retain(catalogue, job, job->retention_count);
        catalogue_signal(catalogue);
}

/* Lock held. When to look again; *ret_worked: something was done, look at once. */
static int64_t tend(struct replica *replica, struct job *job, bool *ret_worked)
{
        struct catalogue *catalogue = replica->catalogue;
        struct link *link = link_get(replica, job);
        int64_t now = os->now_ns();
        struct nebula_error error = { 0 };
        struct version *version;
        enum nebula_status status;

        if (!link)
                return now + RETRY_NS;
        if (!link->announced) {
                if (link->retry_at_ns > now)
                        return link->retry_at_ns;
                catalogue_unlock(catalogue);
                status = announce(replica, link, &error);
                if (status)
                        complain(link, "this node", &error);
                catalogue_lock(catalogue);
                job->replica_error = error;
                link->retry_at_ns = status ? os->now_ns() + RETRY_NS : 0;
                *ret_worked = true;
                return now;
        }
        if (link->peer && peer_gone(link->peer)) {
                log_event(LOG_LEVEL_WARN, "node \"%s\", which holds copies of job \"%s\", has gone", link->peer->hello.node, job->name);
                link_close(link);
                for (version = job->versions; version; version = version->next)
                        version->replica_nonce = 0; /* what is newest goes to another one */
        }
        version = candidate(job, link->peer ? link->peer->hello.nonce : 0);
        if (version && link->retry_at_ns <= now) {
                replicate_one(replica, link, version);
                *ret_worked = true;
                return now;
        }
        /* Nobody trains and nothing is to be sent: the peer may end when it likes. */
        if (!version && link->peer && !catalogue_session_count(catalogue, job))
                link_close(link);
        if (version)
                return link->retry_at_ns;
        return link->peer ? now + LOOK_MS * (SECOND_NS / 1000) : INT64_MAX;
}

static void *replica_main(void *argument)
{
        struct replica *replica = argument;
        struct catalogue *catalogue = replica->catalogue;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                int64_t due = INT64_MAX, now;
                uint64_t changes = catalogue->change_count;
                bool worked = false;

                for (struct job *job = catalogue->jobs; job; job = job->next)
                        if (job->replica_count && !catalogue->stopping) {
                                int64_t at = tend(replica, job, &worked);

                                due = at < due ? at : due;
                        }
                now = os->now_ns();
                if (!worked && catalogue->change_count == changes && due > now && !catalogue->stopping)
                        os_cond_wait(&catalogue->moved, &catalogue->catalogue_lock,
                                     due == INT64_MAX ? -1 : (due - now) / 1000000 + 1);
        }
        catalogue_unlock(catalogue);
        return NULL;
}

enum nebula_status replica_start(struct catalogue *catalogue, struct nebula_error *error)
{
        struct replica *replica = calloc(1, sizeof *replica);
        const char *text = conf_env("NEBULA_PEER_MBPS");
        uint64_t mbps = 1000;
        enum nebula_status status;

        if (!replica)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for replicas");
        replica->catalogue = catalogue;
        status = member_own_name(replica->node, error);
        if (!status && text)
                status = conf_parse_count("NEBULA_PEER_MBPS", text, 1000000, &mbps, error);
        if (!status)
                status = holder_new(catalogue, replica->node, &replica->holder, error);
        if (status) {
                free(replica);
                return status;
        }
        replica->bytes_per_s = mbps * 1000000;
        pthread_mutex_init(&replica->inventory_lock, NULL);
        if (os_thread_start(&replica->thread, replica_main, replica, false)) {
                pthread_mutex_destroy(&replica->inventory_lock);
                holder_free(replica->holder);
                free(replica);
                return error_set(error, NEBULA_UNAVAILABLE, 0, "cannot start a thread for replicas");
        }
        catalogue->replica = replica;
        return NEBULA_OK;
}

/* Finding. */

static void inventory_clear(struct inventory *inventory)
{
        for (size_t i = 0; i < inventory->count; i++)
                peer_listing_done(&inventory->sources[i].listing);
        free(inventory->sources);
        inventory->sources = NULL;
        inventory->count = 0;
}

void replica_stop(struct catalogue *catalogue)
{
        struct replica *replica = catalogue->replica;

        if (!replica)
                return;
        pthread_join(replica->thread, NULL);
        while (replica->links) {
                struct link *link = replica->links;

                replica->links = link->next;
                if (link->announced)
                        member_withdraw(link->job->persist_path, &replica->own);
                link_close(link);
                memset(&link->key, 0, sizeof link->key);
                free(link);
        }
        holder_free(replica->holder);
        while (replica->inventories) {
                struct inventory *inventory = replica->inventories;

                replica->inventories = inventory->next;
                inventory_clear(inventory);
                free(inventory);
        }
        pthread_mutex_destroy(&replica->inventory_lock);
        catalogue->replica = NULL;
        free(replica);
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
                return error_set(error, NEBULA_NOT_FOUND, 0, "this node itself");
        }
        status = peer_send(peer, PEER_LIST, "", 0, error);
        if (!status)
                status = peer_receive(peer, error);
        if (!status && peer->header.type != PEER_LISTED)
                status = error_set(error, NEBULA_CORRUPT, 0, "a frame of type %u came where a listing is due", (unsigned)peer->header.type);
        if (!status)
                status = peer_listing_parse(peer->body, peer->header.size, ret_listing, error);
        peer_free(peer);
        return status;
}

/* inventory_lock held. Asks every member, in the order in which the lost copies are likely to be found. */
static enum nebula_status inventory_fill(struct replica *replica, struct inventory *inventory, struct nebula_error *error)
{
        const struct job *job = inventory->job;
        struct peer_hello *hello = own_hello(replica, job);
        struct member_list members = { 0 };
        size_t *order = NULL, count = 0, unheard = 0;
        struct tls_key key;
        int64_t until = os->now_ns() + ASKING_NS;
        enum nebula_status status = hello ? member_key(job->persist_path, &key, error) :
                                            error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");

        inventory_clear(inventory);
        if (!status)
                status = members_in_order(replica, job, &members, &order, &count, error);
        if (!status) {
                inventory->sources = calloc(count + 1, sizeof *inventory->sources);
                if (!inventory->sources)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of copies");
        }
        for (size_t i = 0; !status && i < count; i++) {
                struct source *source = &inventory->sources[inventory->count];
                struct nebula_error failure = { 0 };
                enum nebula_status result;

                if (os->now_ns() > until) {
                        unheard = count - i;
                        break;
                }
                result = member_load(job->persist_path, members.names[order[i]], &source->member, &failure);
                if (!result)
                        result = ask_listing(&source->member, &key, hello, replica->catalogue->agent_nonce, &source->listing, &failure);
                if (!result)
                        inventory->count++;
                else if (result != NEBULA_NOT_FOUND)
                        log_event(LOG_LEVEL_WARN, "what a peer holds is not known: %s", failure.message);
        }
        if (unheard)
                log_event(LOG_LEVEL_WARN, "%zu of %zu nodes were not asked for copies: time was up", unheard, count);
        inventory->at_ns = os->now_ns();
        free(order);
        member_list_done(&members);
        free(hello);
        return status;
}

/* inventory_lock held. */
static enum nebula_status inventory_get(struct replica *replica, struct job *job, bool fresh, struct inventory **ret_inventory,
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
        if (fresh && os->now_ns() - inventory->at_ns > LISTING_NS)
                status = inventory_fill(replica, inventory, error);
        *ret_inventory = inventory;
        return status;
}

static const struct peer_copy *newest_copy(const struct inventory *inventory, const char *tag)
{
        const struct peer_copy *best = NULL;

        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++) {
                        const struct peer_copy *copy = &inventory->sources[i].listing.copies[j];
                        struct retain_entry both[2] = { { 0 } };

                        if (*tag && strcmp(tag, copy->tag))
                                continue;
                        if (best && *tag && copy->sequence <= best->sequence)
                                continue;
                        if (best) {
                                both[0] = (struct retain_entry){ .step = name_step(best->tag), .sequence = best->sequence, .complete = true };
                                both[1] = (struct retain_entry){ .step = name_step(copy->tag), .sequence = copy->sequence, .complete = true };
                        }
                        if (!best || *tag || retain_newest(both, 2) == 1)
                                best = copy;
                }
        return best;
}

static bool same_version(const struct peer_copy *copy, const char *tag, uint64_t generation, uint64_t sequence)
{
        return copy->generation == generation && copy->sequence == sequence && !strcmp(copy->tag, tag);
}

/* Lock held. The files of all nodes' copies of one version together. */
static struct version *remote_version(struct catalogue *catalogue, struct job *job, const struct inventory *inventory,
                                      const struct peer_copy *best, struct nebula_error *error)
{
        struct version *version = job->versions;

        while (version && !(version->remote && same_version(best, version->tag, version->generation, version->sequence)))
                version = version->next;
        if (!version) {
                version = version_new(catalogue, job, best->tag, error);
                if (!version)
                        return NULL;
                version->remote = version->recorded = true;
                version->generation = best->generation;
                version->sequence = best->sequence;
                version->world = best->world;
                strcpy(version->run, best->run);
                lifecycle_init(&version->life, NEBULA_STATE_REPLICATED, (double)best->sequence / 1e9);
                if (best->sequence > catalogue->last_sequence)
                        catalogue->last_sequence = best->sequence;
        }
        for (size_t i = 0; i < inventory->count; i++)
                for (size_t j = 0; j < inventory->sources[i].listing.count; j++) {
                        const struct peer_copy *copy = &inventory->sources[i].listing.copies[j];

                        for (size_t k = 0; same_version(copy, best->tag, best->generation, best->sequence) && k < copy->file_count; k++) {
                                struct agent_file *file = version_file(version, copy->files[k].name) ? NULL : version_file_add(version);

                                if (!file)
                                        continue;
                                strcpy(file->name, copy->files[k].name);
                                file->rank = copy->files[k].rank;
                                file->format = copy->files[k].format;
                                file->size = copy->files[k].size;
                                file->generation = copy->files[k].generation;
                        }
                }
        return version;
}

enum nebula_status replica_find(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t *ret_version_id,
                                struct nebula_error *error)
{
        struct replica *replica = catalogue->replica;
        const struct peer_copy *best = NULL;
        struct inventory *inventory;
        struct version *version;
        bool asked;
        enum nebula_status status;

        catalogue_lock(catalogue);
        asked = replica && job->replica_count;
        catalogue_unlock(catalogue);
        if (!asked)
                return error_set(error, NEBULA_NOT_FOUND, 0, "no copies in other nodes' memory are asked for");
        pthread_mutex_lock(&replica->inventory_lock);
        status = inventory_get(replica, job, true, &inventory, error);
        if (!status) {
                best = newest_copy(inventory, tag);
                if (!best)
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "no peer holds a copy");
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
        pthread_mutex_unlock(&replica->inventory_lock);
        return status;
}

void replica_learn(struct catalogue *catalogue, struct job *job)
{
        struct replica *replica = catalogue->replica;
        struct nebula_error error = { 0 };
        struct inventory *inventory;
        bool asked;

        catalogue_lock(catalogue);
        asked = replica && job->replica_count;
        for (const struct version *version = job->versions; version && asked; version = version->next)
                asked = !version_whole_in_memory(version);
        catalogue_unlock(catalogue);
        if (!asked)
                return;
        pthread_mutex_lock(&replica->inventory_lock);
        if (inventory_get(replica, job, true, &inventory, &error)) {
                log_event(LOG_LEVEL_WARN, "peers could not be asked: %s", error.message);
        } else {
                catalogue_lock(catalogue);
                for (size_t i = 0; i < inventory->count; i++)
                        for (size_t j = 0; j < inventory->sources[i].listing.count; j++)
                                remote_version(catalogue, job, inventory, &inventory->sources[i].listing.copies[j], NULL);
                catalogue_unlock(catalogue);
        }
        pthread_mutex_unlock(&replica->inventory_lock);
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
                return error_set(error, NEBULA_CORRUPT, 0, "the peer sent something else than was asked for");
        return peer_take(peer, data + offset, error);
}

static enum nebula_status fetch_from(struct replica *replica, const struct job *job, const struct member *member, uint64_t copy,
                                     uint32_t file, char *data, uint64_t size, struct nebula_error *error)
{
        struct peer_hello *hello = own_hello(replica, job);
        struct peer *peer = NULL;
        struct tls_key key;
        uint64_t asked = 0;
        enum nebula_status status = hello ? member_key(job->persist_path, &key, error) :
                                            error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");

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

/* Every place that holds the file, as far as is known. */
static struct place *find_places(struct replica *replica, struct job *job, bool fresh, const char *tag, uint64_t generation,
                                 uint64_t sequence, const char *name, uint64_t size, size_t *ret_count)
{
        struct inventory *inventory;
        struct place *places = NULL, *grown;
        size_t count = 0;

        pthread_mutex_lock(&replica->inventory_lock);
        if (inventory_get(replica, job, fresh, &inventory, NULL))
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
        pthread_mutex_unlock(&replica->inventory_lock);
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
        /* What was found may have moved since: then all are asked once more. */
        for (int round = 0; round < 2 && status; round++) {
                size_t count = 0;
                struct place *places = find_places(replica, job, round > 0, tag, generation, sequence, name, size, &count);

                for (size_t i = 0; status && i < count; i++) {
                        status = fetch_from(replica, job, &places[i].member, places[i].copy, places[i].file, data, size, error);
                        if (status)
                                log_event(LOG_LEVEL_WARN, "\"%s\" of %s does not come from node \"%s\": %s", name, tag, places[i].member.node,
                                          error ? error->message : "");
                }
                free(places);
        }
        return status;
}
