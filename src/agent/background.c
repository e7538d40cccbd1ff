#include <pthread.h>

#include "agent/background.h"
#include "os/thread.h"

struct background {
        void (*run)(void *argument);
        void *argument;
};

static void *background_main(void *argument)
{
        const struct background *background = argument;

        background->run(background->argument);
        return NULL;
}

void background_run(void (*run)(void *argument), void *argument)
{
        struct background background = { run, argument };
        pthread_t thread;

        if (os_thread_start(&thread, background_main, &background, true))
                run(argument);
        else
                pthread_join(thread, NULL);
}
