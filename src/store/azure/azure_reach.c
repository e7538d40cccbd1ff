/* Describes the credential and the transport of the store. */
#include <stdio.h>
#include <string.h>

#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/http.h"

/* A parameter of a SAS that is not secret, decoded. */
static void sas_param(const char *sas, const char *name, char *ret_text, size_t size)
{
        size_t length = strlen(name), used = 0;

        *ret_text = 0;
        for (const char *at = sas; at; at = strchr(at, '&')) {
                at += *at == '&';
                if (strncmp(at, name, length) || at[length] != '=')
                        continue;
                for (at += length + 1; *at && *at != '&' && used + 1 < size; at++) {
                        unsigned byte;

                        if (*at == '%' && sscanf(at, "%%%2x", &byte) == 1) {
                                ret_text[used++] = (char)byte;
                                at += 2;
                        } else {
                                ret_text[used++] = *at;
                        }
                }
                ret_text[used] = 0;
                return;
        }
}

/* Whether the time is past. All times are UTC in ISO 8601, so they compare as texts. A date alone is the beginning of its day. */
static bool is_past(const char *end)
{
        char now[HTTP_DATE_SIZE + 8], date[HTTP_DATE_SIZE], month[4];
        int day, year, hour, minute, second;
        static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";

        http_date_format(os->wall_ns() / 1000000000, date);
        if (sscanf(date, "%*3s, %d %3s %d %d:%d:%d", &day, month, &year, &hour, &minute, &second) != 6)
                return false;
        snprintf(now, sizeof now, "%04d-%02d-%02dT%02d:%02d", year % 10000, (int)(strstr(months, month) - months) / 3 + 1, day % 100, hour % 100,
                 minute % 100);
        return *end && strncmp(end, now, 16) < 0;
}

enum nebula_status azure_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        const struct azure_credential *credential = &azure->credential;
        struct store_reach reach = { 0 };
        char end[40], may[40];
        enum nebula_status status = azure_find_credential(azure, error);

        if (status)
                return status;
        http_describe(azure->address.endpoint, reach.transport, sizeof reach.transport);
        switch (credential->proof) {
        case AZURE_PROOF_KEY:
                snprintf(reach.credential, sizeof reach.credential, "the key of account %s, from %s", azure->address.account, credential->source);
                break;
        case AZURE_PROOF_SAS:
                sas_param(credential->sas, "se", end, sizeof end);
                sas_param(credential->sas, "sp", may, sizeof may);
                reach.is_expired = is_past(end);
                snprintf(reach.credential, sizeof reach.credential, "%s, permissions %s, valid until %s", credential->source,
                         *may ? may : "as its policy says", *end ? end : "its policy ends");
                break;
        default:
                snprintf(reach.credential, sizeof reach.credential, "tokens for %s", credential->source);
        }
        *ret_reach = reach;
        return NEBULA_OK;
}
