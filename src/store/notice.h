/*
 * notice.h - whether a cloud is about to take this machine. Its metadata service says so.
 *
 * Only programs with the drivers of cloud.h ask: cloud_offer registers the function.
 */
#ifndef NB_STORE_NOTICE_H
#define NB_STORE_NOTICE_H

#include <stdbool.h>

#include "nebula.h"

#define NOTICE_CLOUDS (NEBULA_CLOUD_GCE + 1)
#define NOTICE_KEPT_MAX 1024 /* the machine's name, or a token */

struct notice {
        bool is_there;
        double seconds; /* until the machine goes */
        char text[128]; /* the announcement, for people */
};

/* Asks once, for 4 s at most. `kept` starts as "", and keeps what stays the same from one question to the next. */
typedef enum nebula_status notice_ask(enum nebula_cloud cloud, char kept[NOTICE_KEPT_MAX], struct notice *ret_notice, struct nebula_error *error);

notice_ask metadata_ask; /* of the cloud's library */
void notice_offer(notice_ask *ask);
/* NEBULA_INVALID: this program has no function that asks. Any other error: the service does not answer, or not as it should. */
notice_ask notice_get;

#endif
