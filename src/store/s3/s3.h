/*
 * s3.h - the driver of Amazon S3 and of stores that speak its protocol (store.h says what a driver promises).
 *
 *      s3://BUCKET/PREFIX
 *
 * An object has the name PREFIX/key. A small one is one PutObject. A large one is a multipart upload, whose parts S3 keeps unseen until
 * CompleteMultipartUpload makes them the object. Every write leaves a number of its own in the object's metadata (x-amz-meta-nebula), by
 * which the driver recognises what it wrote when the answer was lost.
 *
 * A stamp is an ETag. Of a body in one part that is its MD5, so two writes of equal bytes have one stamp.
 *
 * docs/storage.md lists the credentials and their order.
 */
#ifndef NB_STORE_S3_S3_H
#define NB_STORE_S3_S3_H

#include "store/store.h"

extern const struct store_ops store_s3;
bool store_s3_takes(const char *url);

#endif
