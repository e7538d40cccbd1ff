/* follow_best.h - which checkpoint is the best so far by a metric, for `nebula follow --best`. */
#ifndef NB_CLI_FOLLOW_BEST_H
#define NB_CLI_FOLLOW_BEST_H

#include <jansson.h>
#include <stdbool.h>

#include "nebula.h"

struct follow_best {
        char metric[256];
        bool is_largest, has_limit;
        double limit;  /* the best value so far, if has_limit */
        json_t *known; /* values by "tag/time of the commit"; null: it has none */
};

/* Reads "METRIC", "METRIC:min" or "METRIC:max". False: it is none of these. */
bool follow_best_parse(const char *text, struct follow_best *ret_best);
/* Finds the best checkpoint that is better than those before. *ret_found is NULL: there is none. */
enum nebula_status follow_best_find(struct follow_best *best, nebula_session *session, nebula_checkpoint **ret_found, struct nebula_error *error);
void follow_best_done(struct follow_best *best);

#endif
