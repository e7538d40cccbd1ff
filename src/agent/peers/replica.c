#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/log.h"
#include "agent/peers/joint_read.h"
#include "agent/peers/placement.h"
#include "agent/peers/replica_private.h"
#include "agent/peers/slots_private.h"
#include "agent/persist/storage.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define RETRY_NS (5 * SECOND_NS)      /* after a failure */
#define KEPT_NS (30 * SECOND_NS)      /* while this node keeps copies of a job that nobody needs here: whether it still does */
#define LOOK_MS 1000                  /* while a connection is open: whether the peer is still there */
#define SPARE_FIRST_NS SECOND_NS      /* a job that may have spare nodes looks for one so long after it has chosen another node, */
#define SPARE_MOST_NS (32 * SECOND_NS) /* and then after twice the time, up to this one */

bool replica_only_reads(struct replica *replica, const struct job *job)
{
        bool reads;

        catalogue_lock(replica->catalogue);
        reads = !job->settings.replica_count;
        catalogue_unlock(replica->catalogue);
        return reads;
}

struct peer_hello *replica_hello(const struct replica *replica, const struct job *job, bool is_reader)
{
        struct peer_hello *hello = calloc(1, sizeof *hello);

        if (!hello)
                return NULL;
        snprintf(hello->node, sizeof hello->node, "%s", replica->node);
        snprintf(hello->job, sizeof hello->job, "%s", job->name);
        snprintf(hello->path, sizeof hello->path, "%s", job->spelling);
        hello->nonce = replica->catalogue->agent_nonce;
        hello->is_reader = is_reader;
        return hello;
}

_Static_assert(sizeof((struct job_copies *)0)->identity == sizeof((struct tls_key *)0)->identity, "an identity fits");

/* Channels. */

static struct fan *fan_get(struct replica *replica, struct job *job)
{
        struct fan *fan = replica->fans;

        while (fan && fan->job != job)
                fan = fan->next;
        if (fan)
                return fan;
        fan = calloc(1, sizeof *fan);
        if (!fan)
                return NULL;
        fan->job = job;
        for (size_t i = 0; i < REPLICA_MAX; i++) {
                fan->channels[i].job = job;
                fan->channels[i].index = i;
        }
        fan->next = replica->fans;
        replica->fans = fan;
        return fan;
}

static void channel_close(struct channel *channel)
{
        peer_free(channel->peer);
        channel->peer = NULL;
}

enum nebula_status replica_store(struct replica *replica, struct job *job, struct store **ret_store, struct nebula_error *error)
{
        *ret_store = NULL;
        return job->persist_path[0] ? storage_open(replica->catalogue, job, ret_store, error) : NEBULA_OK;
}

/* Whether another job of that path needs this node's record of that kind. */
static bool is_shared(const struct replica *replica, const struct fan *fan, bool as_spare)
{
        const struct fan *other = replica->fans;

        while (other && (other == fan || !other->announced || other->as_spare != as_spare || strcmp(other->job->persist_path, fan->job->persist_path)))
                other = other->next;
        return other;
}

/* Opens the listener, takes the key and writes the record of this node, once per job. */
static enum nebula_status announce(struct replica *replica, struct fan *fan, struct nebula_error *error)
{
        struct member own;
        struct store *store;
        bool is_spare, has_spares;
        enum nebula_status status;

        catalogue_lock(replica->catalogue);
        is_spare = catalogue_is_spare(fan->job);
        has_spares = is_spare || fan->as_spare || fan->job->settings.has_spares;
        catalogue_create_as(fan->job);
        catalogue_unlock(replica->catalogue);
        status = replica_store(replica, fan->job, &store, error);
        if (!status)
                status = secret_take(store, true, &fan->key, error);
        if (!status)
                status = copy_server_add_key(replica->server, &fan->key, error);
        if (!status)
                status = copy_server_open(replica->server, &own, error);
        if (!status) {
                lock_take(&replica->own_lock);
                replica->own = own;
                lock_give(&replica->own_lock);
                status = member_announce(store, &own, is_spare, error);
        }
        if (!status && has_spares && !is_shared(replica, fan, !is_spare))
                member_replace(store, &own, is_spare);
        if (!status)
                fan->as_spare = is_spare;
        fan->announced |= !status;
        return status;
}

enum nebula_status replica_members(struct replica *replica, struct store *store, struct member_list *ret_list,
                                   size_t **ret_order, size_t *ret_count, struct nebula_error *error)
{
        char self[IPC_NAME_MAX + 16];
        const char *const *names;
        size_t spares;
        enum nebula_status status = member_names(store, ret_list, error);

        if (status)
                return status;
        *ret_order = calloc(ret_list->count + ret_list->spare_count + 1, sizeof **ret_order);
        if (!*ret_order) {
                member_list_done(ret_list);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");
        }
        if (conf_env("NEBULA_PEERS")) {
                lock_take(&replica->own_lock);
                snprintf(self, sizeof self, "%s:%u", replica->own.address, replica->own.port);
                lock_give(&replica->own_lock);
        } else {
                snprintf(self, sizeof self, "%s", replica->node);
        }
        names = (const char *const *)ret_list->names;
        spares = placement_order(names + ret_list->count, ret_list->spare_count, self, *ret_order);
        for (size_t i = 0; i < spares; i++)
                (*ret_order)[i] += ret_list->count;
        *ret_count = spares + placement_order(names, ret_list->count, self, *ret_order + spares);
        return NEBULA_OK;
}

/* Whether that agent already gets a copy, or is this one. */
static bool is_taken(const struct replica *replica, const struct fan *fan, uint64_t nonce)
{
        bool taken = nonce == replica->catalogue->agent_nonce;

        for (size_t i = 0; i < REPLICA_MAX; i++)
                taken = taken || (fan->channels[i].peer && fan->channels[i].peer->hello.nonce == nonce);
        return taken;
}

static bool is_among(char *const *names, size_t count, const char *name)
{
        size_t i = 0;

        while (i < count && strcmp(names[i], name))
                i++;
        return i < count;
}

/* How many of the ordered members are a better choice than the one that has the copy, on its channel `before`: spare nodes, if it is none; or,
 * if it was one and none is there now, the nodes before it on the ring. */
static size_t better_count(const struct member_list *members, const size_t *order, size_t count, const struct channel *before)
{
        const char *node = before->peer->hello.node;
        size_t better = 0;

        if (is_among(members->names + members->count, members->spare_count, node))
                return 0;
        if (members->spare_count)
                while (better < count && order[better] >= members->count)
                        better++;
        else if (before->is_spare)
                while (better < count && strcmp(members->names[order[better]], node))
                        better++;
        return better;
}

/* Connects to the first member in order that answers and has no copy yet. If the time is up before all were asked, the next attempt
 * continues there: nodes that are gone for good leave records, perhaps many. `before`: to a better one than its peer; NULL: to any. */
static enum nebula_status channel_open(struct replica *replica, const struct fan *fan, struct channel *channel, const struct channel *before,
                                       struct nebula_error *error)
{
        struct peer_hello *hello = replica_hello(replica, channel->job, false);
        struct member_list members = { 0 };
        struct nebula_error first = { 0 }, failure;
        size_t *order = NULL, count = 0, i;
        struct store *store = NULL;
        enum nebula_status status = hello ? replica_store(replica, channel->job, &store, error) :
                                            error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");
        int64_t until = os->now_ns() + ASKING_NS;

        if (!status)
                status = replica_members(replica, store, &members, &order, &count, error);
        if (!status && before)
                count = better_count(&members, order, count, before);
        i = channel->passed_over <= count ? channel->passed_over : 0;
        for (; !status && !channel->peer && i < count && os->now_ns() < until; i++) {
                bool is_spare = order[i] >= members.count;
                struct member member;
                struct peer *peer;
                enum nebula_status result = member_load(store, members.names[order[i]], is_spare, &member, &failure);

                if (!result && member.nonce && is_taken(replica, fan, member.nonce))
                        continue;
                if (!result)
                        result = peer_open(&member, &fan->key, hello, &peer, &failure);
                if (!result && is_taken(replica, fan, peer->hello.nonce))
                        peer_free(peer); /* NEBULA_PEERS has another name for it, or for this node */
                else if (!result) {
                        channel->peer = peer;
                        channel->is_spare = is_spare;
                        channel->place = i;
                } else if (!first.status)
                        first = failure;
                if (result == NEBULA_UNAVAILABLE)
                        member_remove_gone(store, members.names[order[i]], is_spare, replica->node);
        }
        channel->passed_over = channel->peer || i == count ? 0 : i;
        if (!status && !channel->peer) {
                status = NEBULA_UNAVAILABLE;
                if (first.status && error)
                        *error = first;
                else
                        error_set(error, status, 0, "there is no other node yet%s", channel->index ? " for one more copy" : "");
        }
        if (channel->peer && first.status && !before)
                log_event(LOG_LEVEL_WARN, "copies of job \"%s\" go to node \"%s\" instead: %s", channel->job->name, channel->peer->hello.node, first.message);
        free(order);
        member_list_done(&members);
        free(hello);
        return status;
}

/* Once per reason. */
static void complain(struct channel *channel, const char *what, const struct nebula_error *error)
{
        if (!strcmp(channel->failed_text, error->message))
                return;
        snprintf(channel->failed_text, sizeof channel->failed_text, "%s", error->message);
        log_event(LOG_LEVEL_WARN, channel->index ? "%s lacks a copy in one more node's memory: %s" : "%s has no copy in another node's memory yet: %s",
                  what, error->message);
}

/* Lock held. The next version to send: the oldest one that a client waits for, else the newest. */
static struct version *candidate(const struct channel *channel)
{
        const struct job *job = channel->job;
        struct version *newest = NULL, *wanted = NULL;
        uint64_t nonce;

        for (struct version *version = job->versions; version; version = version->next) {
                if (!version->in_memory || version->is_remote || !lifecycle_complete(version->life.state))
                        continue;
                if (!newest || version->sequence > newest->sequence)
                        newest = version;
                if (version->copies->wanted && !version->copies->nonces[channel->index] && (!wanted || version->sequence < wanted->sequence))
                        wanted = version;
        }
        if (wanted)
                return wanted;
        nonce = newest ? newest->copies->nonces[channel->index] : 0;
        return nonce && (!channel->peer || nonce == channel->peer->hello.nonce) ? NULL : newest;
}

/* Whether all copies that the job asks for exist. Lock held. */
static bool all_copied(const struct version *version)
{
        for (size_t i = 0; i < version->job->settings.replica_count; i++)
                if (!version->copies->nonces[i])
                        return false;
        return true;
}

/* Lock held. The next version goes to another member, and that one is asked for copies. */
static void forget_copies(const struct channel *channel)
{
        for (struct version *version = channel->job->versions; version; version = version->next)
                version->copies->nonces[channel->index] = 0;
}

/* Sends the version to a spare node, if one has come since this channel was opened, and keeps the old copy until then. True: it was sent, and
 * the channel now leads there. */
static bool moves(struct replica *replica, const struct fan *fan, struct channel *channel, struct version *version)
{
        struct channel better = { .job = channel->job, .index = channel->index };
        struct nebula_error error = { 0 };
        enum nebula_status status = NEBULA_NO_MEMORY;
        bool broken = false;

        channel->pause_ns = channel->pause_ns * 2 < SPARE_MOST_NS ? channel->pause_ns * 2 : SPARE_MOST_NS;
        channel->look_ns = os->now_ns() + channel->pause_ns;
        while (status == NEBULA_NO_MEMORY && !broken) { /* then the next one may have room */
                if (channel_open(replica, fan, &better, channel, &error))
                        return false;
                status = replica_send(replica, &better, version, &broken, &error);
                if (!status)
                        break;
                log_event(LOG_LEVEL_INFO, "copies of job \"%s\" do not move to node \"%s\": %s", channel->job->name, better.peer->hello.node, error.message);
                better.passed_over = better.place + 1;
                channel_close(&better);
        }
        if (status)
                return false;
        log_event(LOG_LEVEL_INFO, "copies of job \"%s\" go to node \"%s\" from now on", channel->job->name, better.peer->hello.node);
        replica_take_back(replica, channel);
        channel_close(channel);
        channel->peer = better.peer;
        channel->is_spare = better.is_spare;
        channel->place = better.place;
        return true;
}

/* Opens the channel if it is shut, and sends the version. A spare node without room leaves it to the next member. *ret_moved: older versions
 * have no copy any more. */
static enum nebula_status send_one(struct replica *replica, const struct fan *fan, struct channel *channel, struct version *version, bool *ret_moved,
                                   bool *ret_broken, struct nebula_error *error)
{
        struct nebula_error full = { 0 };
        bool has_spares;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(replica->catalogue);
        has_spares = channel->job->settings.has_spares;
        catalogue_unlock(replica->catalogue);
        if (channel->peer && has_spares && channel->look_ns <= os->now_ns() && moves(replica, fan, channel, version)) {
                *ret_moved = true;
                return NEBULA_OK;
        }
        while (!status) {
                if (!channel->peer) {
                        status = channel_open(replica, fan, channel, NULL, error);
                        channel->pause_ns = SPARE_FIRST_NS;
                        channel->look_ns = os->now_ns() + SPARE_FIRST_NS;
                }
                if (status && full.status)
                        *error = full; /* no member comes after it */
                if (status)
                        break;
                status = replica_send(replica, channel, version, ret_broken, error);
                if (status != NEBULA_NO_MEMORY || *ret_broken || !channel->is_spare)
                        break;
                log_event(LOG_LEVEL_INFO, "spare node \"%s\" has no room for copies of job \"%s\"", channel->peer->hello.node, channel->job->name);
                full = *error;
                channel->passed_over = channel->place + 1;
                channel_close(channel);
                *ret_moved = true;
                status = NEBULA_OK;
        }
        return status;
}

/* Lock held; dropped while sending. */
static void replicate_one(struct replica *replica, const struct fan *fan, struct channel *channel, struct version *version)
{
        struct catalogue *catalogue = replica->catalogue;
        struct job *job = channel->job;
        struct nebula_error error = { 0 };
        bool broken = true, moved = false;
        enum nebula_status status;

        version->pins++;
        catalogue_unlock(catalogue);
        status = send_one(replica, fan, channel, version, &moved, &broken, &error);
        if (status)
                complain(channel, version->tag, &error);
        else
                channel->failed_text[0] = 0;
        if (status && broken && channel->peer)
                channel_close(channel);
        catalogue_lock(catalogue);
        version->pins--;
        if (moved)
                forget_copies(channel);
        if (status) {
                job->copies->error = error;
                channel->retry_at_ns = os->now_ns() + RETRY_NS;
        } else {
                channel->retry_at_ns = 0;
                version->copies->nonces[channel->index] = channel->peer->hello.nonce;
        }
        if (!status && all_copied(version)) {
                memset(&job->copies->error, 0, sizeof job->copies->error);
                version->copies->wanted = false;
                if (version->life.state == NEBULA_STATE_COMMITTED)
                        version_move(catalogue, version, NEBULA_STATE_REPLICATED);
        }
        policy_retain(catalogue, job);
        catalogue_signal(catalogue);
}

/* Lock held. Returns when to look again; *ret_worked: look again at once. */
static int64_t tend_channel(struct replica *replica, const struct fan *fan, struct channel *channel, bool *ret_worked)
{
        struct job *job = fan->job;
        struct version *version;
        int64_t now = os->now_ns();

        if (channel->peer && peer_gone(channel->peer)) {
                log_event(LOG_LEVEL_WARN, "node \"%s\", which holds copies of job \"%s\", has gone, or has lost one of them", channel->peer->hello.node, job->name);
                channel_close(channel);
                forget_copies(channel);
        }
        version = candidate(channel);
        if (version && channel->retry_at_ns <= now) {
                replicate_one(replica, fan, channel, version);
                *ret_worked = true;
                return now;
        }
        /* No rank trains and no version is to be sent: the peer's agent may end. */
        if (!version && channel->peer && !job->trainer_count)
                channel_close(channel);
        if (version)
                return channel->retry_at_ns;
        return channel->peer ? now + LOOK_MS * (SECOND_NS / 1000) : INT64_MAX;
}

/* The same for all copies of a job. */
static int64_t tend(struct replica *replica, struct job *job, bool *ret_worked)
{
        struct catalogue *catalogue = replica->catalogue;
        struct fan *fan = fan_get(replica, job);
        int64_t now = os->now_ns(), due = INT64_MAX;
        struct nebula_error error = { 0 };
        struct channel *first;
        bool is_listed = job->settings.replica_count || catalogue_is_spare(job);
        enum nebula_status status;

        if (!fan)
                return now + RETRY_NS;
        fan->look_ns = 0;
        first = &fan->channels[0];
        if (is_listed && (!fan->announced || job->copies->announce_due)) {
                if (!fan->announced && first->retry_at_ns > now)
                        return first->retry_at_ns;
                job->copies->announce_due = false;
                catalogue_unlock(catalogue);
                status = announce(replica, fan, &error);
                if (status)
                        complain(first, "this node", &error);
                catalogue_lock(catalogue);
                if (!status)
                        memcpy(job->copies->identity, fan->key.identity, sizeof job->copies->identity);
                job->copies->error = error;
                first->retry_at_ns = status ? os->now_ns() + RETRY_NS : 0;
                *ret_worked = true;
                return now;
        }
        for (size_t i = 0; i < REPLICA_MAX; i++) {
                struct channel *channel = &fan->channels[i];
                int64_t at;

                if (i >= job->settings.replica_count) {
                        channel_close(channel); /* the job asks for fewer than it did */
                        continue;
                }
                at = tend_channel(replica, fan, channel, ret_worked);
                due = at < due ? at : due;
        }
        return due;
}

/* Lock held; dropped meanwhile. A spare node whose program has ended is no choice for copies any more; those that it has stay. */
static void stand_down(struct replica *replica, struct job *job, struct fan *fan)
{
        struct store *store;

        if (!fan || !fan->as_spare || job->trainer_count || catalogue_is_spare(job))
                return;
        job->pins++;
        catalogue_unlock(replica->catalogue);
        if (!is_shared(replica, fan, true) && !replica_store(replica, job, &store, NULL))
                member_withdraw(store, &replica->own, true);
        fan->announced = fan->as_spare = false;
        catalogue_lock(replica->catalogue);
        job->pins--;
}

static void leave(struct replica *replica, const struct fan *fan)
{
        struct store *store;

        if (fan->announced && !is_shared(replica, fan, fan->as_spare) && !replica_store(replica, fan->job, &store, NULL))
                member_withdraw(store, &replica->own, fan->as_spare);
}

static void fan_free(struct replica *replica, struct fan *fan)
{
        struct fan **link = &replica->fans;

        while (*link != fan)
                link = &(*link)->next;
        *link = fan->next;
        for (size_t i = 0; i < REPLICA_MAX; i++)
                channel_close(&fan->channels[i]);
        explicit_bzero(&fan->key, sizeof fan->key);
        free(fan);
}

/* Lock held; dropped meanwhile. No session, thread or memory of this node needs the job. If the node keeps no copies of it for others either, it leaves the job's
 * nodes, and the catalogue forgets the job. Returns when to look again. */
static int64_t let_go(struct replica *replica, struct job *job)
{
        struct catalogue *catalogue = replica->catalogue;
        struct peer_listing kept = { 0 };
        struct fan *fan = fan_get(replica, job);
        int64_t now = os->now_ns();
        bool is_kept;

        if (!fan)
                return now + RETRY_NS;
        if (!fan->look_ns)
                fan->look_ns = now + catalogue->linger_s * SECOND_NS;
        if (fan->look_ns > now)
                return fan->look_ns;
        fan->look_ns = now + KEPT_NS;
        job->pins++;
        catalogue_unlock(catalogue);
        is_kept = copy_server_kept(replica->server, job, &kept, NULL) || kept.count;
        peer_listing_done(&kept);
        catalogue_lock(catalogue);
        job->pins--;
        if (is_kept || catalogue_job_is_needed(catalogue, job))
                return fan->look_ns;
        job->is_served = false; /* a trainer that comes now sets it again */
        job->pins++;
        catalogue_unlock(catalogue);
        leave(replica, fan);
        fan_free(replica, fan);
        replica_forget(replica, job);
        catalogue_lock(catalogue);
        job->pins--;
        catalogue_signal(catalogue);
        return INT64_MAX;
}

static void *replica_main(void *argument)
{
        struct replica *replica = argument;
        struct catalogue *catalogue = replica->catalogue;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                uint64_t changes = catalogue->change_count;
                int64_t due, now;
                bool worked = false;

                catalogue_unlock(catalogue);
                due = joint_expire(replica);
                catalogue_lock(catalogue);

                catalogue->serves_jobs = false;
                for (struct job *job = catalogue->jobs; job && !catalogue->stopping; job = job->next) {
                        int64_t at = INT64_MAX;

                        catalogue->serves_jobs |= job->is_served;
                        if (job->is_served)
                                stand_down(replica, job, fan_get(replica, job));
                        if (job->is_served && !catalogue_job_is_needed(catalogue, job))
                                at = let_go(replica, job);
                        else if (job->is_served)
                                at = tend(replica, job, &worked);
                        due = at < due ? at : due;
                }
                now = os->now_ns();
                if (!worked && catalogue->change_count == changes && due > now && !catalogue->stopping)
                        catalogue_wait(catalogue, &catalogue->copy, due == INT64_MAX ? -1 : (due - now) / 1000000 + 1);
        }
        catalogue_unlock(catalogue);
        while (replica->fans) {
                leave(replica, replica->fans);
                fan_free(replica, replica->fans);
        }
        catalogue_lock(catalogue);
        replica->ended = true;
        pthread_cond_broadcast(&catalogue->moved);
        catalogue_unlock(catalogue);
        return NULL;
}

bool replica_want(struct version *version)
{
        bool is_first = !version->copies->wanted;

        version->copies->wanted = true;
        return is_first;
}

const char *replica_trouble(const struct version *version)
{
        return version->copies->wanted ? version->job->copies->error.message : "";
}

uint32_t replica_copies(const struct version *version)
{
        uint32_t count = 0;

        for (size_t i = 0; i < REPLICA_MAX; i++)
                count += version->copies->nonces[i] != 0;
        return count;
}

const char *replica_error(const struct job *job)
{
        return job->copies->error.message;
}

bool replica_ended(const struct catalogue *catalogue)
{
        return !catalogue->replica || catalogue->replica->ended;
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
                status = copy_server_new(catalogue, replica->node, &replica->server, error);
        if (status) {
                free(replica);
                return status;
        }
        replica->bytes_per_s = mbps * 1000000;
        lock_init(&replica->peer_copies_lock, LOCK_PEER_COPIES);
        lock_init(&replica->own_lock, LOCK_OWN_MEMBER);
        if (os_thread_start(&replica->thread, replica_main, replica, false)) {
                lock_done(&replica->peer_copies_lock);
                lock_done(&replica->own_lock);
                copy_server_free(replica->server);
                free(replica);
                return error_set(error, NEBULA_UNAVAILABLE, 0, "cannot start a thread for replicas");
        }
        catalogue->replica = replica;
        return NEBULA_OK;
}

void replica_stop(struct catalogue *catalogue)
{
        struct replica *replica = catalogue->replica;

        if (!replica)
                return;
        pthread_join(replica->thread, NULL);
        copy_server_free(replica->server);
        replica_forget(replica, NULL);
        lock_done(&replica->peer_copies_lock);
        lock_done(&replica->own_lock);
        catalogue->replica = NULL;
        free(replica);
}
