/*
 * Bearer tokens. The environment names one identity at most, in the order of make_identity; where it names none, the machine's own may exist.
 * A token is kept for the whole process and replaced some minutes before it ends, because a service that hands tokens out
 * refuses those who ask for each request.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"
#include "store/http/url.h"

#define RESOURCE "https://storage.azure.com/"
#define IMDS_HOST "http://169.254.169.254"
#define LOGIN_HOST "https://login.microsoftonline.com"
#define EARLY_S 300           /* a token is replaced so long before its end, or in the last half of a short life */
#define UNKNOWN_LIFE_S 600    /* of a token that does not say when it ends */
#define AGAIN_S 30            /* after a failure, while the old token is still good */
#define TOKEN_MAX (64u << 10)
#define IMDS_TRIES 5
#define IMDS_CONNECT_MS 2000  /* the service is on this machine's network card, or nowhere */

struct azure_identity {
        struct azure_identity *next;
        char *name;          /* for messages, and to find it again: the same text is the same identity */
        char *url, *form;    /* form: what is posted; NULL: the token is asked for with GET */
        char *assertion;     /* the file whose text goes behind the form; NULL: none */
        char *header, *secret; /* what the service wants to see; NULL: nothing */
        bool is_imds;
        struct lock lock;    /* guards the rest; held while a token is fetched, for which all wait alike */
        char *token;
        uint64_t serial;     /* of the token; 0: there is none */
        int64_t until_ns, renew_ns;
};

static struct lock identities_lock = LOCK_INIT(LOCK_AZURE_IDENTITIES);
static struct azure_identity *identities;

static char *take(struct buf *buf)
{
        size_t size;

        return buf_take(buf, &size);
}

static void add_pair(struct buf *buf, const char *separator, const char *name, const char *value)
{
        buf_add_text(buf, separator);
        buf_add_text(buf, name);
        buf_add_byte(buf, '=');
        url_encode(buf, value, "");
}

static const char *client_id(void)
{
        return conf_env("AZURE_CLIENT_ID") ? conf_env("AZURE_CLIENT_ID") : conf_env("DEFAULT_IDENTITY_CLIENT_ID");
}

/* GET of a service of this machine. */
static void ask_service(struct azure_identity *identity, const char *name, const char *endpoint, const char *version, const char *id_name,
                        const char *header, const char *secret)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, endpoint);
        add_pair(&buf, strchr(endpoint, '?') ? "&" : "?", "api-version", version);
        add_pair(&buf, "&", "resource", RESOURCE);
        if (client_id())
                add_pair(&buf, "&", id_name, client_id());
        identity->url = take(&buf);
        identity->name = strdup(name);
        identity->header = strdup(header);
        identity->secret = strdup(secret);
}

/* POST to the directory of the tenant. `secret` NULL: a signed file of the cluster proves who asks. */
static void ask_directory(struct azure_identity *identity, const char *name, const char *secret)
{
        const char *host = conf_env("AZURE_AUTHORITY_HOST") ? conf_env("AZURE_AUTHORITY_HOST") : LOGIN_HOST;
        size_t length = strlen(host);
        struct buf buf = { 0 };

        buf_add(&buf, host, length - (host[length - 1] == '/'));
        buf_add_byte(&buf, '/');
        url_encode(&buf, conf_env("AZURE_TENANT_ID"), "");
        buf_add_text(&buf, "/oauth2/v2.0/token");
        identity->url = take(&buf);
        add_pair(&buf, "", "client_id", conf_env("AZURE_CLIENT_ID"));
        add_pair(&buf, "&", "grant_type", "client_credentials");
        add_pair(&buf, "&", "scope", RESOURCE ".default");
        if (secret)
                add_pair(&buf, "&", "client_secret", secret);
        else
                add_pair(&buf, "&", "client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer");
        identity->form = take(&buf);
        identity->name = strdup(name);
        if (!secret)
                identity->assertion = strdup(conf_env("AZURE_FEDERATED_TOKEN_FILE"));
}

static void make_identity(struct azure_identity *identity)
{
        bool has_tenant = conf_env("AZURE_CLIENT_ID") && conf_env("AZURE_TENANT_ID");
        const char *imds = conf_env("AZURE_POD_IDENTITY_AUTHORITY_HOST");
        char endpoint[300];

        if (has_tenant && conf_env("AZURE_CLIENT_SECRET")) {
                ask_directory(identity, "the application of AZURE_CLIENT_ID", conf_env("AZURE_CLIENT_SECRET"));
        } else if (has_tenant && conf_env("AZURE_FEDERATED_TOKEN_FILE")) {
                ask_directory(identity, "the workload identity of AZURE_FEDERATED_TOKEN_FILE", NULL);
        } else if (conf_env("IDENTITY_ENDPOINT") && conf_env("IDENTITY_HEADER")) {
                ask_service(identity, "the identity of IDENTITY_ENDPOINT", conf_env("IDENTITY_ENDPOINT"), "2019-08-01", "client_id",
                            "X-IDENTITY-HEADER", conf_env("IDENTITY_HEADER"));
        } else if (conf_env("MSI_ENDPOINT") && conf_env("MSI_SECRET")) {
                ask_service(identity, "the identity of MSI_ENDPOINT", conf_env("MSI_ENDPOINT"), "2017-09-01", "clientid", "secret",
                            conf_env("MSI_SECRET"));
        } else {
                snprintf(endpoint, sizeof endpoint, "%.200s/metadata/identity/oauth2/token", imds ? imds : IMDS_HOST);
                ask_service(identity, "the managed identity of this machine", endpoint, "2018-02-01", "client_id", "Metadata", "true");
                identity->is_imds = true;
        }
}

static void forget(char *secret)
{
        if (secret)
                crypt_forget(secret, strlen(secret));
        free(secret);
}

static void free_identity(struct azure_identity *identity)
{
        forget(identity->form);
        forget(identity->secret);
        forget(identity->token);
        free(identity->name);
        free(identity->url);
        free(identity->assertion);
        free(identity->header);
        free(identity);
}

static bool same(const char *a, const char *b)
{
        return !a || !b ? a == b : !strcmp(a, b);
}

struct azure_identity *azure_identity_find(void)
{
        struct azure_identity *made = calloc(1, sizeof *made), *found;

        if (!made)
                return NULL;
        make_identity(made);
        if (!made->name || !made->url || (made->header && !made->secret)) {
                free_identity(made);
                return NULL;
        }
        lock_take(&identities_lock);
        for (found = identities; found; found = found->next)
                if (same(found->url, made->url) && same(found->form, made->form) && same(found->assertion, made->assertion) &&
                    same(found->secret, made->secret))
                        break;
        if (!found) {
                found = made;
                lock_init(&found->lock, LOCK_AZURE_TOKEN);
                found->next = identities;
                identities = found;
        }
        lock_give(&identities_lock);
        if (found != made)
                free_identity(made);
        return found;
}

const char *azure_identity_name(const struct azure_identity *identity)
{
        return identity->name;
}

void azure_identity_forget_all(void)
{
        lock_take(&identities_lock);
        while (identities) {
                struct azure_identity *next = identities->next;

                lock_done(&identities->lock);
                free_identity(identities);
                identities = next;
        }
        lock_give(&identities_lock);
}

/* Of a number or a text that is one, as services differ. -1: it is neither. */
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
        int64_t life = in_s > 0 ? in_s : on_s > 0 ? on_s - os->wall_ns() / 1000000000 : UNKNOWN_LIFE_S;

        return life < 0 ? 0 : life > 7 * 86400 ? 7 * 86400 : life;
}

/* Lock held. */
static enum nebula_status keep_token(struct azure_identity *identity, const struct http_response *response, struct nebula_error *error)
{
        json_t *body = response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL;
        const char *text = json_string_value(json_object_get(body, "access_token"));
        char *token = text && *text ? strdup(text) : NULL;
        int64_t life = life_s(body), early = life / 2 < EARLY_S ? life / 2 : EARLY_S, now_ns = os->now_ns();

        json_decref(body);
        if (!token)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s: the answer holds no token", identity->name);
        forget(identity->token);
        identity->token = token;
        identity->serial++;
        identity->until_ns = now_ns + life * 1000000000;
        identity->renew_ns = now_ns + (life - early) * 1000000000;
        return NEBULA_OK;
}

/* What is posted; NULL with *ret_status NEBULA_OK: nothing is. */
static char *make_form(const struct azure_identity *identity, enum nebula_status *ret_status, struct nebula_error *error)
{
        struct buf buf = { 0 };
        char *text = NULL;
        size_t size = 0;
        int result;

        *ret_status = NEBULA_OK;
        if (!identity->form)
                return NULL;
        buf_add_text(&buf, identity->form);
        if (identity->assertion) {
                result = os_read_file(identity->assertion, TOKEN_MAX, &text, &size); /* anew each time: the cluster replaces it */
                if (result) {
                        buf_done(&buf);
                        *ret_status = error_set(error, NEBULA_UNAVAILABLE, -result, "AZURE_FEDERATED_TOKEN_FILE: %s", identity->assertion);
                        return NULL;
                }
                text[strcspn(text, "\r\n")] = 0;
                add_pair(&buf, "&", "client_assertion", text);
                forget(text);
        }
        text = take(&buf);
        if (!text)
                *ret_status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        return text;
}

/* A directory says why it refuses; its sentence holds no secret. */
static enum nebula_status refused(const struct azure_identity *identity, const struct http_response *response, struct nebula_error *error)
{
        json_t *body = response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL;
        const char *what = json_string_value(json_object_get(body, "error")), *why = json_string_value(json_object_get(body, "error_description"));
        enum nebula_status status;

        status = error_set(error, NEBULA_STORAGE, 0, "%s gets no token: the answer is %d %.60s: %.200s", identity->name, response->status,
                           what ? what : "", why ? why : "");
        if (error)
                error->http_status = response->status;
        json_decref(body);
        return status;
}

static enum nebula_status ask(const struct azure_identity *identity, const char *form, struct http_response *ret_response, struct nebula_error *error)
{
        struct http_header headers[] = { { identity->header ? identity->header : "Content-Type",
                                           identity->header ? identity->secret : "application/x-www-form-urlencoded" } };
        struct http_request request = {
                .method = form ? "POST" : "GET", .url = identity->url, .headers = headers, .header_count = 1,
                .body = form, .body_size = form ? strlen(form) : 0, .is_local = !form, .text_max = TOKEN_MAX,
                .connect_ms = identity->is_imds ? IMDS_CONNECT_MS : 0, .retry_ms = identity->is_imds ? 5000 : 0,
        };

        return http_send(&request, ret_response, error);
}

/* Lock held. The machine's own service answers 404 and 410 while it starts or is replaced. */
static enum nebula_status fetch(struct azure_identity *identity, struct nebula_error *error)
{
        struct http_response response = { 0 };
        enum nebula_status status;
        char *form = make_form(identity, &status, error);
        int64_t pause_ms = http_settings_now().pause_ms;

        for (int tries = 0; !status && tries < IMDS_TRIES; tries++) {
                http_response_done(&response);
                status = ask(identity, form, &response, error);
                if (status || !identity->is_imds || (response.status != 404 && response.status != 410))
                        break;
                os->sleep_ms(pause_ms << tries);
        }
        if (status && identity->is_imds)
                error_prefix(error, "the environment holds no key, SAS or identity for this account, and %s does not answer", identity->name);
        else if (!status)
                status = response.status == 200 ? keep_token(identity, &response, error) : refused(identity, &response, error);
        if (response.text)
                crypt_forget(response.text, response.text_size);
        http_response_done(&response);
        forget(form);
        return status;
}

enum nebula_status azure_identity_token(struct azure_identity *identity, uint64_t refused_serial, char **ret_token, uint64_t *ret_serial,
                                        struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        int64_t now_ns;
        bool is_good;

        lock_take(&identity->lock);
        now_ns = os->now_ns();
        is_good = identity->token && now_ns < identity->until_ns && identity->serial != refused_serial;
        if (!is_good || now_ns >= identity->renew_ns) {
                status = fetch(identity, error);
                if (status && is_good) {
                        identity->renew_ns = now_ns + AGAIN_S * 1000000000LL;
                        status = NEBULA_OK;
                }
        }
        if (!status) {
                *ret_serial = identity->serial;
                *ret_token = strdup(identity->token);
                if (!*ret_token)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        }
        lock_give(&identity->lock);
        return status;
}
