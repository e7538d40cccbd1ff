/*
 * box.h - the rights that an agent keeps (os/os_box.h). NEBULA_BOX=off: all of them.
 *
 * It may start no program. Those that a cloud's settings name are started by a process that it has made before, `nebula programs` (os/process.h).
 * With NEBULA_AGENT_PATHS, directories with colons between them, it opens files below these directories alone, and below those that it needs itself.
 */
#ifndef NB_AGENT_BOX_H
#define NB_AGENT_BOX_H

#include "ipc/ipc.h"

/* Before threads start. A part that this kernel lacks is left out, and the log says so. NEBULA_UNAVAILABLE: a part
 * that it has could not be had, and NEBULA_BOX is set; else the log says so. */
enum nebula_status agent_box_enter(const struct ipc_place *place, struct nebula_error *error);

#endif
