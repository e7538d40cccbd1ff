/* Describes the credential and the transport of the store. */
#include <stdio.h>
#include <string.h>

#include "store/azure/azure_private.h"
#include "store/http/http.h"

enum nebula_status azure_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        const struct azure_credential *credential = &azure->credential;
        struct store_reach reach = { 0 };
        char end[40], may[40], *token;
        uint64_t serial;
        enum nebula_status status = azure_find_credential(azure, error);

        if (!status && credential->proof == AZURE_PROOF_TOKEN) { /* of two identities, this shows which one gives tokens */
                status = object_token_get(credential->identity, 0, &token, &serial, error);
                if (!status)
                        object_forget(token);
        }
        if (status)
                return status;
        http_describe(azure->address.endpoint, &azure->object.trust, reach.transport, sizeof reach.transport);
        switch (credential->proof) {
        case AZURE_PROOF_KEY:
                snprintf(reach.credential, sizeof reach.credential, "the key of account %s, from %s", azure->address.account, credential->source);
                break;
        case AZURE_PROOF_SAS:
                azure_sas_param(credential->sas, "se", end, sizeof end);
                azure_sas_param(credential->sas, "sp", may, sizeof may);
                reach.is_expired = azure_sas_is_past(end);
                snprintf(reach.credential, sizeof reach.credential, "%s, permissions %s, valid until %s", credential->source,
                         *may ? may : "as its policy says", *end ? end : "its policy ends");
                break;
        default:
                snprintf(reach.credential, sizeof reach.credential, "tokens for %s", azure_credential_name(credential));
        }
        *ret_reach = reach;
        return NEBULA_OK;
}
