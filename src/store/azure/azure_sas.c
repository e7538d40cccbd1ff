/* Reads the parameters of a SAS: its end and its permissions. */
#include <stdio.h>
#include <string.h>

#include "os/os.h"
#include "store/azure/azure_private.h"

void azure_sas_param(const char *sas, const char *name, char *ret_text, size_t size)
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

/* All times are UTC in ISO 8601, so they compare as texts. A date alone is the beginning of its day. */
bool azure_sas_is_past(const char *end)
{
        char now[HTTP_DATE_SIZE + 8], date[HTTP_DATE_SIZE], month[4];
        int day, year, hour, minute, second;
        static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";

        http_date_format(os->wall_ns() / SECOND_NS, date);
        if (sscanf(date, "%*3s, %d %3s %d %d:%d:%d", &day, month, &year, &hour, &minute, &second) != 6)
                return false;
        snprintf(now, sizeof now, "%04d-%02d-%02dT%02d:%02d:%02d", year % 10000, (int)(strstr(months, month) - months) / 3 + 1, day % 100,
                 hour % 100, minute % 100, second % 100);
        return *end && strncmp(end, now, 19) < 0;
}

/* The permission that a deed takes and the SAS lacks; 0: none. */
static char missing(const char *permissions, enum object_deed deed)
{
        static const char *const needed[] = {
                [OBJECT_READ] = "r", [OBJECT_LIST] = "l", [OBJECT_WRITE] = "w", [OBJECT_REMOVE] = "d", [OBJECT_COPY] = "rw",
        };

        for (const char *one = needed[deed]; *one; one++)
                if (!strchr(permissions, *one))
                        return *one;
        return 0;
}

void azure_sas_advice(const struct azure_credential *credential, enum object_deed deed, char *ret_text, size_t size)
{
        char end[40], may[40], lacks;
        const char *remedy = credential->sas_file ? "write a new one into that file"
                             : credential->place  ? "start again with a new one in the path; AZURE_STORAGE_SAS_TOKEN_FILE names a file whose SAS can be replaced"
                                                  : "AZURE_STORAGE_SAS_TOKEN_FILE names a file whose SAS can be replaced";

        *ret_text = 0;
        azure_sas_param(credential->sas, "se", end, sizeof end);
        azure_sas_param(credential->sas, "sp", may, sizeof may);
        if (azure_sas_is_past(end))
                snprintf(ret_text, size, "%s has expired, at %s; %s", credential->source, end, remedy);
        else if (*may && (lacks = missing(may, deed)))
                snprintf(ret_text, size, "%s has sp=%s and lacks %c; writing takes a SAS with sp=rcwdl, reading one with sp=rl", credential->source, may, lacks);
}
