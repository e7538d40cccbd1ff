/*
 * watched.h - a store whose calls a test counts, makes fail, answers wrongly, or delays while another program goes on.
 *
 *      watched_begin(store)    from now on each call goes through this file
 *      watched.fail_at = 3     the third call fails without effect; `goes_on`: so do the later ones, as if the program had died
 *      watched.lose_at = 3     the third call succeeds, but its answer gets lost
 *      watched.before = f      f runs before each call, and in the middle of a copy
 *      watched_end(store)
 *
 * A removal of several objects counts as one call per object. A copy is a read and a write; another program may act between them.
 */
#ifndef NB_TESTS_WATCHED_H
#define NB_TESTS_WATCHED_H

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store.h"

enum watched_call { CALL_PUT, CALL_GET, CALL_UPLOAD, CALL_PUBLISH, CALL_READ, CALL_LIST, CALL_STAT, CALL_REMOVE, CALL_CLOCK, CALL_COPY, CALL_KINDS };

static struct {
        const struct store_ops *real;
        struct store_ops ops;
        void (*before)(struct store *self, enum watched_call call, const char *key);
        atomic_uint_fast64_t calls, of_kind[CALL_KINDS];
        uint64_t fail_at, lose_at; /* 0: none */
        bool goes_on;
        int64_t ahead_ns; /* by which the clock of the store is shown as later */
        const char *foreign; /* lists report the object with this key as another user's */
} watched;

/* The ways in which a call fails, for tests of every call. */
enum watched_failure { CALL_FAILS, PROGRAM_DIES, ANSWER_IS_LOST, WATCHED_FAILURES };

/* The number of the call. *ret_status: not NEBULA_OK: the call must not be made. */
static inline uint64_t watched_call(struct store *self, enum watched_call call, const char *key, enum nebula_status *ret_status,
                                    struct nebula_error *failure)
{
        uint64_t number;

        if (watched.before)
                watched.before(self, call, key);
        number = atomic_fetch_add(&watched.calls, 1) + 1;
        atomic_fetch_add(&watched.of_kind[call], 1);
        *ret_status = NEBULA_OK;
        if (watched.fail_at && (number == watched.fail_at || (watched.goes_on && number > watched.fail_at)))
                *ret_status = error_set(failure, NEBULA_STORAGE, EIO, "%s: call %u on \"%s\" fails", self->root, (unsigned)number, key);
        return number;
}

static inline enum nebula_status watched_answer(uint64_t number, enum nebula_status status, struct nebula_error *failure)
{
        if (status || number != watched.lose_at)
                return status;
        return error_set(failure, NEBULA_TIMEOUT, 0, "call %u gets no answer", (unsigned)number);
}

static inline enum nebula_status watched_put(struct store *self, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                             const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *failure)
{
        enum nebula_status status;
        uint64_t number = watched_call(self, CALL_PUT, key, &status, failure);

        if (!status)
                status = watched.real->put(self, key, data, size, condition, seen, ret_stamp, failure);
        return watched_answer(number, status, failure);
}

static inline enum nebula_status watched_get(struct store *self, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                             struct store_stamp *ret_stamp, struct nebula_error *failure)
{
        enum nebula_status status;

        watched_call(self, CALL_GET, key, &status, failure);
        return status ? status : watched.real->get(self, key, limit, ret_text, ret_size, ret_stamp, failure);
}

static inline enum nebula_status watched_upload(struct store *self, const struct store_object *objects, size_t count,
                                                struct store_upload **ret_upload, struct nebula_error *failure)
{
        enum nebula_status status;

        watched_call(self, CALL_UPLOAD, count ? objects->key : "", &status, failure);
        return status ? status : watched.real->upload(self, objects, count, ret_upload, failure);
}

static inline enum nebula_status watched_publish(struct store *self, struct store_upload *upload, struct nebula_error *failure)
{
        enum nebula_status status;
        uint64_t number = watched_call(self, CALL_PUBLISH, "", &status, failure);

        if (status)
                watched.real->abort(self, upload);
        else
                status = watched.real->publish(self, upload, failure);
        return watched_answer(number, status, failure);
}

static inline enum nebula_status watched_read(struct store *self, const char *key, void *data, uint64_t offset, uint64_t size,
                                              struct nebula_error *failure)
{
        enum nebula_status status;

        watched_call(self, CALL_READ, key, &status, failure);
        return status ? status : watched.real->read(self, key, data, offset, size, failure);
}

static inline enum nebula_status watched_list(struct store *self, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                              struct nebula_error *failure)
{
        enum nebula_status status;

        watched_call(self, CALL_LIST, prefix, &status, failure);
        if (!status)
                status = watched.real->list(self, prefix, deep, from, ret_page, failure);
        for (size_t i = 0; !status && watched.foreign && i < ret_page->count; i++)
                ret_page->entries[i].is_foreign = !strcmp(ret_page->entries[i].key, watched.foreign);
        return status;
}

static inline enum nebula_status watched_stat(struct store *self, const char *key, struct store_entry *ret_entry, struct nebula_error *failure)
{
        enum nebula_status status;

        watched_call(self, CALL_STAT, key, &status, failure);
        if (!status)
                status = watched.real->stat(self, key, ret_entry, failure);
        if (status)
                memset(ret_entry, 0x5a, sizeof *ret_entry); /* no caller uses it */
        return status;
}

static inline enum nebula_status watched_remove(struct store *self, const struct store_victim *victims, size_t count, struct nebula_error *failure)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < count && !status; i++) {
                uint64_t number = watched_call(self, CALL_REMOVE, victims[i].key, &status, failure);

                if (!status)
                        status = watched.real->remove(self, &victims[i], 1, failure);
                status = watched_answer(number, status, failure);
        }
        return status;
}

static inline enum nebula_status watched_clock(struct store *self, int64_t *ret_ns, struct nebula_error *failure)
{
        enum nebula_status status;

        watched_call(self, CALL_CLOCK, "", &status, failure);
        if (!status)
                status = watched.real->clock(self, ret_ns, failure);
        *ret_ns += status ? 0 : watched.ahead_ns;
        return status;
}

static inline enum nebula_status watched_copy(struct store *self, const char *from, const char *to, enum store_condition condition,
                                              struct nebula_error *failure)
{
        enum nebula_status status;
        uint64_t number = watched_call(self, CALL_COPY, to, &status, failure);
        char *data;
        size_t size;

        if (!status)
                status = watched.real->get(self, from, SIZE_MAX, &data, &size, NULL, failure);
        if (status)
                return status;
        if (watched.before)
                watched.before(self, CALL_COPY, to);
        status = watched.real->put(self, to, data, size, condition, NULL, NULL, failure);
        free(data);
        return watched_answer(number, status, failure);
}

static inline void watched_begin(struct store *self)
{
        memset(&watched, 0, sizeof watched);
        watched.real = self->ops;
        watched.ops = *self->ops;
        watched.ops.put = watched_put;
        watched.ops.get = watched_get;
        watched.ops.upload = watched_upload;
        watched.ops.publish = watched_publish;
        watched.ops.read = watched_read;
        watched.ops.list = watched_list;
        watched.ops.stat = watched_stat;
        watched.ops.remove = watched_remove;
        watched.ops.clock = watched_clock;
        watched.ops.copy = watched_copy;
        self->ops = &watched.ops;
}

/* Makes the call with that number fail. */
static inline void watched_fail(enum watched_failure how, uint64_t number)
{
        watched.fail_at = how == ANSWER_IS_LOST ? 0 : number;
        watched.lose_at = how == ANSWER_IS_LOST ? number : 0;
        watched.goes_on = how == PROGRAM_DIES;
}

static inline void watched_end(struct store *self)
{
        self->ops = watched.real;
}

#endif
