#include "base/conf.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/vars.h"

const char *conf_env(const char *name)
{
        const char *value = vars_now() && vars_is_of_cloud(name) ? vars_value(name) : getenv(name);

        return value && *value ? value : NULL;
}

static const char *skip_blanks(const char *text)
{
        return text + strspn(text, " \t");
}

/*
 * Parses a plain decimal number, at least 0. Returns the rest of the text; NULL if there is no number. strtod would
 * also accept "nan", "0x10" and, in some locales, a comma.
 */
static const char *read_decimal(const char *text, double *ret_value)
{
        double value = 0, scale = 1;
        bool any = false;

        for (; *text >= '0' && *text <= '9'; text++, any = true)
                value = value * 10 + (*text - '0');
        if (*text == '.') {
                for (text++; *text >= '0' && *text <= '9'; text++, any = true)
                        value += (*text - '0') * (scale /= 10);
        }
        if (!any)
                return NULL;
        *ret_value = value;
        return skip_blanks(text);
}

static bool ends(const char *text)
{
        return *skip_blanks(text) == '\0';
}

enum nebula_status conf_parse_size(const char *what, const char *text, uint64_t *ret_bytes, struct nebula_error *error)
{
        static const char units[] = "KMGT";
        double value, bytes;
        const char *rest = read_decimal(skip_blanks(text), &value), *unit;

        if (!rest)
                goto invalid;
        bytes = value;
        unit = *rest ? strchr(units, *rest & ~0x20) : NULL; /* upper case */
        if (unit) {
                bytes = value * (double)(UINT64_C(1) << (10 * (unit - units + 1)));
                rest++;
        }
        if (unit && (rest[0] == 'i' || rest[0] == 'I') && (rest[1] == 'b' || rest[1] == 'B'))
                rest += 2;
        else if (rest[0] == 'b' || rest[0] == 'B')
                rest++;
        if (!ends(rest) || bytes >= 0x1p63)
                goto invalid;
        *ret_bytes = (uint64_t)bytes;
        return NEBULA_OK;
invalid:
        return error_set(error, NEBULA_INVALID, 0, "%s is \"%s\", not a size such as 512M or 4G", what, text);
}

enum nebula_status conf_parse_duration(const char *what, const char *text, double *ret_seconds, struct nebula_error *error)
{
        static const struct {
                const char *name;
                double seconds;
        } units[] = { { "", 1 }, { "s", 1 }, { "ms", 1e-3 }, { "m", 60 }, { "h", 3600 }, { "d", 86400 } };
        double value;
        const char *rest = read_decimal(skip_blanks(text), &value);
        size_t length = rest ? strcspn(rest, " \t") : 0;

        if (rest && ends(rest + length)) {
                for (size_t k = 0; k < sizeof units / sizeof units[0]; k++) {
                        if (strlen(units[k].name) == length && strncasecmp(rest, units[k].name, length) == 0) {
                                *ret_seconds = value * units[k].seconds;
                                return NEBULA_OK;
                        }
                }
        }
        return error_set(error, NEBULA_INVALID, 0, "%s is \"%s\", not a time such as 100, 250ms or 15m", what, text);
}

enum nebula_status conf_parse_number(const char *what, const char *text, double *ret_value, struct nebula_error *error)
{
        double value;
        const char *rest = read_decimal(skip_blanks(text), &value);

        if (!rest || !ends(rest))
                return error_set(error, NEBULA_INVALID, 0, "%s is \"%s\", not a number such as 2 or 0.5", what, text);
        *ret_value = value;
        return NEBULA_OK;
}

enum nebula_status conf_parse_count(const char *what, const char *text, uint64_t max, uint64_t *ret_count,
                                    struct nebula_error *error)
{
        const char *rest = skip_blanks(text);
        uint64_t value = 0;
        bool any = false, fits = true;

        for (; *rest >= '0' && *rest <= '9'; rest++, any = true)
                fits = fits && !__builtin_mul_overflow(value, 10u, &value) &&
                       !__builtin_add_overflow(value, (uint64_t)(*rest - '0'), &value);
        if (!any || !ends(rest) || !fits || value > max)
                return error_set(error, NEBULA_INVALID, 0, "%s is \"%s\", not a whole number up to %llu", what, text,
                                 (unsigned long long)max);
        *ret_count = value;
        return NEBULA_OK;
}
