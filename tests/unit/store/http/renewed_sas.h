/* renewed_sas.h - a SAS in the file of AZURE_STORAGE_SAS_TOKEN_FILE that another program renews while the driver uses it. */
#ifndef NB_TESTS_STORE_RENEWED_SAS_H
#define NB_TESTS_STORE_RENEWED_SAS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/http/server.h"

static struct {
        char file[32];
        bool is_new; /* the server takes the new SAS alone, else the old one */
} renewed_sas;

static void renewed_sas_write(bool is_new)
{
        FILE *file = fopen(renewed_sas.file, "w");

        if (!file || fprintf(file, "sv=1&sig=%s\n", is_new ? "NEW" : "OLD") < 0 || fclose(file))
                abort();
        renewed_sas.is_new = is_new;
}

static void renewed_sas_begin(void)
{
        strcpy(renewed_sas.file, "/tmp/nebula-sas-XXXXXX");
        if (close(mkstemp(renewed_sas.file)))
                abort();
        renewed_sas_write(false);
        setenv("AZURE_STORAGE_SAS_TOKEN_FILE", renewed_sas.file, 1);
}

static void renewed_sas_end(void)
{
        unsetenv("AZURE_STORAGE_SAS_TOKEN_FILE");
        unlink(renewed_sas.file);
}

/* Whether the server takes the request: its URL, and `source` unless it is "", have the SAS that counts now. */
static bool renewed_sas_takes(const struct server_call *call, const char *source)
{
        const char *sas = renewed_sas.is_new ? "sv=1&sig=NEW" : "sv=1&sig=OLD";

        return strstr(call->target, sas) && (!*source || strstr(source, sas));
}

#endif
