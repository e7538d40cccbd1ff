/* The certificates that AWS's tools trust: those of AWS_CA_BUNDLE, else those of ca_bundle of the profile. */
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "store/s3/s3_private.h"

void s3_trust_find(struct http_trust *ret_trust)
{
        const char *given = conf_env("AWS_CA_BUNDLE");
        char *of_profile = given ? NULL : s3_profile_value("ca_bundle");

        if (of_profile && !*of_profile) {
                free(of_profile);
                of_profile = NULL;
        }
        *ret_trust = (struct http_trust){ given ? strdup(given) : of_profile, given ? "$AWS_CA_BUNDLE" : "ca_bundle of the profile" };
}

enum nebula_status s3_ask(struct http_request request, struct http_response *ret_response, struct nebula_error *error)
{
        enum nebula_status status;

        s3_trust_find(&request.trust);
        status = http_send(&request, ret_response, error);
        free((char *)(uintptr_t)request.trust.path);
        return status;
}
