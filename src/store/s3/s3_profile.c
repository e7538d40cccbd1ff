/* Reads the files of AWS's command: ~/.aws/credentials, with a section [NAME] for each profile, and ~/.aws/config, with [profile NAME]. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "os/os.h"
#include "store/s3/s3_private.h"

#define FILE_MAX (1u << 20)

const char *s3_profile_name(void)
{
        return conf_env("AWS_PROFILE") ? conf_env("AWS_PROFILE") : "default";
}

/* Removes blanks at both ends of the text. */
static char *trim(char *text)
{
        size_t size;

        text += strspn(text, " \t\r");
        size = strlen(text);
        while (size && strchr(" \t\r", text[size - 1]))
                text[--size] = 0;
        return text;
}

/* Whether the line is the profile's section: "[profile name]" or "[name]". Changes the line. */
static bool is_section(char *line, const char *profile)
{
        char *end = strchr(line, ']');

        if (!end)
                return false;
        *end = 0;
        line = trim(line + 1);
        if (!strncmp(line, "profile", 7) && strchr(" \t", line[7]) && line[7])
                line = trim(line + 7);
        return !strcmp(line, profile);
}

/* The value of the name in the profile's section. Changes the text. Lines that begin with a blank belong to a nested value. */
static char *find(char *text, const char *profile, const char *name)
{
        bool is_ours = false;
        char *rest = text, *line, *value;

        while ((line = strsep(&rest, "\n"))) {
                if (*line == '[') {
                        is_ours = is_section(line, profile);
                        continue;
                }
                value = strchr(line, '=');
                if (!is_ours || !value || strchr(" \t#;", *line))
                        continue;
                *value++ = 0;
                if (!strcmp(trim(line), name))
                        return strdup(trim(value));
        }
        return NULL;
}

static char *find_in(const char *variable, const char *below_home, const char *profile, const char *name)
{
        const char *given = conf_env(variable), *home = conf_env("HOME");
        char path[4096], *text, *value;
        size_t size;

        if (!given && !home)
                return NULL;
        snprintf(path, sizeof path, "%s%s", given ? given : home, given ? "" : below_home);
        if (os_read_file(path, FILE_MAX, &text, &size))
                return NULL;
        value = find(text, profile, name);
        object_forget_bytes(text, size); /* the search has cut it */
        return value;
}

char *s3_profile_value_of(const char *profile, const char *name)
{
        char *value = find_in("AWS_SHARED_CREDENTIALS_FILE", "/.aws/credentials", profile, name);

        return value ? value : find_in("AWS_CONFIG_FILE", "/.aws/config", profile, name);
}

char *s3_profile_value(const char *name)
{
        return s3_profile_value_of(s3_profile_name(), name);
}

bool s3_profile_has(const char *profile, const char *name)
{
        char *value = s3_profile_value_of(profile, name);
        bool has = value && *value;

        object_forget(value);
        return has;
}
