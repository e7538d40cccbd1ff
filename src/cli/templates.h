/* templates.h - the processes of `nebula run` on this node from which warm workers are forked. They leave a file `template-<pid>` beside the agent's. */
#ifndef NB_CLI_TEMPLATES_H
#define NB_CLI_TEMPLATES_H

#include <jansson.h>

/* [{"pid", "memory"}]: bytes, those that it shares with its workers counted once. NULL: no memory. */
json_t *templates_list(void);
void templates_print(void);

#endif
