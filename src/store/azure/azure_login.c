/* Tokens of the user who has logged in with the `az` command of Azure. */
#include <jansson.h>

#include "base/error.h"
#include "store/azure/azure_private.h"

#define NAME "`az account get-access-token`"
#define TIMEOUT_MS 60000

/* Prints an empty object if the machine has no `az`. */
#define COMMAND "command -v az >/dev/null || { echo '{}'; exit; }; exec az account get-access-token --output json --resource " AZURE_RESOURCE

enum nebula_status azure_login(void *unused, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        json_t *printed;
        enum nebula_status status = object_program_run(NAME, COMMAND, TIMEOUT_MS, &printed, error);

        (void)unused;
        if (status)
                return status;
        if (json_is_object(printed) && !json_object_size(printed)) {
                json_decref(printed);
                return error_set(error, NEBULA_NOT_FOUND, 0, "this machine has no az command");
        }
        *ret_text = object_oauth_read(printed, "accessToken", ret_life_s);
        return *ret_text ? NEBULA_OK : error_set(error, NEBULA_UNAVAILABLE, 0, NAME " does not print a JSON object with accessToken");
}
