#include "base/vars.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

struct vars {
        atomic_uint holders;
        size_t size;
        char origin[200];
        char text[];
};

static _Thread_local struct vars *entered;
static char own_origin[200];

bool vars_is_of_cloud(const char *name)
{
        static const char *const beginnings[] = { "AWS_", "AZURE_", "AZUREML_BLOB_", "GOOGLE_", "GS_", "IDENTITY_", "MSI_", "CLOUDSDK_" };
        static const char *const names[] = { "DEFAULT_IDENTITY_CLIENT_ID", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST", "NEBULA_S3_STYLE" };

        for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
                if (!strncmp(name, beginnings[i], strlen(beginnings[i])))
                        return true;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
                if (!strncmp(name, names[i], strlen(names[i])) && (!name[strlen(names[i])] || name[strlen(names[i])] == '='))
                        return true;
        return false;
}

struct vars *vars_new(const char *text, size_t size, const char *origin)
{
        struct vars *vars = malloc(sizeof *vars + size + 1);

        if (!vars)
                return NULL;
        atomic_init(&vars->holders, 1);
        vars->size = size;
        snprintf(vars->origin, sizeof vars->origin, "%s", origin);
        memcpy(vars->text, text, size);
        vars->text[size] = 0;
        return vars;
}

struct vars *vars_collect(char *const *environment)
{
        struct buf buf = { .is_secret = true };
        struct vars *vars = NULL;

        for (size_t i = 0; environment && environment[i]; i++)
                if (vars_is_of_cloud(environment[i]))
                        buf_add(&buf, environment[i], strlen(environment[i]) + 1);
        if (buf.size && buf.size <= VARS_MAX && !buf.failed)
                vars = vars_new((const char *)buf.data, buf.size, "");
        buf_done(&buf);
        return vars;
}

const char *vars_text(const struct vars *vars, size_t *ret_size)
{
        *ret_size = vars ? vars->size : 0;
        return vars ? vars->text : "";
}

struct vars *vars_hold(struct vars *vars)
{
        if (vars)
                atomic_fetch_add(&vars->holders, 1);
        return vars;
}

void vars_drop(struct vars *vars)
{
        if (!vars || atomic_fetch_sub(&vars->holders, 1) != 1)
                return;
        explicit_bzero(vars->text, vars->size);
        free(vars);
}

bool vars_same(const struct vars *a, const struct vars *b)
{
        return a == b || (a && b && a->size == b->size && !memcmp(a->text, b->text, a->size));
}

struct vars *vars_enter(struct vars *vars)
{
        struct vars *before = entered;

        entered = vars;
        return before;
}

void vars_leave(struct vars *before)
{
        entered = before;
}

struct vars *vars_now(void)
{
        return entered;
}

const char *vars_value(const char *name)
{
        size_t length = strlen(name);

        for (const char *at = entered->text; at < entered->text + entered->size; at += strlen(at) + 1)
                if (!strncmp(at, name, length) && at[length] == '=')
                        return at + length + 1;
        return NULL;
}

const char *vars_origin(void)
{
        return entered ? entered->origin : own_origin;
}

void vars_own_origin(const char *origin)
{
        snprintf(own_origin, sizeof own_origin, "%s", origin);
}
