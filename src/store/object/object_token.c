/* Secrets that expire: bearer tokens, and keys that a service lends. The whole process keeps one and replaces it some minutes before its
 * end, because such services refuse clients that ask for each request. One thread fetches. Meanwhile the others use the old secret while
 * it is valid, or wait for the new one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define EARLY_S 300 /* a token is replaced so long before its end, or in the last half of a short lifetime */
#define AGAIN_S 30  /* after a failure, while the old token is still valid */
#define LONG_S (7 * 86400)

struct object_token {
        struct object_token *next;
        uint8_t identity[CRYPT_SHA256_BYTES];
        struct vars *vars; /* with which it is fetched */
        unsigned holders;  /* guarded by tokens_lock, as is_cleared is */
        bool is_cleared;   /* object_token_forget_all was called: of no use any more */
        object_token_fetch *fetch;
        void *source;
        void (*done)(void *source);
        struct lock lock; /* guards the rest */
        pthread_cond_t fetched;
        char *text;
        uint64_t serial;  /* of the text; 0: there is none */
        int64_t until_ns, renew_ns;
        bool is_fetching;            /* a thread is fetching, without the lock */
        uint64_t fetches;            /* that have ended */
        struct nebula_error failure; /* of the last one, if it failed */
};

static struct lock tokens_lock = LOCK_INIT(LOCK_OBJECT_TOKENS);
static struct object_token *tokens, *cleared;

/* Lock held. */
static struct object_token *find(const uint8_t identity[CRYPT_SHA256_BYTES])
{
        struct object_token *token = tokens;

        while (token && (memcmp(token->identity, identity, CRYPT_SHA256_BYTES) || !vars_same(token->vars, vars_now())))
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
                made->vars = vars_hold(vars_now());
                lock_init(&made->lock, LOCK_OBJECT_TOKEN);
                os_cond_init(&made->fetched);
                made->next = tokens;
                tokens = made;
        }
        found->holders++;
        lock_give(&tokens_lock);
        if (found != made) {
                free(made);
                source->done(source->source);
        }
        return found;
}

void *object_token_source(const struct object_token *token)
{
        return token->source;
}

/* Without its memory, which a holder may still point to. */
static void clear(struct object_token *token)
{
        token->done(token->source);
        object_forget(token->text);
        vars_drop(token->vars);
        token->text = NULL;
        token->vars = NULL;
}

static void token_free(struct object_token *token)
{
        lock_done(&token->lock);
        pthread_cond_destroy(&token->fetched);
        free(token);
}

void object_token_drop(struct object_token *token)
{
        struct object_token **link;
        bool is_last, is_cleared;

        if (!token)
                return;
        lock_take(&tokens_lock);
        is_last = !--token->holders;
        is_cleared = token->is_cleared;
        link = is_cleared ? &cleared : &tokens;
        while (is_last && *link != token)
                link = &(*link)->next;
        if (is_last)
                *link = token->next;
        lock_give(&tokens_lock);
        if (is_last && !is_cleared)
                clear(token); /* it may hold another token */
        if (is_last)
                token_free(token);
}

void object_token_forget_all(void)
{
        struct object_token *token;

        for (;;) {
                lock_take(&tokens_lock);
                token = tokens;
                if (token) {
                        tokens = token->next;
                        token->next = cleared;
                        token->is_cleared = true;
                        token->holders++;
                        cleared = token;
                }
                lock_give(&tokens_lock);
                if (!token)
                        return;
                clear(token);
                object_token_drop(token);
        }
}

/* Lock held. Takes over the text. */
static void replace(struct object_token *token, char *text, int64_t life)
{
        int64_t early, now_ns = os->now_ns();

        life = life < 0 ? 0 : life > LONG_S ? LONG_S : life;
        early = life / 2 < EARLY_S ? life / 2 : EARLY_S;
        object_forget(token->text);
        token->text = text;
        token->serial++;
        token->until_ns = now_ns + life * SECOND_NS;
        token->renew_ns = now_ns + (life - early) * SECOND_NS;
}

/* Lock held, but released during the fetch. */
static void renew(struct object_token *token)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status;
        char *text = NULL;
        int64_t life = 0;

        token->is_fetching = true;
        lock_give(&token->lock);
        status = token->fetch(token->source, &text, &life, &failure);
        lock_take(&token->lock);
        if (status)
                token->renew_ns = os->now_ns() + AGAIN_S * 1000000000LL;
        else
                replace(token, text, life);
        token->failure = failure;
        token->failure.status = status;
        token->fetches++;
        token->is_fetching = false;
        pthread_cond_broadcast(&token->fetched);
}

/* Lock held. False: the running fetch has not ended in time. */
static bool wait_for_fetch(struct object_token *token)
{
        struct http_settings settings = http_settings_now();
        int64_t until_ns = os->now_ns() + (settings.retry_ms + settings.answer_ms) * 1000000, left_ns;
        uint64_t fetches = token->fetches;

        while (token->fetches == fetches) {
                left_ns = until_ns - os->now_ns();
                if (left_ns <= 0)
                        return false;
                lock_wait_for(&token->lock, &token->fetched, left_ns / 1000000 + 1);
        }
        return true;
}

/* Lock held. */
static bool is_good(const struct object_token *token, uint64_t refused)
{
        return token->text && os->now_ns() < token->until_ns && token->serial != refused;
}

/* Lock held. On success the text is valid. */
static enum nebula_status make_good(struct object_token *token, uint64_t refused, struct nebula_error *error)
{
        bool is_ours = !token->is_fetching;

        if (is_good(token, refused) && (!is_ours || os->now_ns() < token->renew_ns))
                return NEBULA_OK;
        if (is_ours)
                renew(token);
        else if (!wait_for_fetch(token))
                return error_set(error, NEBULA_TIMEOUT, 0, "no token yet: the thread that asks for one has waited too long");
        if (!token->failure.status || is_good(token, refused)) /* a new token that expires at once is tried, too */
                return NEBULA_OK;
        if (error)
                *error = token->failure;
        return token->failure.status;
}

enum nebula_status object_token_get(struct object_token *token, uint64_t refused, char **ret_text, uint64_t *ret_serial,
                                    struct nebula_error *error)
{
        enum nebula_status status;

        lock_take(&token->lock);
        status = make_good(token, refused, error);
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
        struct buf buf = { .is_secret = true };
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
