/* client.h - the client's side of a test with a server of its own: settings, credentials, and what the server's threads have written. */
#ifndef NB_TESTS_STORE_CLIENT_H
#define NB_TESTS_STORE_CLIENT_H

#include <pthread.h>
#include <stdlib.h>

#include "store/http/http.h"
#include "store/object/object.h"
#include "test_dir.h"

/* A client that gives up soon, and has no credentials: no variable, no token, and an empty home, which is made at `directory`. */
static inline void client_has_no_credentials(const char *const *variables, size_t count, char *directory)
{
        struct http_settings settings = http_settings_now();

        settings.pause_ms = 2;
        settings.retry_ms = settings.retry_new_ms = 100;
        http_settings_set(&settings);
        for (size_t i = 0; i < count; i++)
                unsetenv(variables[i]);
        object_token_forget_all();
        test_dir_make(directory);
        setenv("HOME", directory, 1);
}

/* This thread sees what the server's threads have written before under this lock, and they see what it has written. */
static inline void client_meets_server(pthread_mutex_t *lock)
{
        pthread_mutex_lock(lock);
        pthread_mutex_unlock(lock);
}

#endif
