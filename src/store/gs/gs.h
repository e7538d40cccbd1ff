/*
 * gs.h - the driver of Google Cloud Storage, by its XML API (store.h says what a driver promises).
 *
 *      gs://BUCKET/PREFIX
 *
 * The API is like S3, whose files this driver uses. Three things differ. A stamp is the object's generation, which no other write has.
 * Bodies carry their CRC-32C. And to complete a multipart upload replaces what is there: so it makes a temporary object, from which a
 * composition, which takes a condition and moves no bytes, makes the object.
 */
#ifndef NB_STORE_GS_GS_H
#define NB_STORE_GS_GS_H

#include "store/store.h"

extern const struct store_ops store_gs;
bool store_gs_takes(const char *url);

#endif
