/* A program of the user that prints a secret. */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/object/object.h"

#define PRINTED_MAX (64u << 10)

static enum nebula_status failed(const char *name, int64_t timeout_ms, int result, struct nebula_error *error)
{
        if (result == -ETIMEDOUT)
                return error_set(error, NEBULA_TIMEOUT, 0, "%s has not ended after %lld s", name, (long long)(timeout_ms / 1000));
        if (result == -EFBIG)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s prints more than 64 KiB", name);
        return error_set(error, NEBULA_UNAVAILABLE, -result, "%s cannot be run", name);
}

enum nebula_status object_program_run(const char *name, const char *command, int64_t timeout_ms, struct json_t **ret_printed, struct nebula_error *error)
{
        char *copy = strdup(command), *printed = malloc(PRINTED_MAX);
        char *const argv[] = { (char *)"sh", (char *)"-c", copy, NULL };
        enum nebula_status status = NEBULA_OK;
        size_t size = 0;
        int code = 0, result = copy && printed ? os->run("/bin/sh", argv, timeout_ms, printed, PRINTED_MAX, &size, &code) : -ENOMEM;

        if (result)
                status = failed(name, timeout_ms, result, error);
        else if (code)
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "%s ended with the code %d: run it in a shell to see why", name, code);
        else
                *ret_printed = json_loadb(printed, size, 0, NULL);
        object_forget(copy);
        object_forget_bytes(printed, PRINTED_MAX);
        return status;
}
