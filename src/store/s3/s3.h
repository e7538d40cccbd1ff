/*
 * s3.h - the driver of Amazon S3 and of stores that speak its protocol (store.h says what a driver promises).
 *
 *      s3://BUCKET/PREFIX
 *
 * An object has the name PREFIX/key. A small one takes one PutObject. A large one is a multipart upload; S3 does not show the parts until
 * CompleteMultipartUpload makes them the object. Every write stores an id of its own in the object's metadata (x-amz-meta-nebula). If an
 * answer is lost, the driver recognizes its write by that id.
 *
 * A stamp is an ETag. For a body in one part the ETag is its MD5, so two writes of equal bytes have one stamp.
 *
 * docs/storage.md lists the credentials and their order.
 */
#ifndef NB_STORE_S3_S3_H
#define NB_STORE_S3_S3_H

#include "store/store.h"

extern const struct store_ops store_s3;
bool store_s3_takes(const char *url);

#endif
