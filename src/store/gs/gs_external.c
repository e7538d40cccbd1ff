/* Tokens of workload identity federation (AIP-4117): another provider's token, from a file, a service of this machine, a program or AWS, is
 * exchanged at Google's STS. If the file names a service account, the resulting token is exchanged once more for one of that account. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/gs/gs_private.h"
#include "store/http/crypt.h"

#define TOKEN_URL "https://sts.googleapis.com/v1/token"
#define TEXT_MAX (64u << 10)
#define HEADERS_MAX 8
#define UNKNOWN_LIFE_S 600
#define PROGRAM_TIMEOUT_MS 30000 /* Google's default, and its limits */
#define PROGRAM_TIMEOUT_MIN_MS 5000
#define PROGRAM_TIMEOUT_MAX_MS 120000
#define LIFE_S 3600 /* of the service account's token, unless the file names another */

struct external {
        json_t *body; /* the file */
        char *name;   /* for messages */
};

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
}

static enum nebula_status no_token(const struct external *external, enum nebula_status status, int code, const char *what, struct nebula_error *error)
{
        return error_set(error, status, code, "%s: %s", external->name, what);
}

static const char *text_of(const json_t *object, const char *name)
{
        return json_string_value(json_object_get(object, name));
}

static const json_t *source_of(const struct external *external)
{
        return json_object_get(external->body, "credential_source");
}

static bool is_program(const json_t *source)
{
        return text_of(json_object_get(source, "executable"), "command") != NULL;
}

/* The subject token in a text: the whole text, or a member of a JSON object. NULL with error: it is not there. */
static char *read_subject(const struct external *external, const char *text, size_t size, struct nebula_error *error)
{
        const json_t *format = json_object_get(source_of(external), "format");
        const char *type = text_of(format, "type"), *field = text_of(format, "subject_token_field_name"), *found;
        json_t *body = NULL;
        char *subject = NULL;

        if (!type || !strcmp(type, "text")) {
                while (size && strchr(" \t\r\n", text[size - 1]))
                        size--;
                subject = size ? strndup(text, size) : NULL;
        } else {
                body = json_loadb(text, size, 0, NULL);
                found = field ? text_of(body, field) : NULL;
                subject = found && *found ? strdup(found) : NULL;
                object_forget_json(body);
        }
        if (!subject)
                no_token(external, NEBULA_UNAVAILABLE, 0, "its credential_source holds no token in the form that \"format\" names", error);
        return subject;
}

static char *subject_of_file(const struct external *external, const char *path, struct nebula_error *error)
{
        char *text, *subject;
        size_t size;
        int result = os_read_file(path, TEXT_MAX, &text, &size);

        if (result) {
                error_set(error, NEBULA_UNAVAILABLE, -result, "%s: cannot read the token file %.200s", external->name, path);
                return NULL;
        }
        subject = read_subject(external, text, size, error);
        object_forget_bytes(text, size);
        return subject;
}

static char *subject_of_url(const struct external *external, const char *url, struct nebula_error *error)
{
        const json_t *fields = json_object_get(source_of(external), "headers");
        struct http_header headers[HEADERS_MAX];
        struct http_request request = { .method = "GET", .url = url, .headers = headers, .is_local = !strncmp(url, "http://", 7), .text_max = TEXT_MAX,
                                        .answer_is_secret = true };
        struct http_response response = { 0 };
        char *subject = NULL, what[80];
        const char *name;
        json_t *value;

        json_object_foreach((json_t *)(uintptr_t)fields, name, value)
                if (request.header_count < HEADERS_MAX && json_string_value(value) && !strpbrk(name, "\r\n") && !strpbrk(json_string_value(value), "\r\n"))
                        headers[request.header_count++] = (struct http_header){ name, json_string_value(value) };
        if (http_send(&request, &response, error)) {
                error_prefix(error, "%s: the service of its credential_source", external->name);
                return NULL;
        }
        snprintf(what, sizeof what, "the service of its credential_source answers %d", response.status);
        if (response.status != 200 || !response.text)
                no_token(external, NEBULA_STORAGE, 0, what, error);
        else
                subject = read_subject(external, response.text, response.text_size, error);
        s3_forget_answer(&response);
        return subject;
}

/* The answer of a program (AIP-4117): {"version": 1, "success": true, "token_type", "id_token" or "saml_response", "expiration_time"}. */
static char *read_program(const struct external *external, json_t *body, struct nebula_error *error)
{
        json_t *until = json_object_get(body, "expiration_time");
        const char *type = text_of(body, "token_type");
        const char *found = text_of(body, type && strstr(type, "saml2") ? "saml_response" : "id_token");
        bool is_good = json_integer_value(json_object_get(body, "version")) == 1 && json_is_true(json_object_get(body, "success")) &&
                       (!until || json_integer_value(until) > os->wall_ns() / SECOND_NS);
        char *subject = is_good && found && *found ? strdup(found) : NULL;

        object_forget_json(body);
        if (!subject)
                no_token(external, NEBULA_UNAVAILABLE, 0, "its program prints no token that is valid now", error);
        return subject;
}

static int64_t program_timeout_ms(const json_t *program)
{
        const json_t *given = json_object_get(program, "timeout_millis");
        int64_t timeout_ms = given ? json_integer_value(given) : PROGRAM_TIMEOUT_MS;

        return timeout_ms < PROGRAM_TIMEOUT_MIN_MS ? PROGRAM_TIMEOUT_MIN_MS : timeout_ms > PROGRAM_TIMEOUT_MAX_MS ? PROGRAM_TIMEOUT_MAX_MS : timeout_ms;
}

/* Adds the variables that Google's libraries give to the program. */
static char *program_command(const struct external *external, const char *command)
{
        static const char *const names[] = { "audience", "subject_token_type" }, *const variables[] = { "AUDIENCE", "TOKEN_TYPE" };
        struct buf buf = { 0 };

        buf_add_text(&buf, "GOOGLE_EXTERNAL_ACCOUNT_INTERACTIVE=0 ");
        for (size_t i = 0; i < 2; i++) {
                const char *value = text_of(external->body, names[i]);

                buf_add_text(&buf, "GOOGLE_EXTERNAL_ACCOUNT_");
                buf_add_text(&buf, variables[i]);
                buf_add_text(&buf, "='");
                for (; value && *value; value++)
                        if (*value != '\'')
                                buf_add_byte(&buf, (uint8_t)*value);
                buf_add_text(&buf, "' ");
        }
        buf_add_text(&buf, command);
        return object_take(&buf);
}

static char *subject_of_program(const struct external *external, struct nebula_error *error)
{
        const json_t *program = json_object_get(source_of(external), "executable");
        char *command = program_command(external, text_of(program, "command"));
        json_t *printed;
        enum nebula_status status = command ? object_program_run("its program", command, program_timeout_ms(program), &printed, error) : no_memory(error);

        object_forget(command);
        if (!status)
                return read_program(external, printed, error);
        error_prefix(error, "%s", external->name);
        return NULL;
}

static char *subject_of_aws(const struct external *external, struct nebula_error *error)
{
        char *subject = gs_aws_subject(source_of(external), text_of(external->body, "audience"), error);

        if (!subject)
                error_prefix(error, "%s", external->name);
        return subject;
}

static char *find_subject(const struct external *external, struct nebula_error *error)
{
        const json_t *source = source_of(external);
        const char *file = text_of(source, "file"), *url = text_of(source, "url");

        if (text_of(source, "environment_id"))
                return subject_of_aws(external, error);
        return file ? subject_of_file(external, file, error) : url ? subject_of_url(external, url, error) : subject_of_program(external, error);
}

static bool has_client(const struct external *external)
{
        return text_of(external->body, "client_id") && text_of(external->body, "client_secret");
}

static char *make_form(const struct external *external, const char *subject)
{
        const char *project = text_of(external->body, "workforce_pool_user_project");
        bool is_loan = text_of(external->body, "service_account_impersonation_url") != NULL;
        struct buf buf = { .is_secret = true }, options = { 0 };
        char *text;

        object_oauth_pair(&buf, "", "grant_type", "urn:ietf:params:oauth:grant-type:token-exchange");
        object_oauth_pair(&buf, "&", "requested_token_type", "urn:ietf:params:oauth:token-type:access_token");
        object_oauth_pair(&buf, "&", "audience", text_of(external->body, "audience"));
        object_oauth_pair(&buf, "&", "scope", is_loan ? "https://www.googleapis.com/auth/cloud-platform" : GS_SCOPE);
        object_oauth_pair(&buf, "&", "subject_token_type", text_of(external->body, "subject_token_type"));
        object_oauth_pair(&buf, "&", "subject_token", subject);
        if (project && !has_client(external)) {
                json_t *object = json_pack("{s:s}", "userProject", project);

                text = object ? json_dumps(object, JSON_COMPACT) : NULL;
                json_decref(object);
                buf_add_text(&options, text ? text : "");
                buf.failed = buf.failed || !text;
                free(text);
                text = object_take(&options);
                object_oauth_pair(&buf, "&", "options", text ? text : "");
                free(text);
        }
        return object_take(&buf);
}

/* "Basic ..." of the file's client. NULL: no memory. */
static char *client_of(const struct external *external)
{
        struct buf pair = { .is_secret = true }, buf = { .is_secret = true };
        char *text, *encoded;

        buf_add_text(&pair, text_of(external->body, "client_id"));
        buf_add_byte(&pair, ':');
        buf_add_text(&pair, text_of(external->body, "client_secret"));
        text = object_take(&pair);
        encoded = text ? malloc(CRYPT_BASE64_SIZE(strlen(text))) : NULL;
        if (encoded) {
                crypt_base64(text, strlen(text), encoded);
                buf_add_text(&buf, "Basic ");
                buf_add_text(&buf, encoded);
        }
        buf.failed = buf.failed || !encoded;
        object_forget(text);
        object_forget(encoded);
        return object_take(&buf);
}

/* Reports a refusal of Google. Its own sentence holds no secret. */
static enum nebula_status refused(const struct external *external, const char *who, const struct http_response *response, struct nebula_error *error)
{
        json_t *body = response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL;
        const json_t *what = json_object_get(body, "error");
        const char *name = json_string_value(what), *why = text_of(body, "error_description");
        enum nebula_status status;

        if (json_is_object(what)) {
                name = text_of(what, "status");
                why = text_of(what, "message");
        }
        status = error_set(error, NEBULA_STORAGE, 0, "%s gets no token of %s: the answer is %d %.60s: %.200s", external->name, who, response->status,
                           name ? name : "", why ? why : "");
        if (error)
                error->http_status = response->status;
        json_decref(body);
        return status;
}

/* Exchanges the subject token for one of Google's. */
static enum nebula_status exchange(const struct external *external, const char *subject, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const char *url = text_of(external->body, "token_url");
        char *form = make_form(external, subject), *client = has_client(external) ? client_of(external) : NULL;
        struct http_header headers[] = { { "Content-Type", "application/x-www-form-urlencoded" }, { "Authorization", client } };
        struct http_request request = { .method = "POST", .url = url ? url : TOKEN_URL, .headers = headers, .header_count = client ? 2 : 1, .body = form,
                                        .body_size = form ? strlen(form) : 0, .text_max = TEXT_MAX, .answer_is_secret = true };
        struct http_response response = { 0 };
        enum nebula_status status = form && (client || !has_client(external)) ? http_send(&request, &response, error) : no_memory(error);
        json_t *body = response.status == 200 && response.text ? json_loadb(response.text, response.text_size, 0, NULL) : NULL;
        const char *found = text_of(body, "access_token");
        int64_t life_s = json_integer_value(json_object_get(body, "expires_in"));

        if (!status && !found)
                status = refused(external, "STS", &response, error);
        if (!status && !(*ret_text = strdup(found)))
                status = no_memory(error);
        *ret_life_s = life_s > 0 ? life_s : UNKNOWN_LIFE_S;
        object_forget_json(body);
        s3_forget_answer(&response);
        object_forget(form);
        object_forget(client);
        return status;
}

/* Exchanges that token for one of the service account. */
static enum nebula_status lend(const struct external *external, const char *url, const char *token, char **ret_text, int64_t *ret_life_s,
                               struct nebula_error *error)
{
        const json_t *given = json_object_get(json_object_get(external->body, "service_account_impersonation"), "token_lifetime_seconds");
        char form[200], *bearer;
        struct buf buf = { .is_secret = true };
        struct http_header headers[] = { { "Content-Type", "application/json" }, { "Authorization", NULL } };
        struct http_request request = { .method = "POST", .url = url, .headers = headers, .header_count = 2, .body = form, .text_max = TEXT_MAX,
                                        .answer_is_secret = true };
        struct http_response response = { 0 };
        enum nebula_status status;
        const char *found;
        json_t *body;

        buf_add_text(&buf, "Bearer ");
        buf_add_text(&buf, token);
        bearer = object_take(&buf);
        headers[1].value = bearer;
        snprintf(form, sizeof form, "{\"scope\":[\"" GS_SCOPE "\"],\"lifetime\":\"%llds\"}", given ? (long long)json_integer_value(given) : LIFE_S);
        request.body_size = strlen(form);
        status = bearer ? http_send(&request, &response, error) : no_memory(error);
        body = response.status == 200 && response.text ? json_loadb(response.text, response.text_size, 0, NULL) : NULL;
        found = text_of(body, "accessToken");
        if (!status && !found)
                status = refused(external, "the service account", &response, error);
        if (!status && !(*ret_text = strdup(found)))
                status = no_memory(error);
        *ret_life_s = s3_life_of(text_of(body, "expireTime"));
        object_forget_json(body);
        s3_forget_answer(&response);
        object_forget(bearer);
        return status;
}

static enum nebula_status fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const struct external *external = source;
        const char *account = text_of(external->body, "service_account_impersonation_url");
        char *subject = find_subject(external, error), *token = NULL;
        enum nebula_status status = subject ? exchange(external, subject, &token, ret_life_s, error) : error->status;

        object_forget(subject);
        if (!status && !account) {
                *ret_text = token;
                return NEBULA_OK;
        }
        if (!status)
                status = lend(external, account, token, ret_text, ret_life_s, error);
        object_forget(token);
        return status;
}

static void done(void *source)
{
        struct external *external = source;

        object_forget_json(external->body);
        free(external->name);
        free(external);
}

/* Returns a phrase that names a setting which the file lacks. NULL: the file lacks none. */
static const char *missing(const json_t *body)
{
        const json_t *source = json_object_get(body, "credential_source");
        const char *allowed = conf_env("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES");

        if (!text_of(body, "audience") || !text_of(body, "subject_token_type"))
                return "lacks audience or subject_token_type";
        if (text_of(source, "environment_id"))
                return strcmp(text_of(source, "environment_id"), "aws1") ? "has another environment_id than aws1" : NULL;
        if (text_of(source, "file") || text_of(source, "url"))
                return NULL;
        if (!is_program(source))
                return "has no credential_source that is supported (file, url, executable or environment_id)";
        return allowed && !strcmp(allowed, "1") ? NULL : "names a program: set GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1 to have it run";
}

struct object_token *gs_external_find(json_t *body, const char *path, struct nebula_error *error)
{
        const char *lacks = missing(body);
        struct external *external;
        struct object_token *token;
        char *identity;

        if (lacks) {
                error_set(error, NEBULA_INVALID, 0, "%.200s %s", path, lacks);
                return NULL;
        }
        external = calloc(1, sizeof *external);
        identity = json_dumps(body, JSON_COMPACT | JSON_SORT_KEYS);
        if (external)
                *external = (struct external){ json_deep_copy(body), strdup("the workload identity of GOOGLE_APPLICATION_CREDENTIALS") };
        if (external && external->body && external->name && identity) {
                token = object_token_find(&(struct object_token_source){ identity, fetch, external, done });
        } else {
                token = NULL;
                if (external)
                        done(external);
        }
        object_forget(identity);
        return token;
}
