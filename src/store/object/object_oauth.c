/* Bearer tokens of services that speak OAuth: a directory, which takes a POST, or a service of the machine, which takes a GET. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define UNKNOWN_LIFE_S 600      /* of a token without an expiry time */
#define TOKEN_MAX (64u << 10)
#define MACHINE_TRIES 5
#define MACHINE_CONNECT_MS 2000 /* the service is on this machine's network card or does not exist */

void object_oauth_pair(struct buf *buf, const char *separator, const char *name, const char *value)
{
        buf_add_text(buf, separator);
        buf_add_text(buf, name);
        buf_add_byte(buf, '=');
        url_encode(buf, value, "");
}

/* Parses a number, or a text that holds one, because services differ. -1: it is neither. */
static int64_t number_of(const json_t *value)
{
        char *end;
        int64_t number;

        if (json_is_integer(value))
                return json_integer_value(value);
        if (!json_is_string(value) || !*json_string_value(value))
                return -1;
        number = strtoll(json_string_value(value), &end, 10);
        return *end ? -1 : number;
}

static int64_t life_s(const json_t *body)
{
        int64_t in_s = number_of(json_object_get(body, "expires_in")), on_s = number_of(json_object_get(body, "expires_on"));

        return in_s > 0 ? in_s : on_s > 0 ? on_s - os->wall_ns() / SECOND_NS : UNKNOWN_LIFE_S;
}

char *object_oauth_read(json_t *answer, const char *name, int64_t *ret_life_s)
{
        const char *text = json_string_value(json_object_get(answer, name));
        char *token = text && *text ? strdup(text) : NULL;

        *ret_life_s = life_s(answer);
        object_forget_json(answer);
        return token;
}

static enum nebula_status read_answer(const struct object_oauth *oauth, const struct http_response *response, char **ret_text, int64_t *ret_life_s,
                                      struct nebula_error *error)
{
        char *token = object_oauth_read(response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL, "access_token", ret_life_s);

        if (!token)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s: the answer holds no token", oauth->name);
        *ret_text = token;
        return NEBULA_OK;
}

/* Adds the JSON web token of the caller. */
static enum nebula_status add_jwt(struct buf *buf, const struct object_oauth *oauth, struct nebula_error *error)
{
        char *text;
        enum nebula_status status = object_jwt_sign(oauth->jwt, &text, error);

        if (status)
                return status;
        object_oauth_pair(buf, "&", "assertion", text);
        object_forget(text);
        return NEBULA_OK;
}

/* Makes the body of the POST; NULL with *ret_status NEBULA_OK: the request is a GET. */
static char *make_form(const struct object_oauth *oauth, enum nebula_status *ret_status, struct nebula_error *error)
{
        struct buf buf = { .is_secret = true };
        char *text = NULL;
        size_t size = 0;
        int result;

        *ret_status = NEBULA_OK;
        if (!oauth->form)
                return NULL;
        buf_add_text(&buf, oauth->form);
        if (oauth->assertion) {
                result = os_read_file(oauth->assertion, TOKEN_MAX, &text, &size); /* read each time, because the cluster replaces it */
                if (result) {
                        buf_done(&buf);
                        *ret_status = error_set(error, NEBULA_UNAVAILABLE, -result, "%s: %s", oauth->name, oauth->assertion);
                        return NULL;
                }
                text[strcspn(text, "\r\n")] = 0;
                object_oauth_pair(&buf, "&", "client_assertion", text);
                object_forget_bytes(text, size);
        }
        if (oauth->jwt && (*ret_status = add_jwt(&buf, oauth, error)) != NEBULA_OK) {
                buf_done(&buf);
                return NULL;
        }
        text = object_take(&buf);
        if (!text)
                *ret_status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        return text;
}

/* Reports a refusal. The directory's own sentence holds no secret. */
static enum nebula_status refused(const struct object_oauth *oauth, const struct http_response *response, struct nebula_error *error)
{
        json_t *body = response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL;
        const char *what = json_string_value(json_object_get(body, "error")), *why = json_string_value(json_object_get(body, "error_description"));
        enum nebula_status status;

        status = error_set(error, NEBULA_STORAGE, 0, "%s gets no token: the answer is %d%s%.60s%s%.200s", oauth->name, response->status,
                           what ? " " : "", what ? what : "", why ? ": " : "", why ? why : "");
        if (oauth->is_machine) /* the last choice: the user may have meant another credential */
                error_prefix(error, "%s", oauth->missing);
        if (error)
                error->http_status = response->status;
        json_decref(body);
        return status;
}

static enum nebula_status ask(const struct object_oauth *oauth, const char *form, struct http_response *ret_response, struct nebula_error *error)
{
        struct http_header headers[] = { { oauth->header ? oauth->header : "Content-Type",
                                           oauth->header ? oauth->secret : "application/x-www-form-urlencoded" } };
        struct http_request request = {
                .method = form ? "POST" : "GET", .url = oauth->url, .headers = headers, .header_count = 1,
                .body = form, .body_size = form ? strlen(form) : 0, .is_local = !form, .text_max = TOKEN_MAX, .answer_is_secret = true,
                .connect_ms = oauth->is_machine ? MACHINE_CONNECT_MS : 0, .retry_ms = oauth->is_machine ? 5000 : 0,
        };

        return http_send(&request, ret_response, error);
}

/* Retries answers 404 and 410: the machine's own service gives them while it starts or is replaced. */
static enum nebula_status fetch_from_service(const struct object_oauth *oauth, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        struct http_response response = { 0 };
        enum nebula_status status;
        char *form = make_form(oauth, &status, error);
        int64_t pause_ms = http_settings_now().pause_ms;

        for (int tries = 0; !status && tries < MACHINE_TRIES; tries++) {
                http_response_done(&response);
                status = ask(oauth, form, &response, error);
                if (status || !oauth->is_machine || (response.status != 404 && response.status != 410))
                        break;
                os->sleep_ms(pause_ms << tries);
        }
        if (status && oauth->is_machine)
                error_prefix(error, "%s, and %s does not answer", oauth->missing, oauth->name);
        else if (!status)
                status = response.status == 200 ? read_answer(oauth, &response, ret_text, ret_life_s, error) : refused(oauth, &response, error);
        if (response.text)
                crypt_forget(response.text, response.text_size);
        http_response_done(&response);
        object_forget(form);
        return status;
}

static enum nebula_status fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        struct object_oauth *oauth = source;
        struct nebula_error failure;
        enum nebula_status status = fetch_from_service(oauth, ret_text, ret_life_s, error);

        if (!status || !oauth->log_in) {
                atomic_store(&oauth->used, oauth->name);
                return status;
        }
        switch (oauth->log_in(NULL, ret_text, ret_life_s, &failure)) {
        case NEBULA_OK:
                atomic_store(&oauth->used, oauth->login_name);
                return NEBULA_OK;
        case NEBULA_NOT_FOUND:
                return status;
        default:
                error_prefix(error, "%s", failure.message);
                return status;
        }
}

static void done(void *source)
{
        struct object_oauth *oauth = source;

        object_forget(oauth->form);
        object_forget(oauth->secret);
        free(oauth->name);
        free(oauth->url);
        free(oauth->assertion);
        free(oauth->header);
        object_jwt_free(oauth->jwt);
        free(oauth);
}

const char *object_oauth_name(const struct object_token *token)
{
        const struct object_oauth *oauth = object_token_source(token);
        const char *used = atomic_load(&oauth->used);

        return used ? used : oauth->name;
}

struct object_token *object_oauth_find(struct object_oauth *texts)
{
        struct object_oauth *oauth = malloc(sizeof *oauth);
        struct object_token *token = NULL;
        struct buf buf = { .is_secret = true };
        char *identity;

        if (!oauth)
                return NULL;
        *oauth = *texts;
        *texts = (struct object_oauth){ 0 };
        for (size_t i = 0; i < 5; i++) {
                const char *part = i == 0 ? oauth->url : i == 1 ? oauth->form : i == 2 ? oauth->assertion : i == 3 ? oauth->secret :
                                   oauth->jwt ? oauth->jwt->key : NULL;

                buf_add_text(&buf, part ? part : "");
                buf_add_byte(&buf, '\n');
        }
        identity = object_take(&buf);
        if (identity && oauth->name && oauth->url && (!oauth->header || oauth->secret))
                token = object_token_find(&(struct object_token_source){ identity, fetch, oauth, done });
        else
                done(oauth);
        object_forget(identity);
        return token;
}
