/* Keys that a program prints: credential_process of a profile. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/s3/s3_private.h"

#define TIMEOUT_MS 60000 /* that of AWS's own libraries */

static enum nebula_status read_printed(const char *name, json_t *body, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const char *access = json_string_value(json_object_get(body, "AccessKeyId")), *secret = json_string_value(json_object_get(body, "SecretAccessKey"));
        const char *expiration = json_string_value(json_object_get(body, "Expiration"));
        bool is_known = json_integer_value(json_object_get(body, "Version")) == 1 && access && secret;
        char *text = is_known ? s3_keys_text(access, secret, json_string_value(json_object_get(body, "SessionToken"))) : NULL;

        *ret_life_s = expiration ? s3_life_of(expiration) : INT64_MAX;
        object_forget_json(body);
        if (!is_known)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s does not print a JSON object with Version 1, AccessKeyId and SecretAccessKey", name);
        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
        *ret_text = text;
        return NEBULA_OK;
}

/* Reads the command each time, because the file may have changed. */
static enum nebula_status fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const char *profile = source;
        char *command = s3_profile_value_of(profile, "credential_process"), name[120];
        enum nebula_status status;
        json_t *printed;

        snprintf(name, sizeof name, "the credential_process of the profile \"%.60s\"", profile);
        if (!command)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the profile \"%.60s\" has no credential_process any more", profile);
        status = object_program_run(name, command, TIMEOUT_MS, &printed, error);
        object_forget(command);
        return status ? status : read_printed(name, printed, ret_text, ret_life_s, error);
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
