/* The session: its life, its settings, requests about all checkpoints, and forks. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/os.h"

static struct lock list_lock = LOCK_INIT(LOCK_SESSIONS); /* guards `sessions` and each `next` */
static struct nebula_session *sessions;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/*
 * A forked child (usually a worker of a data loader) must not use its parent's connection or write into its images. It
 * also must not inherit a lock that another thread held. request_lock is only tried, because it may be held for long,
 * even by the forking thread. If it was not taken, the child forgets the state it guards.
 */
static void before_fork(void)
{
        lock_take(&list_lock);
        for (struct nebula_session *session = sessions; session; session = session->next) {
                session->was_locked = lock_try(&session->request_lock);
                lock_take_beside(&session->settings_lock);
        }
        client_wires_before_fork();
}

static void after_fork_in_parent(void)
{
        client_wires_after_fork(false);
        for (struct nebula_session *session = sessions; session; session = session->next) {
                lock_give(&session->settings_lock);
                if (session->was_locked)
                        lock_give(&session->request_lock);
        }
        lock_give(&list_lock);
}

static void after_fork_in_child(void)
{
        client_wires_after_fork(true);
        for (struct nebula_session *session = sessions; session; session = session->next) {
                lock_init(&session->settings_lock, LOCK_SETTINGS);
                lock_init(&session->request_lock, LOCK_REQUEST);
                if (session->was_locked) {
                        client_wire_close(&session->wire);
                        if (session->pool) /* the child has one thread and no device, so it must not be called there */
                                capture_pool_watch(session->pool, NULL, NULL);
                        capture_pool_free(session->pool);
                }
                session->wire = session->idle_wire = (struct client_wire){ .fd = -1 };
                session->unsent = NULL; /* the parent reports it to the agent */
                session->pool = NULL;
                copies_fork(session);
                spares_init(session);
                session->retry_pause_ms = 0;
        }
        lock_init(&list_lock, LOCK_SESSIONS);
}

static void watch_forks(void)
{
        cow_watch_forks();
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void list_add(struct nebula_session *session)
{
        pthread_once(&fork_once, watch_forks);
        lock_take(&list_lock);
        session->next = sessions;
        sessions = session;
        lock_give(&list_lock);
}

/* True: it was the last session. */
static bool list_remove(struct nebula_session *session)
{
        bool is_last;

        lock_take(&list_lock);
        for (struct nebula_session **at = &sessions; *at; at = &(*at)->next) {
                if (*at == session) {
                        *at = session->next;
                        break;
                }
        }
        is_last = !sessions;
        lock_give(&list_lock);
        return is_last;
}

enum nebula_status session_make_pool(struct nebula_session *session, struct nebula_error *error)
{
        enum nebula_status status = session->pool ? NEBULA_OK : capture_pool_new(&session->pool, error);

        if (status == NEBULA_OK)
                capture_pool_watch(session->pool, session->unmapping, session->unmapping_argument);
        return status;
}

static void session_free(struct nebula_session *session)
{
        spares_done(session);
        copies_done(session);
        client_wire_close(&session->wire);
        client_wire_close(&session->idle_wire);
        capture_pool_free(session->pool);
        vars_drop(session->settings.variables);
        lock_done(&session->request_lock);
        lock_done(&session->settings_lock);
        free(session);
}

enum nebula_status nebula_session_open(const struct nebula_options *options, nebula_session **ret_session,
                                       struct nebula_error *ret_error)
{
        struct nebula_session *session;
        enum nebula_status status;
        int result;

        if (!options || !ret_session)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_open needs options and a place for the session");
        session = calloc(1, sizeof *session);
        if (!session)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a session");
        session->wire.fd = session->idle_wire.fd = -1;
        lock_init(&session->settings_lock, LOCK_SETTINGS);
        lock_init(&session->request_lock, LOCK_REQUEST);
        copies_init(session);
        spares_init(session);
        status = client_settings_read(options, &session->settings, ret_error);
        if (status != NEBULA_OK)
                goto free_session;
        result = os->random(&session->settings.hello.session_nonce, sizeof session->settings.hello.session_nonce);
        if (result < 0) {
                status = error_set(ret_error, NEBULA_UNAVAILABLE, -result, "the system gives no random number");
                goto free_session;
        }
        list_add(session);
        lock_take(&session->request_lock);
        status = session_connect(session, ret_error);
        lock_give(&session->request_lock);
        if (status != NEBULA_OK)
                goto leave_list;
        *ret_session = session;
        return NEBULA_OK;

leave_list:
        list_remove(session);
free_session:
        session_free(session);
        return status;
}

/* Whether checkpoints before and after these settings belong to two different jobs. */
static bool is_another_job(nebula_session *session, const struct ipc_hello *hello)
{
        bool is_other;

        lock_take(&session->settings_lock);
        is_other = strcmp(hello->persist_path, session->settings.hello.persist_path) || strcmp(hello->job, session->settings.hello.job);
        lock_give(&session->settings_lock);
        return is_other;
}

/* Takes request_lock. A change to another job ends the session's part in the last one: a copy still in progress
 * could not become complete there. So this waits for copies first. */
static void lock_for_configure(nebula_session *session, const struct ipc_hello *hello)
{
        /* The copying threads cannot wait for themselves. */
        bool may_lock = !is_another_job(session, hello) || copies_are_on_this_thread(session);

        lock_take(&session->request_lock);
        if (!may_lock)
                session_report_unsent(session, false, NULL); /* it may begin a copy: a new agent does not know the image */
        while (!may_lock && copies_await(session, 0, 0, NULL) != NEBULA_OK) {
                lock_give(&session->request_lock);
                copies_await(session, 0, -1, NULL);
                lock_take(&session->request_lock);
                session_report_unsent(session, false, NULL);
        }
}

/* The caller holds settings_lock. The two swap their variables. */
static void take_variables(nebula_session *session, struct client_settings *settings)
{
        struct vars *before = session->settings.variables;

        session->settings.variables = settings->variables;
        settings->variables = before;
}

static enum nebula_status configure(nebula_session *session, const struct client_settings *settings, struct nebula_error *error)
{
        struct client_call call = { .type = IPC_CONFIGURE, .timeout_ms = CLIENT_ANSWER_MS };
        enum nebula_status status;
        char *greeting;

        status = client_make_greeting(&settings->hello, settings->variables, &greeting, &call.size, error);
        if (status != NEBULA_OK)
                return status;
        call.request = greeting;
        status = session_call(session, &call, error);
        client_forget_greeting(greeting, call.size);
        return status;
}

/* Lets a forked child with settings of its own leave its parent's session: otherwise the parent's next checkpoints
 * would take the child's settings. The caller holds request_lock. */
static enum nebula_status leave_parent(nebula_session *session, struct client_settings *settings, struct nebula_error *error)
{
        struct ipc_hello before, *hello = &settings->hello;
        enum nebula_status status;
        uint64_t number;
        int result = os->random(&number, sizeof number);

        if (result < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -result, "the system gives no random number");
        hello->pid = os->pid();
        hello->session_nonce = IPC_NONCE_FAMILY(hello->session_nonce) | (number & ~IPC_NONCE_FAMILY(UINT64_MAX));
        client_wire_close(&session->wire);
        lock_take(&session->settings_lock);
        client_wire_close(&session->idle_wire);
        before = session->settings.hello;
        session->settings.hello = *hello;
        take_variables(session, settings);
        lock_give(&session->settings_lock);
        status = session_connect(session, error);
        if (status != NEBULA_OK) {
                lock_take(&session->settings_lock);
                session->settings.hello = before;
                take_variables(session, settings); /* back */
                lock_give(&session->settings_lock);
        }
        return status;
}

enum nebula_status nebula_session_configure(nebula_session *session, const struct nebula_options *options,
                                            struct nebula_error *ret_error)
{
        struct client_settings *settings;
        enum nebula_status status;
        bool is_same, is_child;

        if (!session || !options)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_configure needs a session and options");
        settings = malloc(sizeof *settings);
        if (!settings)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for the settings");
        status = client_settings_read(options, settings, ret_error);
        if (status != NEBULA_OK)
                goto free_settings;

        lock_for_configure(session, &settings->hello);
        lock_take(&session->settings_lock);
        settings->hello.session_nonce = session->settings.hello.session_nonce;
        is_child = settings->hello.pid != session->settings.hello.pid;
        settings->hello.pid = session->settings.hello.pid;
        settings->hello.has_begun = session->settings.hello.has_begun;
        settings->hello.pulse_fd = is_child ? -1 : session->settings.hello.pulse_fd;
        is_same = memcmp(&settings->hello, &session->settings.hello, sizeof settings->hello) == 0 &&
                  vars_same(settings->variables, session->settings.variables);
        memcpy(session->settings.agent_path, settings->agent_path, sizeof settings->agent_path);
        session->settings.capture = settings->capture;
        lock_give(&session->settings_lock);
        if (!is_same && is_child)
                status = leave_parent(session, settings, ret_error);
        if (!is_same && !is_child)
                status = configure(session, settings, ret_error);
        if (!is_same && !is_child && status == NEBULA_OK) {
                lock_take(&session->settings_lock);
                session->settings.hello = settings->hello;
                take_variables(session, settings);
                lock_give(&session->settings_lock);
        }
        lock_give(&session->request_lock);
free_settings:
        vars_drop(settings->variables);
        free(settings);
        return status;
}

void nebula_session_close(nebula_session *session)
{
        bool is_last;

        if (!session || copies_close_later(session) || spares_close_later(session))
                return;
        is_last = list_remove(session);
        lock_take(&session->request_lock); /* waits for a running save */
        session_forget_unsent(session); /* without its commit the file's version never becomes complete */
        lock_give(&session->request_lock);
        session_free(session);
        if (is_last)
                capture_copy_rest();
}

/* An unsent copy keeps its image: if the next agent does not know it, the file is saved again from there. */
static void forget_images(struct nebula_session *session)
{
        const struct client_copy *unsent = atomic_load(&session->unsent);
        uint64_t image_id = unsent ? unsent->image_id : 0;

        if (unsent && session->pool) {
                capture_pool_keep(session->pool, &image_id, 1);
                return;
        }
        capture_pool_free(session->pool);
        session->pool = NULL;
}

void nebula_session_leave(nebula_session *session)
{
        if (!session || copies_are_on_this_thread(session))
                return;
        spares_end(session);
        lock_take(&session->request_lock);
        session_report_unsent(session, false, NULL); /* it may begin a copy: a new agent does not know the image */
        while (copies_await(session, 0, 0, NULL) != NEBULA_OK) {
                lock_give(&session->request_lock);
                copies_await(session, 0, -1, NULL);
                lock_take(&session->request_lock);
                session_report_unsent(session, false, NULL);
        }
        client_wire_close(&session->wire);
        lock_take(&session->settings_lock);
        client_wire_close(&session->idle_wire);
        lock_give(&session->settings_lock);
        forget_images(session);
        lock_give(&session->request_lock);
}

void nebula_session_watch_images(nebula_session *session, void (*unmapping)(void *argument, void *image), void *argument)
{
        if (!session)
                return;
        lock_take(&session->request_lock);
        session->unmapping = unmapping;
        session->unmapping_argument = argument;
        if (session->pool)
                capture_pool_watch(session->pool, unmapping, argument);
        lock_give(&session->request_lock);
}

void nebula_session_watch_spares(nebula_session *session, void (*mapped)(void *argument, void *image, uint64_t capacity_bytes),
                                 void *argument)
{
        if (!session)
                return;
        lock_take(&session->request_lock);
        session->mapped = mapped;
        session->mapped_argument = argument;
        lock_give(&session->request_lock);
}

void nebula_session_watch_waits(nebula_session *session, int (*is_interrupted)(void *argument), void *argument)
{
        if (!session)
                return;
        lock_take(&session->request_lock);
        session->is_interrupted = is_interrupted;
        session->interrupted_argument = argument;
        lock_give(&session->request_lock);
}

enum nebula_status nebula_session_settle(nebula_session *session, int64_t timeout_ms, struct nebula_error *ret_error)
{
        if (!session)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_settle needs a session");
        return copies_await(session, 0, timeout_ms, ret_error);
}

static uint64_t flush_begins(struct nebula_session *session)
{
        uint64_t number;

        lock_take(&session->settings_lock);
        number = ++session->flushed.begun;
        lock_give(&session->settings_lock);
        return number;
}

/* Records a successful flush. Without a storage path a flush makes nothing durable. */
static void flush_ends(struct nebula_session *session, uint64_t number, const char tag[IPC_NAME_MAX], uint64_t agent_nonce)
{
        struct client_flushed *flushed = &session->flushed;

        lock_take(&session->settings_lock);
        if (tag[0]) {
                memcpy(flushed->tag, tag, sizeof flushed->tag);
                flushed->one = number;
                flushed->one_nonce = agent_nonce;
        } else if (session->settings.hello.persist_path[0]) {
                flushed->all = number;
                flushed->all_nonce = agent_nonce;
        }
        lock_give(&session->settings_lock);
}

enum nebula_status nebula_session_flush(nebula_session *session, const char *tag, int64_t timeout_ms,
                                        struct nebula_error *ret_error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_flush request = { .timeout_ms = timeout_ms };
        struct client_call call = {
                .type = IPC_FLUSH, .request = &request, .size = sizeof request,
                .timeout_ms = client_patience_ms(timeout_ms),
        };
        enum nebula_status status;
        uint64_t number;

        if (!session)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_flush needs a session");
        number = flush_begins(session);
        status = client_text(request.tag, sizeof request.tag, tag, "the tag", ret_error);
        session_report_all(session);
        if (status == NEBULA_OK)
                status = copies_await(session, 0, timeout_ms, ret_error);
        if (status == NEBULA_OK)
                status = session_call_alone(session, &wire, &call, ret_error);
        if (status == NEBULA_OK)
                flush_ends(session, number, request.tag, wire.agent_nonce);
        session_wire_done(session, &wire);
        return status;
}

enum nebula_status nebula_session_report(nebula_session *session, enum nebula_report report, const char *persist_path,
                                         char **ret_text, struct nebula_error *ret_error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_report request = { .report = report };
        struct client_call call = {
                .type = IPC_REPORT, .request = &request, .size = sizeof request, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;

        if (!session || !ret_text || (unsigned)report > NEBULA_REPORT_PINS)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_report needs a session, a known report and "
                                 "a place for the text");
        session_report_all(session);
        status = client_persist_path(request.persist_path, persist_path, ret_error);
        if (status == NEBULA_OK)
                status = session_call_alone(session, &wire, &call, ret_error);
        if (status == NEBULA_OK)
                status = client_take_text(&wire.frame, ret_text, ret_error);
        session_wire_done(session, &wire);
        return status;
}

void nebula_text_free(char *text)
{
        free(text);
}
