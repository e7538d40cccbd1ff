/* writer_private.h - declarations that the files of the writer share. Only they and tests include it. */
#ifndef NB_STORE_WRITER_PRIVATE_H
#define NB_STORE_WRITER_PRIVATE_H

#include "store/writer.h"

/* writer.c: takes the step with that index. False: the list has no more. Tests stop between two steps. */
bool writer_step(struct writer *writer, enum writer_way way, size_t at, enum nebula_status *ret_status, struct nebula_error *error);

/* writer_manifest.c: the lists of the new manifest */
/* From the writer's own shares. */
enum nebula_status writer_compile(struct writer *writer, struct nebula_error *error);
/* From the records of all nodes. */
enum nebula_status writer_gather(struct writer *writer, struct nebula_error *error);

/* writer_sign.c */
/* Notes the SHA-256 of the file that was added to the manifest last. `is_believed`: its record has the own key's signature. */
enum nebula_status writer_note_digest(struct writer *writer, const struct record_file *file, bool is_believed, struct nebula_error *error);
enum nebula_status writer_sign(struct writer *writer, struct nebula_error *error);

#endif
