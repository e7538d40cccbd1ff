#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/agent.h"
#include "agent/box.h"
#include "agent/clients/listener.h"
#include "agent/clock.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/page_maker.h"
#include "agent/memory/survival_log.h"
#include "agent/peers/replica.h"
#include "agent/persist/due.h"
#include "agent/persist/worker.h"
#include "agent/publish/publish.h"
#include "agent/publish/publish_list.h"
#include "agent/rooms.h"
#include "base/conf.h"
#include "base/error.h"
#include "base/vars.h"
#include "os/os.h"
#include "os/os_create.h"
#include "os/process.h"
#include "os/thread.h"

#define RIVAL_WAIT_MS 10000 /* time for a killed agent to give its memory back */
#define END_WAIT_NS 10000000000 /* time for threads that storage blocks; after that the process ends without them */
#define PENDING_SAID_NS 60000000000
#define END_NOW_NS 2000000000   /* the same, if unfinished work is dropped */

struct agent {
        struct catalogue catalogue;
        struct memory memory;
        struct ipc_place place;
        int listen_fd;
        struct listener *listener;
        pthread_t worker, page_maker;
        bool in_process;
        bool worker_ended, page_maker_ended; /* guarded by the catalogue's lock */
};

static void refuse_setting(const struct nebula_error *error)
{
        log_event(LOG_LEVEL_WARN, "%s; the default is used", error->message);
}

static uint64_t size_setting(const char *name, uint64_t fallback)
{
        struct nebula_error error;
        const char *text = conf_env(name);
        uint64_t value;

        if (!text)
                return fallback;
        if (!conf_parse_size(name, text, &value, &error))
                return value;
        refuse_setting(&error);
        return fallback;
}

/* In whole seconds, rounded up; at most ten years. */
static uint64_t time_setting(const char *name, uint64_t fallback)
{
        const double most = 10 * 365 * 86400.0;
        struct nebula_error error;
        const char *text = conf_env(name);
        double seconds;
        uint64_t whole;

        if (!text)
                return fallback;
        if (conf_parse_duration(name, text, &seconds, &error)) {
                refuse_setting(&error);
                return fallback;
        }
        whole = (uint64_t)(seconds < most ? seconds : most);
        return (double)whole < seconds && seconds < most ? whole + 1 : whole;
}

/* The C library gives each thread a heap, and a heap keeps most of what was freed in it. */
#define HEAPS_MAX 2

/* NEBULA_CHECK_VALUES: how much of the values the agent looks at. */
static enum catalogue_values values_setting(void)
{
        static const char *const words[] = { [CATALOGUE_VALUES_OFF] = "off", [CATALOGUE_VALUES_SAMPLE] = "sample", [CATALOGUE_VALUES_ALL] = "all" };
        const char *text = conf_env("NEBULA_CHECK_VALUES");
        struct nebula_error error;

        for (size_t i = 0; text && i < sizeof words / sizeof *words; i++)
                if (!strcmp(text, words[i]))
                        return (enum catalogue_values)i;
        if (text) {
                error_set(&error, NEBULA_INVALID, 0, "NEBULA_CHECK_VALUES is \"%.60s\": it must be sample, all or off", text);
                refuse_setting(&error);
        }
        return CATALOGUE_VALUES_SAMPLE;
}

static void *worker_thread(void *argument)
{
        struct agent *agent = argument;

        clock_main(&agent->catalogue);
        catalogue_lock(&agent->catalogue);
        agent->worker_ended = true;
        catalogue_signal(&agent->catalogue);
        catalogue_unlock(&agent->catalogue);
        return NULL;
}

static void *page_maker_thread(void *argument)
{
        struct agent *agent = argument;

        page_maker_main(&agent->catalogue);
        catalogue_lock(&agent->catalogue);
        agent->page_maker_ended = true;
        catalogue_signal(&agent->catalogue);
        catalogue_unlock(&agent->catalogue);
        return NULL;
}

static void report_threads_to_stop(struct catalogue *catalogue)
{
        catalogue_lock(catalogue);
        catalogue->stopping = true;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
}

static enum nebula_status start_threads(struct agent *agent, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        int result = os_thread_start(&agent->worker, worker_thread, agent, false);

        if (result < 0)
                goto failed;
        result = os_thread_start(&agent->page_maker, page_maker_thread, agent, false);
        if (result < 0)
                goto undo_worker;
        status = listener_start(&agent->catalogue, agent->listen_fd, &agent->listener, error);
        if (status == NEBULA_OK)
                return NEBULA_OK;
        report_threads_to_stop(&agent->catalogue);
        pthread_join(agent->page_maker, NULL);
undo_worker:
        report_threads_to_stop(&agent->catalogue);
        pthread_join(agent->worker, NULL);
failed:
        return status ? status : error_set(error, NEBULA_UNAVAILABLE, -result, "cannot start the agent's threads");
}

static void end_process(struct catalogue *catalogue)
{
        (void)catalogue;
        os_signal_self();
}

/* Closes the listening socket, so that no client finds an agent that is ending. */
static void end_in_process(struct catalogue *catalogue)
{
        struct agent *agent = (struct agent *)catalogue; /* the catalogue is its first member */

        os->unlink(agent->place.socket);
        os->shutdown(agent->listen_fd);
        catalogue_lock(catalogue);
        catalogue->stopping = true;
        memory_unlink_all(catalogue->memory);
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        publish_forget(catalogue);
}

enum nebula_status agent_start(const struct ipc_place *place, bool in_process, struct agent **ret_agent, struct nebula_error *error)
{
        struct agent *agent = calloc(1, sizeof *agent);
        char why[600];

        if (!agent)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an agent");
        agent->place = *place;
        agent->in_process = in_process;
        catalogue_init(&agent->catalogue, agent_rooms, &agent->memory);
        agent->catalogue.in_process = in_process;
        agent->catalogue.linger_s = time_setting("NEBULA_AGENT_LINGER", 600);
        agent->catalogue.give_up_s = time_setting("NEBULA_PERSIST_GIVE_UP", 600);
        agent->catalogue.memory_wait_s = time_setting("NEBULA_MEMORY_WAIT", agent->catalogue.memory_wait_s);
        agent->catalogue.quiet_s = time_setting("NEBULA_QUIET_S", 30);
        agent->catalogue.takeover_s = time_setting("NEBULA_TAKEOVER_S", 30);
        agent->catalogue.hang_s = time_setting("NEBULA_HANG_S", 60);
        agent->catalogue.check_memory_s = time_setting("NEBULA_CHECK_MEMORY", 3600);
        agent->catalogue.check_values = values_setting();
        agent->catalogue.runtime_dir = agent->place.directory;
        agent->catalogue.sweep_age_s = time_setting("NEBULA_SWEEP_AGE", 900);
        agent->catalogue.end = in_process ? end_in_process : end_process;
        memory_init(agent->catalogue.memory, place->memory, size_setting("NEBULA_MEMORY_BUFFER_SIZE", 0), why, sizeof why);
        if (why[0])
                log_event(LOG_LEVEL_WARN, "the agent keeps images in memfds, which end with it: %s", why);
        survival_log_adopt_all(&agent->catalogue);
        publish_adopt_all(&agent->catalogue);
        os->unlink(place->socket); /* left by a killed agent: the lock shows that none is alive */
        agent->listen_fd = os->listen(place->socket);
        if (agent->listen_fd < 0) {
                error_set(error, NEBULA_UNAVAILABLE, -agent->listen_fd, "cannot listen on %s", place->socket);
                goto undo_memory;
        }
        /* Before the threads that use it. */
        if (replica_start(&agent->catalogue, error))
                log_event(LOG_LEVEL_WARN, "the agent makes no copies on other nodes: %s", error ? error->message : "");
        if (start_threads(agent, error))
                goto undo_replica;
        log_event(LOG_LEVEL_INFO, "agent %u is ready: version %s, memory budget %" PRIu64 " MiB in %s", os->pid(), NEBULA_VERSION,
                 agent->catalogue.memory->budget >> 20,
                 agent->catalogue.memory->directory[0] ? agent->catalogue.memory->directory : "memfds");
        *ret_agent = agent;
        return NEBULA_OK;

undo_replica:
        report_threads_to_stop(&agent->catalogue);
        replica_stop(&agent->catalogue);
        os->close(agent->listen_fd);
        os->unlink(place->socket);
undo_memory:
        memory_stop_removing(agent->catalogue.memory, false);
        publish_done(&agent->catalogue);
        catalogue_done(&agent->catalogue);
        memory_done(agent->catalogue.memory, false);
        free(agent);
        return NEBULA_UNAVAILABLE;
}

/* Shows in the log which storage hangs. Lock held. */
static void log_pending(const struct catalogue *catalogue)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                uint64_t count = 0, bytes = 0;

                for (const struct version *version = job->versions; version; version = version->next)
                        if (version_unsaved(version)) {
                                count++;
                                bytes += version_size(version);
                        }
                if (count)
                        log_event(LOG_LEVEL_INFO, "before the end %" PRIu64 " versions, %" PRIu64 " MiB, are written to %s", count, bytes >> 20,
                                  job->persist_path);
        }
}

/* Whether a version that storage failed is the newest of a job, so that only memory holds it. Lock held. */
static bool holds_given_up(const struct catalogue *catalogue)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                uint64_t stored = 0, given_up = 0;

                for (const struct version *version = job->versions; version; version = version->next) {
                        if (version->stored && version->sequence > stored)
                                stored = version->sequence;
                        if (version->failed_by_storage && !version->gives_way && version->sequence > given_up)
                                given_up = version->sequence;
                }
                if (given_up > stored)
                        return true;
        }
        return false;
}

bool agent_drain(struct agent *agent)
{
        struct catalogue *catalogue = &agent->catalogue;
        int64_t since_ns, said_ns = INT64_MIN;
        bool done;

        catalogue_lock(catalogue);
        since_ns = os->now_ns();
        catalogue->draining++; /* the agent ends, so it stays */
        due_want_all(catalogue, NULL);
        while (due_draining(catalogue, since_ns) && !catalogue->dropping) {
                if (os->now_ns() - PENDING_SAID_NS > said_ns) {
                        log_pending(catalogue);
                        said_ns = os->now_ns();
                }
                catalogue_wait(catalogue, &catalogue->moved, PENDING_SAID_NS / 1000000);
        }
        done = (!due_any(catalogue) && !holds_given_up(catalogue)) || catalogue->dropping;
        catalogue_unlock(catalogue);
        return done;
}

/* False if a thread did not end in time. */
static bool end_threads(struct agent *agent)
{
        struct catalogue *catalogue = &agent->catalogue;
        int64_t until;
        bool ended;

        catalogue_lock(catalogue);
        until = os->now_ns() + (catalogue->dropping ? END_NOW_NS : END_WAIT_NS);
        catalogue->stopping = true;
        catalogue_signal(catalogue);
        for (;;) {
                listener_shut(agent->listener);
                ended = listener_has_ended(agent->listener) && agent->worker_ended && agent->page_maker_ended && replica_ended(catalogue);
                if (ended || os->now_ns() > until)
                        break;
                catalogue_wait(catalogue, &catalogue->moved, 100);
        }
        catalogue_unlock(catalogue);
        return ended;
}

void agent_stop(struct agent *agent, bool forget)
{
        struct catalogue *catalogue = &agent->catalogue;
        bool ended;

        os->unlink(agent->place.socket);
        ended = end_threads(agent);
        catalogue_lock(catalogue);
        if (catalogue->draining && !catalogue->dropping && due_any(catalogue))
                forget = false; /* committed after the drain, while the listener still answered */
        if (forget)
                survival_log_forget(catalogue);
        if (forget && !ended)
                memory_unlink_all(catalogue->memory);
        catalogue_unlock(catalogue);
        if (!ended) {
                log_event(LOG_LEVEL_INFO, "the agent ends although storage still blocks a thread");
                return; /* the threads still use the catalogue; the process ends anyway */
        }
        listener_free(agent->listener);
        pthread_join(agent->worker, NULL);
        pthread_join(agent->page_maker, NULL);
        replica_stop(catalogue);
        os->close(agent->listen_fd);
        /* Before catalogue_done, which only drops references to images and must not remove those that stay. */
        memory_stop_removing(catalogue->memory, forget);
        if (forget)
                publish_forget(catalogue);
        publish_done(catalogue);
        catalogue_done(catalogue);
        memory_done(catalogue->memory, forget);
        free(agent);
}

/* Returns 0: the lock is ours; 1: an agent runs and answers; or a negative errno. */
static int take_lock(const struct ipc_place *place, int *ret_fd)
{
        int fd = os->open(place->lock, OS_READ | OS_WRITE | OS_CREATE | OS_NOFOLLOW);

        if (fd < 0)
                return fd;
        for (int64_t waited = 0;; waited += 50) {
                int result = os->lock(fd, OS_LOCK_ALONE), probe;

                if (result >= 0) {
                        *ret_fd = fd;
                        return 0;
                }
                probe = os->connect(place->socket);
                if (probe >= 0) {
                        os->close(probe);
                        os->close(fd);
                        return 1;
                }
                if (waited >= RIVAL_WAIT_MS) {
                        os->close(fd);
                        return result;
                }
                os->sleep_ms(50);
        }
}

/* The agent outlives the process that started it, and may serve others. So a trainer that starts it lends it no keys: each trainer brings its
 * own with its first request. */
static void choose_variables(bool is_of_trainer)
{
        char text[160];

        if (is_of_trainer)
                vars_forget_own();
        snprintf(text, sizeof text, "the agent, process %u, has %s", os->pid(),
                 is_of_trainer ? "no keys and settings, because no trainer of this job has brought any" : "the keys and settings of its own environment");
        vars_own_origin(text);
}

/* Runs until the process ends. ready_fd < 0: no process waits for the report. */
static int run(const struct ipc_place *place, int ready_fd, const char *log_path)
{
        struct nebula_error error = { 0 };
        struct agent *agent = NULL;
        int lock_fd = -1, result, signal_number;
        bool all_durable = true, at_once;

        mallopt(M_ARENA_MAX, HEAPS_MAX);
        os_limits_raise();
        os_signals_block();
        os_umask_take();
        result = take_lock(place, &lock_fd);
        if (result) {
                char text[OS_DAEMON_TEXT_MAX] = "";

                if (result < 0)
                        snprintf(text, sizeof text, "another agent holds %.400s and does not answer: %s", place->lock,
                                 os_error_text(result));
                else if (ready_fd < 0)
                        snprintf(text, sizeof text, "an agent is running already");
                if (ready_fd >= 0)
                        os_daemon_ready(ready_fd, text);
                else
                        fprintf(stderr, "nebula agent: %s\n", text);
                return result < 0 || ready_fd < 0;
        }
        log_open(log_path);
        choose_variables(ready_fd >= 0);
        if (place->other_count && conf_env("XDG_RUNTIME_DIR"))
                log_event(LOG_LEVEL_INFO, "the agent of user %u is in %s: XDG_RUNTIME_DIR (%s) does not decide that, so that "
                                          "shells with different values find the same agent; set NEBULA_RUNTIME_DIR to choose "
                                          "another directory", os->uid(), place->directory, conf_env("XDG_RUNTIME_DIR"));
        if (agent_box_enter(place, &error) || agent_start(place, false, &agent, &error)) {
                log_event(LOG_LEVEL_WARN, "the agent cannot start: %s", error.message);
                if (ready_fd >= 0)
                        os_daemon_ready(ready_fd, error.message);
                else
                        fprintf(stderr, "nebula agent: %s\n", error.message);
                return 1;
        }
        if (ready_fd >= 0)
                os_daemon_ready(ready_fd, NULL);
        signal_number = os_signals_wait();
        catalogue_lock(&agent->catalogue);
        at_once = agent->catalogue.dropping;
        catalogue_unlock(&agent->catalogue);
        if (!at_once)
                all_durable = agent_drain(agent);
        log_event(LOG_LEVEL_INFO, "ending on signal %d%s", signal_number,
                 all_durable ? "" : "; storage fails, versions that are not durable stay in memory for the next agent");
        agent_stop(agent, all_durable);
        log_close();
        os->close(lock_fd); /* the file stays: a process that waits for the lock must not lock a removed file */
        return 0;
}

static int run_daemon(const struct ipc_place *place)
{
        char text[OS_DAEMON_TEXT_MAX];
        int ready_fd, result = os_daemonise(&ready_fd, text);

        if (result < 0)
                snprintf(text, sizeof text, "cannot start a process: %s", os_error_text(result));
        if (result) {
                if (text[0])
                        fprintf(stderr, "nebula agent: %s\n", text);
                return text[0] != 0;
        }
        return run(place, ready_fd, place->log);
}

int agent_main(int argc, char **argv)
{
        struct nebula_error error = { 0 };
        struct ipc_place *place;
        bool daemon = argc == 2 && !strcmp(argv[1], "--daemon");
        int result = 1;

        if (!daemon && !(argc == 2 && !strcmp(argv[1], "--foreground"))) {
                fprintf(stderr, "usage: nebula agent --daemon | --foreground\n");
                return 2;
        }
        place = calloc(1, sizeof *place);
        if (!place)
                return 1;
        if (ipc_place_find(place, &error) || ipc_place_make(place, &error))
                fprintf(stderr, "nebula agent: %s\n", error.message);
        else
                result = daemon ? run_daemon(place) : run(place, -1, "-");
        free(place);
        return result;
}
