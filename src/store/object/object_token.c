/*
 * Secrets that end: bearer tokens, and keys that a service lends. One is kept for the whole process and replaced some minutes before it
 * ends, because a service that hands them out refuses those who ask for each request.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define EARLY_S 300 /* a token is replaced so long before its end, or in the last half of a short life */
#define AGAIN_S 30  /* after a failure, while the old token is still good */
#define LONG_S (7 * 86400)

struct object_token {
        struct object_token *next;
        uint8_t identity[CRYPT_SHA256_BYTES];
        object_token_fetch *fetch;
        void *source;
        void (*done)(void *source);
        struct lock lock; /* guards the rest; held while a token is fetched, for which all wait alike */
        char *text;
        uint64_t serial;  /* of the text; 0: there is none */
        int64_t until_ns, renew_ns;
};

static struct lock tokens_lock = LOCK_INIT(LOCK_OBJECT_TOKENS);
static struct object_token *tokens;

/* Lock held. */
static struct object_token *find(const uint8_t identity[CRYPT_SHA256_BYTES])
{
        struct object_token *token = tokens;

        while (token && memcmp(token->identity, identity, CRYPT_SHA256_BYTES))
                token = token->next;
        return token;
}

struct object_token *object_token_find(const struct object_token_source *source)
{
        struct object_token *made = calloc(1, sizeof *made), *found = NULL;

        if (!made || !crypt_sha256(source->identity, strlen(source->identity), made->identity)) {
                free(made);
                source->done(source->source);
                return NULL;
        }
        lock_take(&tokens_lock);
        found = find(made->identity);
        if (!found) {
                found = made;
                made->fetch = source->fetch;
                made->source = source->source;
                made->done = source->done;
                lock_init(&made->lock, LOCK_OBJECT_TOKEN);
                made->next = tokens;
                tokens = made;
        }
        lock_give(&tokens_lock);
        if (found != made) {
                free(made);
                source->done(source->source);
        }
        return found;
}

void object_token_forget_all(void)
{
        lock_take(&tokens_lock);
        while (tokens) {
                struct object_token *next = tokens->next;

                lock_done(&tokens->lock);
                tokens->done(tokens->source);
                object_forget(tokens->text);
                free(tokens);
                tokens = next;
        }
        lock_give(&tokens_lock);
}

/* Lock held. */
static enum nebula_status renew(struct object_token *token, struct nebula_error *error)
{
        int64_t life, early, now_ns;
        char *text;
        enum nebula_status status = token->fetch(token->source, &text, &life, error);

        if (status)
                return status;
        life = life < 0 ? 0 : life > LONG_S ? LONG_S : life;
        early = life / 2 < EARLY_S ? life / 2 : EARLY_S;
        now_ns = os->now_ns();
        object_forget(token->text);
        token->text = text;
        token->serial++;
        token->until_ns = now_ns + life * 1000000000;
        token->renew_ns = now_ns + (life - early) * 1000000000;
        return NEBULA_OK;
}

enum nebula_status object_token_get(struct object_token *token, uint64_t refused, char **ret_text, uint64_t *ret_serial,
                                    struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        int64_t now_ns;
        bool is_good;

        lock_take(&token->lock);
        now_ns = os->now_ns();
        is_good = token->text && now_ns < token->until_ns && token->serial != refused;
        if (!is_good || now_ns >= token->renew_ns) {
                status = renew(token, error);
                if (status && is_good) {
                        token->renew_ns = now_ns + AGAIN_S * 1000000000LL;
                        status = NEBULA_OK;
                }
        }
        if (!status) {
                *ret_serial = token->serial;
                *ret_text = strdup(token->text);
                if (!*ret_text)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        }
        lock_give(&token->lock);
        return status;
}

enum nebula_status object_token_sign(struct object_token *token, uint64_t *serial, bool was_refused, struct http_fields *fields,
                                     struct nebula_error *error)
{
        struct buf buf = { 0 };
        char *text, *value;
        enum nebula_status status = object_token_get(token, was_refused ? *serial : 0, &text, serial, error);

        if (status)
                return status;
        buf_add_text(&buf, "Bearer ");
        buf_add_text(&buf, text);
        value = object_take(&buf);
        if (value)
                http_fields_add(fields, "Authorization", value);
        else
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        object_forget(text);
        object_forget(value);
        return status;
}
