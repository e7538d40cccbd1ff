/* writer_private.h - declarations that the files of the writer share. Only they include it. */
#ifndef NB_STORE_WRITER_PRIVATE_H
#define NB_STORE_WRITER_PRIVATE_H

#include "store/writer.h"

/* writer_manifest.c: the lists of the new manifest */
/* From the writer's own shares. */
enum nebula_status writer_compile(struct writer *writer, struct nebula_error *error);
/* From the records of all nodes. */
enum nebula_status writer_gather(struct writer *writer, struct nebula_error *error);

#endif
