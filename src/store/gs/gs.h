/*
 * gs.h - the driver of Google Cloud Storage, by its XML API (store.h says what a driver promises).
 *
 *      gs://BUCKET/PREFIX
 *
 * The API is like S3, so this driver uses files of the S3 driver. Three things differ:
 *   - A stamp is the object's generation, which is different for each write.
 *   - Bodies carry their CRC-32C.
 *   - Completing a multipart upload takes no condition. So the upload makes a temporary object. A composition, which takes a condition and
 *     moves no bytes, makes the object from it.
 */
#ifndef NB_STORE_GS_GS_H
#define NB_STORE_GS_GS_H

#include "store/store.h"

extern const struct store_ops store_gs;
bool store_gs_takes(const char *url);

#endif
