#include "agent/peers/joint_read.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/peers/replica_private.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "sum/sum.h"

#define WINDOW 4 /* chunks requested ahead */
#define LOOK_MS 100

struct joint {
        struct joint *next;
        const struct job *job;
        struct peer *peers[JOINT_NODES]; /* those that answer, in the order of the names; NULL: this node */
        uint32_t count, first; /* first: the owner of chunk 0 */
        bool is_broken;
        int64_t until_ns; /* so long it is kept */
};

bool joint_wanted(const struct catalogue *catalogue, const struct job *job)
{
        uint32_t local_world = job->settings.local_world ? job->settings.local_world : 1;

        return catalogue->replica && job->settings.replica_count && job->persist_path[0] && job->settings.world > local_world;
}

static uint32_t node_count(struct catalogue *catalogue, const struct job *job)
{
        uint32_t count;

        catalogue_lock(catalogue);
        count = job->settings.world / (job->settings.local_world ? job->settings.local_world : 1);
        catalogue_unlock(catalogue);
        return count;
}

/* Returns when all nodes of the job have announced themselves, or after JOINT_WAIT_NS. */
static enum nebula_status await_members(struct catalogue *catalogue, const struct job *job, struct store *store, struct member_list *ret_list,
                                        struct nebula_error *error)
{
        uint32_t nodes = node_count(catalogue, job);
        int64_t until_ns = os->now_ns() + JOINT_WAIT_NS;

        for (;;) {
                enum nebula_status status = member_names(store, ret_list, error);

                if (status || ret_list->count >= nodes || os->now_ns() > until_ns)
                        return status;
                member_list_done(ret_list);
                os->sleep_ms(LOOK_MS);
        }
}

struct call {
        struct store *store;
        const char *name;
        const struct tls_key *key;
        const struct peer_hello *hello;
        struct peer *peer;
};

static void *call_main(void *argument)
{
        struct call *call = argument;
        struct nebula_error error;
        struct member member;

        if (member_load(call->store, call->name, false, &member, &error) || peer_open(&member, call->key, call->hello, &call->peer, &error))
                call->peer = NULL;
        peer_tls_thread_end();
        return NULL;
}

/* Connects to all members of the group but this node, and keeps those that answer. */
static void call_all(struct joint *joint, struct call *calls, size_t count, size_t self)
{
        pthread_t threads[JOINT_NODES];
        bool started[JOINT_NODES] = { false };

        for (size_t i = 0; i < count; i++)
                started[i] = i != self && !os_thread_start(&threads[i], call_main, &calls[i], false);
        for (size_t i = 0; i < count; i++) {
                if (started[i])
                        pthread_join(threads[i], NULL);
                if (i == self || calls[i].peer)
                        joint->peers[joint->count++] = i == self ? NULL : calls[i].peer;
        }
}

static size_t find_name(const struct member_list *members, const char *name)
{
        size_t i = 0;

        while (i < members->count && strcmp(members->names[i], name))
                i++;
        return i;
}

static void free_joint(struct joint *joint)
{
        for (uint32_t i = 0; i < joint->count; i++)
                peer_free(joint->peers[i]);
        free(joint);
}

/* Takes one whose time is over at `now`, or one of a job, off the list; NULL: there is none. */
static struct joint *take_joint(struct replica *replica, const struct job *job, int64_t now)
{
        struct joint **link, *joint;

        lock_take(&replica->own_lock);
        link = &replica->joints;
        while (*link && (*link)->until_ns > now && !(job && (*link)->job == job))
                link = &(*link)->next;
        joint = *link;
        if (joint)
                *link = joint->next;
        lock_give(&replica->own_lock);
        return joint;
}

int64_t joint_expire(struct replica *replica)
{
        int64_t due = INT64_MAX, now = os->now_ns();
        struct joint *joint;

        while ((joint = take_joint(replica, NULL, now)))
                free_joint(joint);
        lock_take(&replica->own_lock);
        for (joint = replica->joints; joint; joint = joint->next)
                due = joint->until_ns < due ? joint->until_ns : due;
        lock_give(&replica->own_lock);
        return due;
}

void joint_forget(struct replica *replica, const struct job *job)
{
        struct joint *joint;

        while ((joint = take_joint(replica, job, job ? INT64_MIN : INT64_MAX)))
                free_joint(joint);
}

/* Connects to the other nodes of the group. One that stays alone is returned, too. */
static struct joint *connect_all(struct catalogue *catalogue, struct job *job)
{
        struct replica *replica = catalogue->replica;
        struct peer_hello *hello = replica_hello(replica, job, false);
        struct joint *joint = calloc(1, sizeof *joint);
        struct member_list members = { 0 };
        struct call calls[JOINT_NODES];
        struct nebula_error error = { 0 };
        size_t self, first, count;
        struct store *store;
        struct tls_key key;

        if (joint)
                joint->job = job;
        if (!hello || !joint || replica_store(replica, job, &store, &error) || secret_take(store, true, &key, &error) ||
            await_members(catalogue, job, store, &members, &error))
                goto done;
        self = find_name(&members, replica->node);
        if (self == members.count) /* not announced yet, or named by NEBULA_PEERS */
                goto done;
        first = self / JOINT_NODES * JOINT_NODES;
        count = members.count - first < JOINT_NODES ? members.count - first : JOINT_NODES;
        for (size_t i = 0; i < count; i++)
                calls[i] = (struct call){ .store = store, .name = members.names[first + i], .key = &key, .hello = hello };
        call_all(joint, calls, count, self - first);
done:
        member_list_done(&members);
        free(hello);
        return joint;
}

struct joint *joint_open(struct catalogue *catalogue, struct job *job, const char *name)
{
        struct joint *joint;

        joint_expire(catalogue->replica);
        joint = take_joint(catalogue->replica, job, INT64_MIN);
        if (!joint)
                joint = connect_all(catalogue, job);
        if (joint && joint->count < 2) {
                joint_close(catalogue, joint);
                return NULL;
        }
        if (joint)
                joint->first = (uint32_t)(sum_crc64(0, name, strlen(name)) % joint->count);
        return joint;
}

static uint32_t owner_of(const struct joint *joint, uint32_t chunk)
{
        return (joint->first + chunk) % joint->count;
}

bool joint_is_own(const struct joint *joint, uint32_t chunk)
{
        return !joint->peers[owner_of(joint, chunk)];
}

/* What one thread gets from one owner. */
struct errand {
        struct peer *peer;
        const struct joint_file *file;
        uint32_t *chunks;
        size_t count;
        bool *here;
        bool has_failed;
};

static enum nebula_status ask(struct peer *peer, const struct joint_file *file, uint32_t chunk, struct nebula_error *error)
{
        struct peer_part part = file->part;
        char *text;
        size_t size;
        enum nebula_status status;

        part.chunk = chunk;
        status = peer_part_format(&part, &text, &size, error);
        if (status)
                return status;
        status = peer_send(peer, PEER_PART, text, size, error);
        free(text);
        return status;
}

/* A refusal of one chunk is no failure: this node reads it from storage. */
static enum nebula_status take(struct peer *peer, const struct joint_file *file, uint32_t chunk, bool *ret_here, struct nebula_error *error)
{
        uint64_t offset = (uint64_t)chunk * file->chunk_bytes, left = file->size - offset;
        enum nebula_status status = peer_receive(peer, error);

        if (status || peer->header.type == PEER_ANSWER)
                return status;
        if (peer->header.type != PEER_DATA || peer->data.offset != offset || peer_take_size(peer) != (left < file->chunk_bytes ? left : file->chunk_bytes))
                return error_set(error, NEBULA_CORRUPT, 0, "the peer sent another part of a file than the agent asked for");
        status = peer_take(peer, file->data + offset, error);
        *ret_here = !status && peer->data.crc64 == file->crc64[chunk];
        return status;
}

static void *errand_main(void *argument)
{
        struct errand *errand = argument;
        const struct joint_file *file = errand->file;
        struct nebula_error error;
        size_t asked = 0;
        enum nebula_status status = NEBULA_OK;

        for (size_t at = 0; !status && at < errand->count; at++) {
                while (!status && asked < errand->count && asked < at + WINDOW)
                        status = ask(errand->peer, file, errand->chunks[asked++], &error);
                if (!status)
                        status = take(errand->peer, file, errand->chunks[at], &errand->here[errand->chunks[at]], &error);
        }
        errand->has_failed = status != NEBULA_OK;
        if (status)
                log_event(LOG_LEVEL_WARN, "chunks of \"%s\" of %s do not come from node \"%s\", and are read from storage: %s", file->part.name,
                          file->part.tag, errand->peer->hello.node, error.message);
        peer_tls_thread_end();
        return NULL;
}

/* Adds the chunks of the ranges to the errands of their owners. False: there is no memory for the lists. */
static bool divide(const struct joint *joint, const struct joint_file *file, const struct store_range *ranges, size_t count, struct errand *errands)
{
        size_t most = 0;

        for (size_t i = 0; i < count; i++)
                most += (ranges[i].size + file->chunk_bytes - 1) / file->chunk_bytes;
        for (uint32_t i = 0; i < joint->count; i++) {
                errands[i].chunks = calloc(most + 1, sizeof *errands[i].chunks);
                if (!errands[i].chunks)
                        return false;
        }
        for (size_t i = 0; i < count; i++)
                for (uint64_t done = 0; done < ranges[i].size; done += file->chunk_bytes) {
                        uint32_t chunk = (uint32_t)((ranges[i].offset + done) / file->chunk_bytes);
                        struct errand *errand = &errands[owner_of(joint, chunk)];

                        errand->chunks[errand->count++] = chunk;
                }
        return true;
}

void joint_fetch(struct joint *joint, const struct joint_file *file, const struct store_range *ranges, size_t count, bool *ret_here)
{
        struct errand errands[JOINT_NODES] = { 0 };
        pthread_t threads[JOINT_NODES];
        bool started[JOINT_NODES] = { false };

        for (uint32_t i = 0; i < joint->count; i++)
                errands[i] = (struct errand){ .peer = joint->peers[i], .file = file, .here = ret_here };
        if (divide(joint, file, ranges, count, errands))
                for (uint32_t i = 0; i < joint->count; i++)
                        started[i] = errands[i].peer && errands[i].count && !os_thread_start(&threads[i], errand_main, &errands[i], false);
        for (uint32_t i = 0; i < joint->count; i++) {
                if (started[i])
                        pthread_join(threads[i], NULL);
                free(errands[i].chunks);
                joint->is_broken |= errands[i].has_failed;
        }
}

void joint_close(struct catalogue *catalogue, struct joint *joint)
{
        struct replica *replica = catalogue->replica;

        if (joint->is_broken) {
                free_joint(joint);
                return;
        }
        if (joint->count >= 2 || !joint->until_ns) /* one that was alone keeps its time */
                joint->until_ns = os->now_ns() + (joint->count < 2 ? JOINT_ALONE_NS : JOINT_KEPT_NS);
        lock_take(&replica->own_lock);
        joint->next = replica->joints;
        replica->joints = joint;
        lock_give(&replica->own_lock);
}
