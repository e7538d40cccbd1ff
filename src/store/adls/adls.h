/*
 * adls.h - the driver of Azure Data Lake Storage: accounts with a hierarchical namespace, through the dfs endpoint (store.h says what a
 * driver promises).
 *
 *      abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX
 *
 * An object is a file. Every write makes a temporary file `.nebula-tmp-...`, appends to it and flushes it; a rename with a condition makes
 * it the object. A directory is made with its first file, and removed with its last. Files get the access rights of the default ACL of the
 * directory PREFIX. Credentials and transport are those of the driver of Azure Blob Storage.
 */
#ifndef NB_STORE_ADLS_ADLS_H
#define NB_STORE_ADLS_ADLS_H

#include "store/store.h"

extern const struct store_ops store_adls;
bool store_adls_takes(const char *url);

#endif
