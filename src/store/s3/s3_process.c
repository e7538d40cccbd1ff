/* Keys that a program prints: credential_process of a profile. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/s3/s3_private.h"

#define PRINTED_MAX (64u << 10)
#define TIMEOUT_MS 60000 /* that of AWS's own libraries */

static enum nebula_status failed(const char *profile, enum nebula_status status, int result, const char *what, struct nebula_error *error)
{
        return error_set(error, status, -result, "the credential_process of the profile \"%.60s\" %s", profile, what);
}

/* Messages hold nothing that the program printed. */
static enum nebula_status read_printed(const char *profile, const char *printed, size_t size, char **ret_text, int64_t *ret_life_s,
                                       struct nebula_error *error)
{
        json_t *body = json_loadb(printed, size, 0, NULL);
        const char *access = json_string_value(json_object_get(body, "AccessKeyId")), *secret = json_string_value(json_object_get(body, "SecretAccessKey"));
        const char *expiration = json_string_value(json_object_get(body, "Expiration"));
        bool is_known = json_integer_value(json_object_get(body, "Version")) == 1;
        char *text = is_known && access && secret ? s3_keys_text(access, secret, json_string_value(json_object_get(body, "SessionToken"))) : NULL;

        *ret_life_s = expiration ? s3_life_of(expiration) : INT64_MAX;
        is_known = is_known && access && secret;
        object_forget_json(body);
        if (!is_known)
                return failed(profile, NEBULA_UNAVAILABLE, 0, "does not print a JSON object with Version 1, AccessKeyId and SecretAccessKey", error);
        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
        *ret_text = text;
        return NEBULA_OK;
}

/* A shell takes the command apart, as in AWS's libraries for other languages. */
static enum nebula_status run(const char *profile, char *command, char *printed, size_t *ret_size, struct nebula_error *error)
{
        char *const argv[] = { (char *)"sh", (char *)"-c", command, NULL };
        char what[80];
        int code, result = os->run("/bin/sh", argv, TIMEOUT_MS, printed, PRINTED_MAX, ret_size, &code);

        if (result == -ETIMEDOUT)
                return failed(profile, NEBULA_TIMEOUT, result, "has not ended after a minute", error);
        if (result)
                return failed(profile, NEBULA_UNAVAILABLE, result, result == -EFBIG ? "prints more than 64 KiB" : "cannot be run", error);
        snprintf(what, sizeof what, "ended with the code %d: run it in a shell to see why", code);
        return code ? failed(profile, NEBULA_UNAVAILABLE, 0, what, error) : NEBULA_OK;
}

/* Reads the command each time, because the file may have changed. */
static enum nebula_status fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const char *profile = source;
        char *command = s3_profile_value_of(profile, "credential_process"), *printed = malloc(PRINTED_MAX);
        enum nebula_status status;
        size_t size = 0;

        if (!printed)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
        else if (!command)
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the profile \"%.60s\" has no credential_process any more", profile);
        else
                status = run(profile, command, printed, &size, error);
        if (!status)
                status = read_printed(profile, printed, size, ret_text, ret_life_s, error);
        object_forget(command);
        object_forget_bytes(printed, PRINTED_MAX);
        return status;
}

static void done(void *source)
{
        free(source);
}

struct object_token *s3_process_find(const char *profile)
{
        char identity[300], *source = strdup(profile);

        if (!source)
                return NULL;
        snprintf(identity, sizeof identity, "aws process of %.200s", profile);
        return object_token_find(&(struct object_token_source){ identity, fetch, source, done });
}
