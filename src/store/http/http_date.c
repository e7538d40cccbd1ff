/* Dates in HTTP's format, in English and in UTC, in any locale; and those of ISO 8601. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "store/http/http.h"

static const char days[7][4] = { "Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat" };
static const char months[12][4] = { "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec" };

void http_date_format(int64_t seconds, char ret_text[HTTP_DATE_SIZE])
{
        time_t time = (time_t)seconds;
        struct tm tm;

        gmtime_r(&time, &tm);
        snprintf(ret_text, HTTP_DATE_SIZE, "%s, %02u %s %04u %02u:%02u:%02u GMT", days[tm.tm_wday % 7], (unsigned)tm.tm_mday % 100,
                 months[tm.tm_mon % 12], (unsigned)(tm.tm_year + 1900) % 10000, (unsigned)tm.tm_hour % 100, (unsigned)tm.tm_min % 100,
                 (unsigned)tm.tm_sec % 100);
}

bool http_date_parse(const char *text, int64_t *ret_seconds)
{
        struct tm tm = { 0 };
        char month[4], zone[4];
        int end = 0;

        if (sscanf(text, "%*3[A-Za-z], %2d %3[A-Za-z] %4d %2d:%2d:%2d %3s%n", &tm.tm_mday, month, &tm.tm_year, &tm.tm_hour, &tm.tm_min,
                   &tm.tm_sec, zone, &end) != 7 || text[end] || strcmp(zone, "GMT"))
                return false;
        for (tm.tm_mon = 0; tm.tm_mon < 12 && strcmp(month, months[tm.tm_mon]); tm.tm_mon++)
                ;
        if (tm.tm_mon == 12 || tm.tm_year < 1970 || tm.tm_mday < 1 || tm.tm_mday > 31 || tm.tm_hour > 23 || tm.tm_min > 59 ||
            tm.tm_sec > 60)
                return false;
        tm.tm_year -= 1900;
        *ret_seconds = (int64_t)timegm(&tm);
        return true;
}

bool http_date_parse_iso(const char *text, int64_t *ret_seconds)
{
        struct tm tm = { 0 }, zone = { 0 };
        const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);

        if (!rest)
                return false;
        rest += *rest == '.' ? 1 + strspn(rest + 1, "0123456789") : 0;
        strptime(rest, "%z", &zone);
        *ret_seconds = (int64_t)timegm(&tm) - zone.tm_gmtoff;
        return true;
}
