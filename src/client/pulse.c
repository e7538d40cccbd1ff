/* Steps and phases of the program, in a page that the agent reads. The greeting names its descriptor, so the next agent finds it too. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/os.h"

#define PAGE_BYTES 4096

struct nebula_pulse {
        nebula_session *session;
        struct ipc_pulse *page;
        int fd;
        uint32_t pid; /* a forked child has the page in common with its parent, which is the one that is watched */
};

/* Reports to the agent. If that is impossible now, the next greeting does. */
static void greet(nebula_session *session, int fd)
{
        struct client_call call = { .type = IPC_CONFIGURE, .timeout_ms = CLIENT_ANSWER_MS };
        char *greeting;

        lock_take(&session->request_lock);
        lock_take(&session->settings_lock);
        session->settings.hello.pulse_fd = fd;
        lock_give(&session->settings_lock);
        if (fd >= 0 && !client_make_greeting(&session->settings.hello, session->settings.variables, &greeting, &call.size, NULL)) {
                call.request = greeting;
                session_call(session, &call, NULL);
                client_forget_greeting(greeting, call.size);
        }
        lock_give(&session->request_lock);
}

enum nebula_status nebula_pulse_open(nebula_session *session, const struct nebula_pulse_options *options, nebula_pulse **ret_pulse,
                                     struct nebula_error *ret_error)
{
        struct nebula_pulse *pulse;
        void *page;
        int result;

        if (!session || !options || !ret_pulse)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_pulse_open needs a session, options and a place for the pulse");
        pulse = calloc(1, sizeof *pulse);
        if (!pulse)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a pulse");
        pulse->session = session;
        pulse->pid = os->pid();
        pulse->fd = result = os->memfd("nebula-pulse");
        if (result < 0)
                goto free_pulse;
        result = os->truncate(pulse->fd, PAGE_BYTES);
        if (!result)
                result = os->map(pulse->fd, 0, PAGE_BYTES, OS_MAP_READ | OS_MAP_WRITE, &page);
        if (result < 0)
                goto close_file;
        pulse->page = page;
        pulse->page->stack_signal = options->stack_signal;
        pulse->page->stack_fd = options->stack_fd;
        pulse->page->ends_hung = options->ends_hung;
        greet(session, pulse->fd);
        *ret_pulse = pulse;
        return NEBULA_OK;

close_file:
        os->close(pulse->fd);
free_pulse:
        free(pulse);
        return error_set(ret_error, NEBULA_UNAVAILABLE, -result, "the page for steps cannot be made");
}

void nebula_pulse_step(nebula_pulse *pulse, uint64_t step)
{
        __atomic_store_n(&pulse->page->step, step, __ATOMIC_RELAXED);
        __atomic_store_n(&pulse->page->at_ns, os->now_ns(), __ATOMIC_RELAXED);
        __atomic_fetch_add(&pulse->page->beats, 1, __ATOMIC_RELEASE);
}

void nebula_pulse_phase(nebula_pulse *pulse, const char *phase)
{
        struct ipc_pulse *page = pulse->page;

        __atomic_fetch_add(&page->phase_changes, 1, __ATOMIC_ACQ_REL);
        memset(page->phase, 0, sizeof page->phase);
        if (phase)
                memcpy(page->phase, phase, strnlen(phase, sizeof page->phase - 1));
        __atomic_fetch_add(&page->phase_changes, 1, __ATOMIC_RELEASE);
}

void nebula_pulse_rest(nebula_pulse *pulse)
{
        if (pulse->pid == os->pid())
                __atomic_store_n(&pulse->page->beats, 0, __ATOMIC_RELEASE);
}

void nebula_pulse_close(nebula_pulse *pulse)
{
        if (!pulse)
                return;
        nebula_pulse_rest(pulse); /* the agent may read the page for some time */
        greet(pulse->session, -1);
        os->unmap(pulse->page, PAGE_BYTES);
        os->close(pulse->fd);
        free(pulse);
}
